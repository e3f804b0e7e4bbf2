"""The keys and values by which the ranks of a group find each other: what `torch.distributed` calls a store.

Each group has its own. Nobody names it: the data plane has proved which worker a request is from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.manager.manager_messages import StoreRead, StoreWrite


class RankStores:
    """The stores of a job's groups.

    Args:
        reply: sends the reply to the request with this serial.
    """

    def __init__(self, reply: Callable[[PeerStream, int, object], None]) -> None:
        self._reply = reply
        self._values: dict[str, dict[str, bytes]] = {}
        self._waiting: list[_WaitingRead] = []

    def read(self, stream: PeerStream, serial: int, read: StoreRead) -> None:
        """Reply to a read, once its keys are there if it waits."""
        if not self._answer(waiting := _WaitingRead(stream, serial, read)):
            self._waiting.append(waiting)

    def write(self, stream: PeerStream, serial: int, write: StoreWrite) -> None:
        """Change a value, and reply to what has waited for it."""
        values = self._values_of(stream)
        before = values.get(write.key)
        if write.value is None:
            values.pop(write.key, None)
        elif isinstance(write.value, int):
            values[write.key] = str(int(before or 0) + write.value).encode()
        else:
            values[write.key] = write.value
        self._reply(stream, serial, before if write.value is None else values[write.key])
        self._waiting = [waiting for waiting in self._waiting if not self._answer(waiting)]

    def forget(self, stream: PeerStream, serial: int) -> None:
        """Drop a read whose sender no longer waits."""
        self._waiting = [waiting for waiting in self._waiting if waiting[:2] != (stream, serial)]

    def drop(self, group: str) -> None:
        """Drop the values of a group: it has ended, or is launched once more."""
        self._values.pop(group, None)

    def _answer(self, waiting: _WaitingRead) -> bool:
        values = self._values_of(waiting.stream)
        result = tuple(values.get(key) for key in waiting.read.keys)
        if waiting.read.wait and None in result:
            return False
        self._reply(waiting.stream, waiting.serial, result)
        return True

    def _values_of(self, stream: PeerStream) -> dict[str, bytes]:
        return self._values.setdefault(str(WorkerAddress.from_name(stream.peer).get_parent_address()), {})


class _WaitingRead(NamedTuple):
    stream: PeerStream
    serial: int
    read: StoreRead
