"""The search for the causes of deaths, by the manager of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

from rlinf_core.collective.connections.connection import NO_ANSWER
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import ProcessEnd
from rlinf_core.node.process_end import EndWatch
from rlinf_core.supervision.deaths import exit_reason
from rlinf_core.supervision.lives import Hello
from rlinf_core.supervision.rpc import Reply

# Seconds for another process on a dead one's node to report its cause of death.
_POSTMORTEM_SECONDS: Final = 0.5


@dataclass(slots=True)
class Peer:
    """A registered process."""

    name: str
    stream: PeerStream
    hello: Hello
    exit_reason: str | None = None
    # Processes that it has looked up, and that have looked it up.
    acquaintances: set[str] = field(default_factory=set[str])


class Conclude(Protocol):
    """Takes the cause of a death, None where there is none.

    `vanished` says that its host no longer answers, `end` how the process ended, where its kernel reports that.
    """

    def __call__(
        self, peer: Peer, cause: str | None, *, vanished: bool = False, end: ProcessEnd | None = None
    ) -> None: ...


class _Death(NamedTuple):
    peer: Peer
    until: float


class DeathCauses:
    """The search for the causes of deaths: in what the kernel of this machine reports, and at the end of logs.

    Args:
        place: the place of this process, whose kernel reports how processes there end.
        read_log: has a process at the place of a dead one read the end of its log, and hands the reply on.
        conclude: is called once for each death that is searched.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        place: tuple[str, int],
        read_log: Callable[[Peer, Callable[[Reply], object]], object],
        conclude: Conclude,
        clock: Callable[[], float],
    ) -> None:
        self._place, self._read_log, self._conclude, self._clock = place, read_log, conclude, clock
        self._deaths: dict[str, _Death] = {}
        self._ends = EndWatch()

    @property
    def searching(self) -> bool:
        """Whether a death has no cause yet."""
        return bool(self._deaths)

    def watch(self, name: str, hello: Hello) -> None:
        """Watch how a process will end, if it is at the place of this one."""
        if hello.info.place == self._place:
            self._ends.watch(name, hello.info.pid)

    def drop(self, name: str) -> None:
        """Forget a process: its end is expected."""
        self._deaths.pop(name, None)
        self._ends.drop(name)

    def search(self, peer: Peer, reason: str) -> None:
        """Find out why a process died.

        Args:
            reason: why its connection ended.
        """
        if reason.startswith(NO_ANSWER):
            self._end_search(peer, reason, vanished=True)
        elif peer.exit_reason is not None:
            self._end_search(peer, peer.exit_reason)
        else:
            death = self._deaths[peer.name] = _Death(peer, self._clock() + _POSTMORTEM_SECONDS)
            if peer.hello.info.place == self._place:
                # Its connection may end before its parent has collected how it ended.
                self._look_at_end(death, last=not self._ends.is_watched(peer.name))
            else:
                self._read_log(peer, partial(self._take, death))

    def hurry(self, name: str) -> None:
        """Conclude a death, if it is searched, by what is known now."""
        death = self._deaths.get(name)
        if death is not None:
            self._look_at_end(death, last=True)

    def tick(self) -> None:
        """Look again at the deaths that are searched."""
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
        """Conclude a death of this machine once the kernel reports how it ended; `last` waits no longer."""
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
        self._conclude(peer, cause, vanished=vanished, end=end)
