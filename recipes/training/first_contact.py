"""`first_contact.json` of a run folder: the comparisons made before the first step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

FILE: Final = "first_contact.json"


@dataclass(frozen=True, slots=True)
class ContactCheck:
    """A comparison of something from outside with its description or an independent reference.

    Attributes:
        what: was compared, as in "observations of env.train".
        with_: what it was held against.
        ok: it agreed.
        largest_difference: in the units of what was compared; None: it either agrees or not.
        note: more in words.
    """

    what: str
    with_: str
    ok: bool = True
    largest_difference: float | None = None
    note: str = ""


def note_comparisons(folder: Path, comparisons: Sequence[ContactCheck]) -> None:
    """Add comparisons to the file of a run folder; one of the same two things is replaced.

    One process of a job writes at a time: workers return theirs to the runner.
    """
    kept = {(comparison["what"], comparison["with"]): comparison for comparison in read_comparisons(folder)}
    for comparison in comparisons:
        written = asdict(comparison)
        written["with"] = written.pop("with_")
        kept[comparison.what, comparison.with_] = written
    aside = folder / f".{FILE}.{os.getpid()}"
    aside.write_text(json.dumps(list(kept.values()), indent=1) + "\n", encoding="utf-8")
    aside.replace(folder / FILE)


def read_comparisons(folder: Path) -> list[dict[str, Any]]:
    """Return the comparisons recorded in a run folder; empty if there are none or the file is invalid."""
    try:
        parsed: object = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(parsed, list):
        return []
    rows = [cast("dict[str, Any]", row) for row in cast("list[object]", parsed) if isinstance(row, dict)]
    return [row for row in rows if isinstance(row.get("what"), str) and isinstance(row.get("with"), str)]
