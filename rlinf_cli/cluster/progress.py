"""The phases and failures of nodes that come up or go down, and their view: a redrawn table on a terminal, else
lines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from rlinf_cli import console
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.node.node_requests import AgentReply
from rlinf_cli.console import unguarded_stream
from rlinf_core.suggest import replaced

T = TypeVar("T")
# Beyond this many nodes, the table lists failed and late nodes, and counts the others.
_MOST_ROWS = 24
_MOST_LINES = 40
# Seconds between messages about a wait if no table is redrawn.
_WORD_EVERY = 10.0


class Phase(StrEnum):
    """The phases of a node, in order."""

    CONNECT = "connect"
    PROBE = "probe"
    SYNC = "sync code"
    HEAD = "start head"
    JOIN = "join"
    VERIFY = "verify"
    STOP = "stop"


class Progress(StrEnum):
    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not tried, because a precondition failed."""


class Event(NamedTuple):
    """A phase event of one node.

    Attributes:
        detail: details, such as the reason of a failure; may be empty.
        deadline: the time limit of a phase that begins, in seconds.
    """

    rank: int
    phase: Phase
    progress: Progress
    detail: str = ""
    deadline: float | None = None


Emit: TypeAlias = Callable[[Event], None]


class NodeFailure(NamedTuple):
    """The failure of a node.

    Attributes:
        node: its name, as in `node 3 (trainer03)`.
        message, why, help: the error, its cause and the remedy; the last two may be empty.
        exit_code: the exit code of the failed command, or None.
        last_lines: the last lines of its output; may be empty.
    """

    rank: int
    node: str
    phase: Phase
    message: str
    why: str = ""
    help: str = ""
    exit_code: int | None = None
    last_lines: str = ""

    @classmethod
    def of(cls, node: NodeTarget, phase: Phase, answer: AgentReply) -> NodeFailure:
        """Return the failure described by a reply without data."""
        return cls(node.rank, node.name, phase, answer.message, answer.why, answer.help, answer.rc, answer.lines)


@dataclass(frozen=True, slots=True)
class ClusterReport(Generic[T]):
    """The result of `up` or `down`, node by node.

    Attributes:
        name: the name of the cluster; empty if none was named and none is up.
        nodes: the outcome of each node.
        failures: the failures of nodes, by rank.
        seconds: the duration.
        address: the address of the head's GCS, empty when it is not up.
    """

    name: str
    nodes: tuple[T, ...]
    failures: tuple[NodeFailure, ...]
    seconds: float
    address: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures


_MARKS = {Progress.DONE: ("ok", "green"), Progress.FAILED: ("failed", "red"), Progress.SKIPPED: ("not tried", "yellow")}


class _Row:
    def __init__(self, node: NodeTarget) -> None:
        self.node = node
        self.phase: Phase | None = None
        self.progress: Progress | None = None
        self.detail = ""
        self.deadline: float | None = None
        self.since = time.monotonic()

    def take(self, event: Event) -> None:
        if event.progress is Progress.BEGUN:
            self.since, self.deadline = time.monotonic(), event.deadline
        self.phase, self.progress = event.phase, event.progress
        self.detail = event.detail or self.detail

    @property
    def waits(self) -> bool:
        return self.progress is Progress.BEGUN

    @property
    def waiting(self) -> str:
        """The phase and its duration, as in `join, 12 of 60 s`."""
        limit = f" of {self.deadline:.0f} s" if self.deadline else " s"
        return f"{self.phase}, {time.monotonic() - self.since:.0f}{limit}"


class PhaseTable:
    """A view of node events."""

    def __init__(self, nodes: Sequence[NodeTarget], last: Phase) -> None:
        self._rows = {node.rank: _Row(node) for node in nodes}
        self._last = last
        self._live: Any = None
        self._word_at = time.monotonic() + _WORD_EVERY

    def update(self, event: Event) -> None:
        """Show one event."""
        row = self._rows[event.rank]
        row.take(event)
        if self._live is None:
            self._say(row, event)

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """Show the table within the block, on a terminal that supports it."""
        if console.verbosity.quiet or not sys.stderr.isatty() or not console.colored(sys.stderr):
            yield
            return
        from rich.console import Console
        from rich.live import Live

        terminal = Console(file=unguarded_stream(sys.stderr), highlight=False)
        with Live(get_renderable=self._grid, console=terminal, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def remind(self) -> None:
        """Print the awaited nodes, at intervals, if no table is redrawn. Call this periodically."""
        if self._live is not None or time.monotonic() < self._word_at:
            return
        self._word_at = time.monotonic() + _WORD_EVERY
        late = [row for row in self._rows.values() if row.waits]
        if late:
            named = ", ".join(f"node {row.node.rank} in {row.waiting}" for row in late[:3])
            others = f", and {len(late) - 3} more" if len(late) > 3 else ""
            console.message(f"waiting for {named}{others}")

    async def beside(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; meanwhile call `remind`."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(1.0)
                self.remind()

        ticking = asyncio.ensure_future(tick())
        try:
            return await work
        finally:
            ticking.cancel()

    def _say(self, row: _Row, event: Event) -> None:
        """Print the outcome of every phase for a few nodes; for many nodes only failed and skipped phases."""
        if event.progress is Progress.BEGUN:
            return
        ends = event.progress is not Progress.DONE or event.phase is self._last
        many = len(self._rows) > _MOST_LINES
        if many and (event.progress is Progress.DONE or not ends):
            return
        word = _MARKS[event.progress][0]
        detail = f" ({event.detail})" if event.detail and "\n" not in event.detail else ""
        console.message(f"{row.node.name}: {event.phase} {word}{detail}")

    def _grid(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        rows = list(self._rows.values())
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        # On a narrow terminal, groups and details are truncated, not nodes and phases.
        hosts = max(len(row.node.host or "this machine") for row in rows)
        for header, width in (("node", 4), ("host", min(hosts, 30)), ("group", 5), ("phase", 22), ("", 1)):
            grid.add_column(header, no_wrap=True, min_width=width)
        shown = rows if len(rows) <= _MOST_ROWS else _notable(rows)
        for row in shown:
            word, style = ("", "dim") if row.progress in (None, Progress.BEGUN) else _MARKS[row.progress]
            phase = row.waiting if row.waits else f"{row.phase or ''} {word}"
            host = row.node.host or "this machine"
            cells = (str(row.node.rank), host, ", ".join(row.node.groups), phase, row.detail)
            styles = ("", "", "", style, "dim")
            # With `Text`, a name or reply of a node is not interpreted as markup.
            grid.add_row(*(Text(replaced(cell), style=one) for cell, one in zip(cells, styles, strict=True)))
        if len(shown) < len(rows):
            counts = {phase: sum(row.phase is phase for row in rows) for phase in Phase}
            counted = ", ".join(f"{count} in {phase}" for phase, count in counts.items() if count)
            grid.add_row("", "", "", Text(f"{len(rows)} nodes: {counted}"), "")
        return grid


def _notable(rows: Iterable[_Row]) -> list[_Row]:
    """Return failed nodes first, then those waiting longest, up to the limit of rows."""
    order = {Progress.FAILED: 0, Progress.BEGUN: 1}
    return sorted(rows, key=lambda row: (order.get(row.progress or Progress.BEGUN, 2), row.since))[:_MOST_ROWS]
