"""The deaths of workers: the news of them in a process, their causes in logs and the kernel, and Ray's reports."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile, takewhile
from typing import Final, NamedTuple

from rlinf_core.collective.connection import NO_ANSWER
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import ProcessEnd, WorkerDiedError
from rlinf_core.node.process_life import EndWatch
from rlinf_core.node.stacks import threads_of
from rlinf_core.process.proc import tail
from rlinf_core.supervision.lives import Hello
from rlinf_core.supervision.rpc import Reply

_NODE_LEFT = "its node left the cluster"
_EXIT_CODE = re.compile(r"exit code (-?\d+)")
# Stands for the end of a forked process whose status is unknown.
GONE: Final = "its process is gone"
# Seconds for which a failure may be delayed to learn why its peer died.
CAUSE_SECONDS = 1.0
_TAIL_BYTES = 64 << 10
_LAST_LINES = 8
_FRAMES = 6
_FATAL = "Fatal Python error: "
# The file whose frames call user code: outer frames belong to rlinf and Ray.
_OUTERMOST = "/rlinf_core/worker/process.py"
# Lines of Ray, irrelevant for user code: its markers, and its crash report.
_ENGINE = re.compile(r"^(:|\[\d{4}-|\*\*\* SIG|PC: @|    @ )")


@dataclass(frozen=True, slots=True)
class Died:
    """The death of a worker.

    Attributes:
        endpoint: the incarnation of its endpoint.
        node: a description of the node where it ran.
        vanished: whether its host is gone or unreachable, so that Ray will report the death late.
        end: how its process ended, or None if unknown.
    """

    address: str
    incarnation: int
    endpoint: str
    node: str | None
    cause: str | None
    vanished: bool = False
    end: ProcessEnd | None = None

    def error(self, where: str | None = None) -> WorkerDiedError:
        """Return the error for processes that need the worker; `where` is the process that raises it."""
        return WorkerDiedError(self.address, node=self.node, cause=self.cause, end=self.end, where=where)


class DeathNews:
    """The deaths that were reported to a process, or that it caused itself. Safe for threads."""

    def __init__(self) -> None:
        self._deaths: dict[str, Died] = {}
        self._ended_here: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, died: Died) -> None:
        """Record a death, and wake the threads that wait for it."""
        with self._changed:
            self._deaths[died.address] = died
            self._changed.notify_all()

    def forget(self, name: str) -> None:
        """Drop the news of a worker whose successor has been launched."""
        with self._changed:
            self._deaths.pop(name, None)

    def of(self, peer: str, incarnation: int = 0) -> Died | None:
        """Return the death of a worker in this incarnation or a later one; None if there is no news of it."""
        died = self._deaths.get(peer)
        return died if died is not None and died.incarnation >= incarnation else None

    def wait(self, peer: str, incarnation: int = 0, endpoints: Collection[str | None] = ()) -> Died | None:
        """Return the death of a worker, as `of` does; waits briefly for the manager's report.

        Args:
            incarnation: the earliest incarnation of the worker that counts.
            endpoints: the incarnations of its endpoint that count; empty for all.
        """

        def look() -> Died | None:
            died = self.of(peer, incarnation)
            return died if died is not None and (not endpoints or died.endpoint in endpoints) else None

        with self._changed:
            self._changed.wait_for(lambda: self._closed or look() is not None, CAUSE_SECONDS)
            return look()

    def vanished(self, peer: str, incarnation: int) -> WorkerDiedError | None:
        """Return the error for a worker whose whole host is gone, if already known."""
        died = self.of(peer, incarnation)
        return died.error() if died is not None and died.vanished else None

    def end_here(self, name: str, incarnation: int, cause: str) -> None:
        """Record that this process ends a worker, and why."""
        self._ended_here[name, incarnation] = cause

    def ended_here(self, name: str, incarnation: int) -> str | None:
        """Return why this process has ended a worker; None if it has not."""
        return self._ended_here.get((name, incarnation))

    def close(self) -> bool:
        """Wake all waiting threads: no more news will come. Return False if closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            return True


