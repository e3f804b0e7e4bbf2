"""Debugging through a job's manager: questions for stacks, and workers that wait at breakpoints."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import RuntimeFailure
from rlinf_core.failures import PackedError
from rlinf_core.manager import manager_messages as m
from rlinf_core.node.process_identity import UnprovenProcessError
from rlinf_core.node.stacks.process_stacks import StackRequest, read_stacks

# Pauses that a wait may still ask for.
_PAUSES_KEPT: Final = 256


class Pauses:
    """The times in which any process waits at a breakpoint, which extend the deadlines of other processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[str] = set()
        self._since = 0.0
        self._past: deque[tuple[float, float]] = deque(maxlen=_PAUSES_KEPT)

    def begin(self, name: str) -> None:
        """Note that a process has come to a breakpoint."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting.add(name)

    def end(self, name: str) -> None:
        """Note that a process continues, or has ended."""
        if name in self._waiting:
            self._waiting.remove(name)
            if not self._waiting:
                self._past.append((self._since, self._clock()))

    def within(self, seconds: float) -> float:
        """Return the number of the last `seconds` in which any process waited."""
        now = self._clock()
        spans = [*self._past, *([(self._since, now)] if self._waiting else [])]
        return sum(max(0.0, end - max(begin, now - seconds)) for begin, end in spans)


class Debugging:
    """The debuggers' part of a manager.

    Args:
        send: sends a message to a process by its name.
        reply: answers a request of a stream by its serial.
        refuse: likewise with an error.
        hellos: returns the registered processes by name.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        send: Callable[[str, object], None],
        reply: Callable[[PeerStream, int, object], None],
        refuse: Callable[[PeerStream, int, Exception], None],
        hellos: Callable[[], Mapping[str, m.Hello]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._reply, self._refuse, self._hellos = send, reply, refuse, hellos
        self._serials = itertools.count(1)
        self._questions: dict[int, tuple[PeerStream, int]] = {}
        self.pauses = Pauses(clock)

    def read_stacks(self, stream: PeerStream, serial: int, body: m.ReadStacks) -> None:
        """Have the helper read the stacks of a process: of one that this manager knows, and no other."""
        hellos = self._hellos()
        hello = hellos.get(body.name)
        if hello is None or hello.process is None or body.helper not in hellos:
            self._refuse(stream, serial, RuntimeFailure(f"`{body.name}` or `{body.helper}` has ended"))
            return
        number = next(self._serials)
        self._questions[number] = (stream, serial)
        others = tuple(other.info.pid for other in hellos.values() if other is not hello)
        self._send(body.helper, m.StackQuestion(number, StackRequest(hello.process, body.own, body.native, others)))

    def stacks_read(self, stream: PeerStream, answer: m.StacksRead) -> None:
        """Pass an answer on."""
        asked = self._questions.pop(answer.serial, None)
        if asked is not None and answer.error is not None:
            self._refuse(*asked, answer.error.unpack())
        elif asked is not None:
            self._reply(*asked, answer.stacks)

    def forget(self, stream: PeerStream, serial: int) -> None:
        """Drop a request that nobody waits for."""
        self._questions = {number: asked for number, asked in self._questions.items() if asked != (stream, serial)}

    def breakpoint(self, stream: PeerStream, message: m.BreakpointWait) -> None:
        """Record, and report to the driver, that a process waits at a breakpoint or continues."""
        if message.place is None:
            self.pauses.end(stream.peer)
        else:
            self.pauses.begin(stream.peer)
            if not message.attached:
                self._send(m.DRIVER, m.AtBreakpoint(stream.peer, message.place))

    def lost(self, name: str) -> None:
        """Note that a process has ended."""
        self.pauses.end(name)
        self._questions = {number: asked for number, asked in self._questions.items() if asked[0].peer != name}


def at_breakpoint(message: m.AtBreakpoint, job: str, log_folder: str | None) -> str:
    """Return who waits at which breakpoint, and the command that attaches to it."""
    run = _shown(os.path.dirname(log_folder)) if log_folder is not None else f"--job {job}"
    return f"{message.name} waits at a breakpoint, {message.place}; `rlinf debug {run} {message.name}` attaches to it"


def _shown(folder: str) -> str:
    """Return the shorter path of a folder, from the working folder or from the root."""
    return min(os.path.relpath(folder), folder, key=len)


def answer_stacks(question: m.StackQuestion) -> m.StacksRead:
    """Return the stacks that a manager asked this process for. Takes up to 2 s."""
    try:
        return m.StacksRead(question.serial, read_stacks(question.request))
    except UnprovenProcessError as error:
        failure = RuntimeFailure(str(error))
    except OSError as error:
        failure = RuntimeFailure("the process has ended", why=error.strerror)
    return m.StacksRead(question.serial, error=PackedError.of(failure))
