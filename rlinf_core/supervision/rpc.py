"""Calls between the manager and the processes of a job, over their endpoints.

A call names a method of the other end; a call with a serial is answered by a `Reply` with the same serial. Both ends
have authenticated, and run the same rlinf, so plain pickled values suffice.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.errors import RLinfError
from rlinf_core.failures import PackedError
from rlinf_core.waiting import OperationKind, stretched

_log = logging.getLogger(__name__)
# The endpoint's service tag for these messages; channels use small numbers.
CONTROL: Final = 60_000
_SEND_SECONDS: Final = 30.0
LATER: Final = object()
"""The return value of a method whose answer is sent later, by `Rpc.answer`."""


@dataclass(frozen=True, slots=True)
class ManagerCall:
    """A call of a method at the other end; a serial other than 0 asks for an answer."""

    name: str
    args: tuple[Any, ...]
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a call."""

    serial: int
    value: Any = None
    error: PackedError | None = None


class Caller(NamedTuple):
    """The sender of a call, to which the answer goes."""

    stream: PeerStream
    serial: int

    @property
    def name(self) -> str:
        """The address of the sender."""
        return self.stream.peer


class Rpc:
    """The calls that a process makes and answers. Its methods run one after another in a thread of their own.

    Args:
        methods: the methods that others may call, by name: each gets the `Caller` and the arguments, and may block.
        tick: called after each call, and periodically, in the same thread.
        every: returns the maximum seconds between ticks.
        at_once: functions called with the arguments before the methods, in the reading thread; must not block.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        methods: Mapping[str, Callable[..., object]],
        tick: Callable[[], None],
        every: Callable[[], float],
        at_once: Mapping[str, Callable[..., object]] = MappingProxyType({}),
    ) -> None:
        self._endpoint = endpoint
        self._methods = methods
        self._tick, self._every, self._at_once = tick, every, at_once
        self._serials = itertools.count(1)
        # By serial: the name of the process that was asked, and the function that takes the reply.
        self._asked: dict[int, tuple[str, Callable[[Reply], object]]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._stopped = False
        endpoint.serve(CONTROL, self._deliver)
        self.start()

    def tell(self, stream: PeerStream, name: str, *args: object) -> None:
        """Call a method without waiting, and without an answer. The endpoint itself reports lost peers."""
        self.send(stream, ManagerCall(name, args))

    def call(self, name: str, *args: object) -> ManagerCall:
        """Return a call for `ask`."""
        return ManagerCall(name, args, next(self._serials))

    def ask(self, stream: PeerStream, call: ManagerCall, take: Callable[[Reply], object]) -> None:
        """Make a call; `take` gets the reply, in the reading thread."""
        self._asked[call.serial] = stream.peer, take
        self.send(stream, call)

    def forget(self, *serials: int) -> None:
        """Drop the replies to calls."""
        for serial in serials:
            self._asked.pop(serial, None)

    def lost(self, peer: str, error: Exception) -> None:
        """Fail the unanswered calls of a process that is gone."""
        for serial, (name, take) in list(self._asked.items()):
            if name == peer and self._asked.pop(serial, None) is not None:
                take(Reply(serial, error=PackedError.of(error)))

    def answer(self, caller: Caller, value: object = None, error: PackedError | None = None) -> None:
        """Answer a call, if it wants an answer."""
        if caller.serial:
            self.send(caller.stream, Reply(caller.serial, value, error))

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function soon, in the thread of the methods."""
        self._inbox.put(function)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._inbox.put(None)

    def received(self, stream: PeerStream, message: ManagerCall | Reply) -> None:
        """Handle a message, in the reading thread."""
        if isinstance(message, Reply):
            _, take = self._asked.pop(message.serial, ("", None))
            if take is not None:
                take(message)
            return
        heard = self._at_once.get(message.name)
        if heard is not None:
            heard(*message.args)
        self.soon(partial(self._run, Caller(stream, message.serial), message))

    def _run(self, caller: Caller, call: ManagerCall) -> None:
        try:
            value = self._methods[call.name](caller, *call.args)
        except RLinfError as error:
            if not caller.serial:
                raise
            # Without its traceback, which is in this runtime: the error says what the caller did wrong.
            self.answer(caller, error=PackedError.of(error.with_traceback(None)))
        else:
            if value is not LATER:
                self.answer(caller, value)

    def _deliver(self, stream: PeerStream, received: ReceivedMessage) -> None:
        self.received(stream, cast("ManagerCall | Reply", received.load()))

    def send(self, stream: PeerStream, message: ManagerCall | Reply) -> None:
        """Send a message without waiting."""
        endpoint = self._endpoint
        work = endpoint.work(OperationKind.SEND, stream.peer, stretched(_SEND_SECONDS))
        endpoint.send_async(stream, endpoint.message(message, tag=CONTROL), work)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._serve, name="rlinf-control", daemon=True).start()

    def _serve(self) -> None:
        while not self._stopped:
            for step in (self._next, self._tick):
                try:
                    step()
                except Exception:  # noqa: BLE001 - one failing call must not stop the thread
                    if not self._stopped:
                        _log.exception("a control message failed")

    def _next(self) -> None:
        try:
            function = self._inbox.get(timeout=self._every())
        except queue.Empty:
            return
        if function is not None:
            function()