def exit_reason(log: str | None) -> str | None:
    """Return the crash report or last lines of a process of this node, from `log`, its standard error; or None."""
    lines = tail(log, _TAIL_BYTES).splitlines() if log is not None else []
    crash = _crash(lines)
    if crash:
        return crash
    last_lines = [line for line in lines if line.strip() and not _ENGINE.match(line)][-_LAST_LINES:]
    return _block("the last lines of its log", last_lines) if last_lines else None


def own_log() -> str | None:
    """Return the file of this process's standard error, or None if it is not a file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if path.startswith("/") and os.path.isfile(path) else None


def _crash(lines: list[str]) -> str | None:
    """Return faulthandler's report of a crash: the fault and the stack of its thread."""
    starts = [index for index, line in enumerate(lines) if line.startswith(_FATAL)]
    if not starts:
        return None
    rest = lines[starts[-1] :]
    fault = rest[0].removeprefix(_FATAL)
    # The thread that crashed, up to an empty line.
    of_thread = takewhile(str.strip, dropwhile(lambda line: not line.startswith("Current thread"), rest))
    frames = [frame for thread in threads_of("\n".join(of_thread)) for frame in reversed(thread.frames)]
    inner = takewhile(lambda frame: not frame.filename.endswith(_OUTERMOST), frames)
    stack = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in inner if frame.lineno][:_FRAMES]
    return _block(f"it crashed: {fault}; its stack, innermost call first", stack) if stack else fault


def _block(title: str, lines: list[str]) -> str:
    return "\n".join((f"{title}:", *(f"    {line}" for line in lines)))


class ProcessGone(Exception):  # noqa: N818 - a vehicle, as `RemoteFailure`: seen as `WorkerDiedError`
    """The end of a forked process, as its host describes it."""


def describe_death(
    deaths: DeathNews | None, error: BaseException, address: str, node: str, incarnation: int
) -> WorkerDiedError:
    """Return the error for a worker that Ray reports dead; waits briefly for the manager's findings in `deaths`."""
    text = str(error)
    own_reason = deaths.ended_here(address, incarnation) if deaths is not None else None
    if own_reason is not None:
        return WorkerDiedError(address, node=node, cause=own_reason)
    news = deaths.wait(address, incarnation) if deaths is not None else None
    known_cause, end = (news.cause, news.end) if news is not None else (None, None)
    reported_end = _end_in(text)
    if reported_end is None:
        reason = _ray_says(text)
    else:
        # If the kernel's report is known, it names the same end.
        reason = reported_end.words if end is None else None
    cause = "; ".join(part for part in (reason, known_cause) if part) or None
    return WorkerDiedError(address, node=node, cause=cause, end=end or reported_end)


def took_its_node(error: WorkerDiedError) -> bool:
    """Return whether a worker died with its node, or its node is unreachable."""
    cause = error.cause or ""
    return cause.startswith(NO_ANSWER) or _NODE_LEFT in cause


def _end_in(text: str) -> ProcessEnd | None:
    """Return the end that Ray or the host of forked processes reports; None if there is none or it is uncertain."""
    code = _EXIT_CODE.search(text)
    if code is None or code[1] == "0" or text.startswith(GONE) or _ran_out_of_memory(text):
        return None
    return ProcessEnd.from_exit_code(int(code[1]))


def _ran_out_of_memory(text: str) -> bool:
    return "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text


def _ray_says(text: str) -> str | None:
    if _ran_out_of_memory(text):
        return "it was killed because its node ran out of memory"
    if text.startswith(GONE):
        return text
    if "ray.kill" in text:
        return "it was ended by its group's shutdown"
    if "NODE_DIED" in text or "node has died" in text or "node which the actor" in text:
        return _NODE_LEFT
    return None


# Seconds within which the cause of a death must be found.
_POSTMORTEM_SECONDS: Final = 0.5


