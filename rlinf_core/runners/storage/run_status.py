"""The status of a run. Imports nothing: options of commands name it before anything else is needed."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """The status of a run: going on, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
