"""The status of a run. Imports nothing: options of commands name it before anything else is needed."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """The status of a run: going on, or how it ended.

    `unknown` is written by no run. It is told of one that says it is running where its process cannot be looked for: it
    belongs to another container or machine.
    """

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"