@dataclass(slots=True)
class Peer:
    """A registered process."""

    name: str
    stream: PeerStream
    hello: Hello
    exit_reason: str | None = None
    # The processes that it has looked up or that have looked it up.
    acquaintances: set[str] = field(default_factory=set[str])

    def died(self, cause: str | None, *, vanished: bool = False, end: ProcessEnd | None = None) -> Died:
        """Return the record of its death."""
        hello = self.hello
        return Died(self.name, hello.incarnation, hello.info.incarnation, hello.node, cause, vanished, end)


class _Death(NamedTuple):
    peer: Peer
    until: float


class DeathCauses:
    """The search for the causes of deaths, in the reports of this machine's kernel and at the end of logs.

    Args:
        place: the place of this process, whose kernel reports how processes there end.
        read_log: makes a process at the place of a dead one read the end of the log, and passes the reply on.
        conclude: called once for each searched death; its cause may be None.
    """

    def __init__(
        self,
        place: tuple[str, int],
        read_log: Callable[[Peer, Callable[[Reply], object]], object],
        conclude: Callable[[Peer, Died], object],
        clock: Callable[[], float],
    ) -> None:
        self._place, self._read_log, self._conclude, self._clock = place, read_log, conclude, clock
        self._deaths: dict[str, _Death] = {}
        self._ends = EndWatch()

    @property
    def searching(self) -> bool:
        """Whether any death is still being searched."""
        return bool(self._deaths)

    def watch(self, name: str, hello: Hello) -> None:
        """Watch the end of a process, if it is at the place of this one."""
        if hello.info.place == self._place:
            self._ends.watch(name, hello.info.pid)

    def drop(self, name: str) -> None:
        """Forget a process whose end is expected."""
        self._deaths.pop(name, None)
        self._ends.drop(name)

    def search(self, peer: Peer, reason: str) -> None:
        """Begin the search for the cause of a process's death."""
        if reason.startswith(NO_ANSWER):
            self._end_search(peer, reason, vanished=True)
        elif peer.exit_reason is not None:
            self._end_search(peer, peer.exit_reason)
        else:
            death = self._deaths[peer.name] = _Death(peer, self._clock() + _POSTMORTEM_SECONDS)
            if peer.hello.info.place == self._place:
                # The connection may end before the parent has reaped the process.
                self._look_at_end(death, last=not self._ends.is_watched(peer.name))
            else:
                self._read_log(peer, partial(self._take, death))

    def hurry(self, name: str) -> None:
        """Conclude the search for a death's cause, if one is under way, with what is known now."""
        death = self._deaths.get(name)
        if death is not None:
            self._look_at_end(death, last=True)

    def tick(self) -> None:
        """Continue all searches."""
        now = self._clock()
        for name, death in list(self._deaths.items()):
            if death.peer.hello.info.place == self._place:
                self._look_at_end(death, last=now >= death.until)
            elif now >= death.until:
                del self._deaths[name]
                self._end_search(death.peer, None)

    def _take(self, death: _Death, reply: Reply) -> None:
        if reply.error is None and self._deaths.get(death.peer.name) is death:
            del self._deaths[death.peer.name]
            self._end_search(death.peer, reply.value)

    def _look_at_end(self, death: _Death, *, last: bool) -> None:
        """Conclude a death on this machine once the kernel reports its end, or if `last`, without that."""
        name = death.peer.name
        end = self._ends.end(name)
        if end is not None or last:
            self._deaths.pop(name, None)
            self._end_search(death.peer, exit_reason(death.peer.hello.log), end=end)

    def _end_search(
        self, peer: Peer, cause: str | None, *, vanished: bool = False, end: ProcessEnd | None = None
    ) -> None:
        self._ends.drop(peer.name)
        if end is not None:
            cause = f"{end.words}; {cause}" if cause else end.words
        self._conclude(peer, peer.died(cause, vanished=vanished, end=end))
