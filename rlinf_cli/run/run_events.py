"""The story of a run: its start, checkpoints, restarts and end, one JSON object a line in `events.jsonl`.

    {"time": 1773482102.5, "kind": "restarted", "step": 20, "text": "`env:1` died in `interact`", "details": []}

What a person would look for in the driver's log, and a program cannot: the story outlives the log's wording.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

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


def append_event(folder: Path, kind: str, step: int, text: str, details: Sequence[str] = ()) -> None:
    """Add an event to the story of the run in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    event = {"time": time.time(), "kind": kind, "step": step, "text": text, "details": list(details)}
    # One write, so that a reader finds the line or none.
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, ensure_ascii=False) + "\n")


def read_story(folder: Path) -> list[StoryEvent]:
    """Return the story of the run in `folder`, in order; a line that is torn is left out."""
    try:
        lines = (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[StoryEvent] = []
    for line in lines:
        try:
            data: Any = json.loads(line)
            details = tuple(str(each) for each in cast("list[Any]", data["details"]))
            text = str(data["text"])
            found.append(StoryEvent(float(data["time"]), str(data["kind"]), int(data["step"]), text, details))
        except (ValueError, TypeError, KeyError):
            continue
    return found
