"""The stores, in the sense of `torch.distributed`: keys and values by which the ranks of a group find each other.

Each group has its own store. A call does not name it: the address of the calling worker selects it.
"""

from __future__ import annotations

from collections.abc import Callable

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.supervision.rpc import LATER, Caller


class RankStores:
    """The stores of a job's groups.

    Args:
        answer: answers a read that had to wait.
    """

    def __init__(self, answer: Callable[[Caller, object], None]) -> None:
        self._reply = answer
        self._values: dict[str, dict[str, bytes]] = {}
        # Reads that wait for their keys.
        self._waiting: list[tuple[Caller, tuple[str, ...]]] = []

    def read(self, caller: Caller, keys: tuple[str, ...], wait: bool) -> object:
        """Return the value of each key, or None for a missing key; `LATER` if `wait` and a key is missing."""
        values = self._values_of(caller)
        result = tuple(values.get(key) for key in keys)
        if wait and None in result:
            self._waiting.append((caller, keys))
            return LATER
        return result

    def write(self, caller: Caller, key: str, value: bytes | int | None) -> bytes | None:
        """Store bytes, add an int to the key's number, or remove the key (None); return the new or removed value."""
        values = self._values_of(caller)
        before = values.get(key)
        if value is None:
            values.pop(key, None)
            return before
        values[key] = str(int(before or 0) + value).encode() if isinstance(value, int) else value
        waiting, self._waiting = self._waiting, []
        for reader, keys in waiting:
            result = self.read(reader, keys, True)
            if result is not LATER:
                self._reply(reader, result)
        return values[key]

    def forget(self, stream: PeerStream, serial: int) -> None:
        """Drop a read whose sender no longer waits."""
        self._waiting = [read for read in self._waiting if read[0] != (stream, serial)]

    def drop(self, group: str) -> None:
        """Drop the values of a group that has ended or is launched again."""
        self._values.pop(group, None)

    def _values_of(self, caller: Caller) -> dict[str, bytes]:
        return self._values.setdefault(str(WorkerAddress.from_name(caller.name).get_parent_address()), {})
