"""The status of a run. Imports no other module of rlinf, since options of commands use it."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """The status of a run: active, or how it ended.

    `unknown` is never written. It is reported for a run marked as running whose driver cannot be checked, since that
    is in another container or on another machine.
    """

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"
