"""`quarantine/` of a run folder: items that are no longer processed, for their processes died of them again and again.

quarantine/task-17.json    see `QuarantinedItem`
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rlinf_core.foreign.file_models import FileModel, Moment, Name, Step, read_model
from rlinf_core.foreign.files import make_folder
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners.storage import durable

FOLDER: Final = "quarantine"
_MOST_BYTES: Final = 1 << 20
_MOST_READ: Final = 1000


class QuarantinedItem(FileModel):
    """An item that was set aside.

    Attributes:
        kind: the kind of the item, as in `task`.
        item: which one, as in the number of its row in the data.
        step: the step that it was for; 0: an evaluation.
        time: when it was set aside, in seconds since 1970.
        deaths: how the processes died that it was given to, one line each.
        replay: what `rlinf replay` needs to do it again; empty where that cannot be done alone.
    """

    schema_: Annotated[Literal["rlinf.quarantine/1"], Field(alias="schema")]
    kind: Name
    item: Name
    step: Step = 0
    time: Moment
    deaths: list[Annotated[str, Field(max_length=1 << 16)]] = Field(default_factory=list[str])
    replay: dict[str, Any] = Field(default_factory=dict[str, Any])


def quarantine(
    run_folder: Path, kind: str, item: str, step: int, deaths: Sequence[str], replay: Mapping[str, Any] | None = None
) -> Path:
    """Keep what is known of an item that is set aside; return the file.

    Raises:
        OSError: it cannot be written.
    """
    content = QuarantinedItem.model_validate(
        {
            "schema": "rlinf.quarantine/1",
            "kind": kind,
            "item": item,
            "step": step,
            "time": time.time(),
            "deaths": [hidden(death)[: 1 << 16] for death in deaths],
            "replay": dict(replay or {}),
        }
    )
    make_folder(run_folder / FOLDER)
    path = run_folder / FOLDER / f"{kind}-{item}.json"
    durable.write_whole(path, content.model_dump_json(by_alias=True, indent=1) + "\n")
    return path


def read_quarantine(run_folder: Path) -> dict[str, QuarantinedItem]:
    """Return the items that a run set aside, by the name of their file; what cannot be read is left out."""
    items: dict[str, QuarantinedItem] = {}
    try:
        with os.scandir(run_folder / FOLDER) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_READ) if entry.name.endswith(".json"))
    except OSError:
        return items
    for name in names:
        try:
            items[name] = read_model(run_folder / FOLDER / name, QuarantinedItem, _MOST_BYTES)
        except OSError:
            continue
    return items
