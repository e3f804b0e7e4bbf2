"""The events of a run: start, checkpoints, restarts and end, one JSON object per line in `events.jsonl`.

    {"time": 1773482102.5, "kind": "restarted", "step": 20, "text": "`env:1` died in `interact`", "details": []}

A stable, machine-readable form of what the driver's log says.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from rlinf_core.foreign.file_models import FileModel, Moment, Step, first_fault
from rlinf_core.foreign.files import open_log, read_text
from rlinf_core.runners.storage.durable import append_whole

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


class RunEvent(NamedTuple):
    """An event of a run.

    Attributes:
        time: the time in seconds since 1970.
        kind: one of the kinds above.
        step: the last finished step.
        text: what happened, in one line.
        details: further lines: location, cause, remedy.
    """

    time: float
    kind: str
    step: int
    text: str
    details: tuple[str, ...] = ()


class _Line(FileModel):
    time: Moment
    kind: str
    step: Step
    text: str
    details: list[str]


def append_event(folder: Path, kind: str, step: int, text: str, details: Sequence[str] = ()) -> None:
    """Append an event of the run in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    event = {"time": time.time(), "kind": kind, "step": step, "text": text, "details": list(details)}
    # A single write, so that a reader sees the whole line or nothing.
    descriptor = open_log(folder, FILE)
    try:
        append_whole(descriptor, (json.dumps(event, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)


def story_with_faults(folder: Path) -> tuple[list[RunEvent], list[str]]:
    """Return the events of the run in `folder`, in order, and the errors of skipped lines."""
    try:
        lines = read_text(folder / FILE).splitlines(keepends=True)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{FILE} cannot be read: it {error.strerror}"]
    story: list[RunEvent] = []
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            data = _Line.model_validate_json(line)
        except ValidationError as error:
            # The last line may be incomplete.
            if line.endswith("\n"):
                faults.append(f"line {number} of {FILE} was skipped: {first_fault(error)}")
            continue
        story.append(RunEvent(data.time, data.kind, data.step, data.text, tuple(data.details)))
    return story, faults
