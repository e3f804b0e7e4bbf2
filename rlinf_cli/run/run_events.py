"""The story of a run: its start, checkpoints, restarts and end, one JSON object a line in `events.jsonl`.

    {"time": 1773482102.5, "kind": "restarted", "step": 20, "text": "`env:1` died in `interact`", "details": []}

What a person would look for in the driver's log, and a program cannot: the story outlives the log's wording.
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

FILE: Final = "events.jsonl"

STARTED: Final = "started"
RESUMED: Final = "resumed"
CHECKPOINT: Final = "checkpoint"
RESTARTED: Final = "restarted"
FINISHED: Final = "finished"
INTERRUPTED: Final = "interrupted"
FAILED: Final = "failed"


class StoryEvent(NamedTuple):
    """Something that happened to a run.

    Attributes:
        time: when, in seconds since 1970.
        kind: one of the kinds above.
        step: the last step that was done.
        text: what happened, in one line.
        details: further lines: where, why, and what to do.
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
    """Add an event to the story of the run in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    event = {"time": time.time(), "kind": kind, "step": step, "text": text, "details": list(details)}
    # One write, so that a reader finds the line or none.
    descriptor = open_log(folder, FILE)
    try:
        os.write(descriptor, (json.dumps(event, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)


def read_story(folder: Path) -> list[StoryEvent]:
    """Return the story of the run in `folder`, in order; see `story_with_faults`."""
    return story_with_faults(folder)[0]


def story_with_faults(folder: Path) -> tuple[list[StoryEvent], list[str]]:
    """Return the story of the run in `folder`, in order, and what is wrong with lines that are left out."""
    try:
        lines = read_text(folder / FILE).splitlines(keepends=True)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{FILE} cannot be read: it {error.strerror}"]
    story: list[StoryEvent] = []
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            data = _Line.model_validate_json(line)
        except ValidationError as error:
            # The last one may be in the making.
            if line.endswith("\n"):
                faults.append(f"line {number} of {FILE} is left out: {first_fault(error)}")
            continue
        story.append(StoryEvent(data.time, data.kind, data.step, data.text, tuple(data.details)))
    return story, faults
