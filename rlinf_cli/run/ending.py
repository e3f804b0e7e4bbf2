"""The end of a run: its record in the run folder, and the report of a failure, the first one in full."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rlinf_cli.runs.logs import last_lines
from rlinf_core.errors import RLinfError
from rlinf_core.runners.recovery import Failure, failures_of, headline, position

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder


# Seconds that the end of a run waits for room in its folder, and between two tries.
_ROOM_SECONDS: Final = 10.0
_ROOM_PAUSE: Final = 0.25


def record_end(
    folder: RunFolder, step: int | None, status: str, reason: str = "", *, at_once: bool = False
) -> RLinfError | None:
    """Write the end status and the last finished step; return the error that prevents it, if any.

    A file system without room may have some again in seconds: why the run ended is worth a wait.

    Args:
        folder: the folder of the run.
        step: the last finished step; None: the run had not started.
        status: the end status.
        reason: why it ended.
        at_once: whether there is no time for a wait, as after a second signal.
    """
    deadline = time.monotonic() + (0.0 if at_once else _ROOM_SECONDS)
    while True:
        try:
            if step is not None:
                folder.update(step=step)
            folder.end(status, reason)
        except RLinfError as error:
            if not _lacks_room(error) or time.monotonic() >= deadline:
                return error
            time.sleep(_ROOM_PAUSE)
        else:
            return None


def _lacks_room(error: RLinfError) -> bool:
    from rlinf_core.foreign.files import NO_ROOM

    return isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM


LOG_LINES = 10
_MOST_NAMED = 6


class FailureReport(NamedTuple):
    """A failed job in the parts of an error block."""

    what: str
    where: str | None
    why: str | None
    do: str | None


def failure_block(
    error: BaseException, logs: Path | None, run: str | None, components: Mapping[str, str] | None = None
) -> FailureReport:
    """Return the error block of the first failure.

    Args:
        error: the exception of the recipe's program.
        logs: the folder of the run's logs, or None where there is none.
        run: the argument for `rlinf logs`, or None.
        components: component by worker group name, where the two differ.
    """
    first, *others = failures_of(error)
    component = (components or {}).get(first.group, first.group) if first.group is not None else None
    named = f"component `{component}`" if component != first.group else None
    where = [part for part in (named, first.place, position(first.error)) if part]
    log = logs / component / f"rank_{first.rank}.log" if logs and component is not None else None
    tail = last_lines(log, LOG_LINES) if log else []
    why: list[str] = []
    if isinstance(first.error, RLinfError):
        where.extend([first.error.where] if first.error.where and first.error.where != first.name else [])
        why.extend(first.error.why.splitlines() if first.error.why else [])
    if tail:
        why.extend(["last log lines", *(f"  {line}" for line in tail)])
    if others:
        why.append(_folded(others))
    return FailureReport(
        headline(first), "; ".join(where) or None, "\n".join(why) or None, _advice(first, component, log, run)
    )


def _folded(others: Sequence[Failure]) -> str:
    """Return `then also failed: env:0, env:1 (ChannelClosed), actor:0 (WorkerDiedError)`."""
    by_kind: dict[str, list[str]] = {}
    for failure in others[:_MOST_NAMED]:
        by_kind.setdefault(type(failure.error).__name__, []).append(failure.name)
    listed = ", ".join(f"{', '.join(names)} ({kind})" for kind, names in by_kind.items())
    others_text = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"{'because of it' if others[0].consequence else 'besides it'} also failed: {listed}{others_text}"


def _advice(first: Failure, component: str | None, log: Path | None, run: str | None) -> str:
    lines: list[str] = []
    if isinstance(first.error, RLinfError) and first.error.help:
        lines.append(first.error.help)
    if log is not None and log.exists() and run is not None:
        lines.append(f"`rlinf logs {run} {component}:{first.rank}` shows its log")
    if not lines or not isinstance(first.error, RLinfError):
        lines.append("`--verbose` shows the traceback")
    return "\n".join(lines)
