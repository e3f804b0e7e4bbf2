"""The events of a run: start, checkpoints, restarts and end, one JSON object per line in `events.jsonl`.

    {"time": 1773482102.5, "kind": "restarted", "step": 20, "text": "`env:1` died in `interact`", "details": []}

A stable, machine-readable form of what the driver's log says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlinf_core.foreign.file_models import FileModel, Moment, Step
from rlinf_core.foreign.files import MOST_BYTES
from rlinf_core.runners.storage.record_file import RecordFile, parse_model

FILE: Final = "events.jsonl"

STARTED: Final = "started"
RESUMED: Final = "resumed"
RESTARTED: Final = "restarted"
# Dead workers were started again alone.
RELAUNCHED: Final = "relaunched"
# A spare serves as a lost node, or a node is back.
NODES: Final = "nodes"
# What became of the items that were in flight at the checkpoint that a run goes on from.
ITEMS: Final = "items"
# An environment has an error in its own code.
ENVIRONMENT: Final = "environment"
# An evaluation lacks some of what it was asked for.
INCOMPLETE: Final = "incomplete"
FINISHED: Final = "finished"
INTERRUPTED: Final = "interrupted"
FAILED: Final = "failed"
# A line of details that names the folder of evidence begins with it.
EVIDENCE: Final = "evidence"


class RunEvent(FileModel):
    """An event of a run.

    Attributes:
        time: the time in seconds since 1970.
        kind: one of the kinds above.
        step: the last finished step.
        text: what happened, in one line.
        details: further lines: location, cause, remedy.
    """

    time: Moment
    kind: str
    step: Step
    text: str
    details: tuple[str, ...]


def append_event(folder: Path, kind: str, step: int, text: str, details: Sequence[str] = ()) -> None:
    """Append an event of the run in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    event = {"time": time.time(), "kind": kind, "step": step, "text": text, "details": list(details)}
    _events_in(folder).append(json.dumps(event, ensure_ascii=False))


def story_with_faults(folder: Path) -> tuple[list[RunEvent], list[str]]:
    """Return the events of the run in `folder`, in order, and the errors of skipped lines."""
    try:
        return _events_in(folder).with_faults()
    except OSError as error:
        return [], [f"{FILE} cannot be read: it {error.strerror}"]


def _events_in(folder: Path) -> RecordFile[RunEvent]:
    return RecordFile(folder / FILE, lambda raw: parse_model(raw, RunEvent), MOST_BYTES)
