"""The status of a run. Imports nothing, as options of commands use it."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """The status of a run: active, or how it ended.

    `unknown` is never written. It is reported for a run marked as running whose process cannot be checked, since it
    belongs to another container or machine.
    """

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"
