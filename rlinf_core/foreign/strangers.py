"""Limits on unauthenticated connections, and on warnings about them, for every listener of rlinf.

A new connection is always admitted, so that a flood of connections cannot lock out members: at the limit, a waiting
connection is closed instead.

This file is sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Unproven(Generic[C]):
    """The connections that have not authenticated yet, limited in number, per address and in time.

    At the limit, a new connection evicts the oldest connection of the address that has the most. To renew its time, a
    connection that has sent something may be removed and admitted again. Thread-safe.

    Args:
        most: the maximum number of connections.
        from_one: the maximum per address; by default half of `most`, so that no address takes all.
        seconds: the seconds after which an unauthenticated connection is overdue; by default never.
    """

    def __init__(self, most: int, *, from_one: int = 0, seconds: float = float("inf")) -> None:
        self._most = max(1, most)
        self._from_one = from_one or max(1, most // 2)
        self._seconds = seconds
        self._lock = threading.Lock()
        # In order of arrival: connection, address, time.
        self._waiting: dict[int, tuple[C, str, float]] = {}

    def admit(self, connection: C, address: str, now: float = 0.0) -> list[C]:
        """Add a new connection; return the connections to close in exchange."""
        with self._lock:
            leaving: list[C] = []
            same = [key for key, (_, other, _) in self._waiting.items() if other == address]
            while len(same) >= self._from_one:
                leaving.append(self._waiting.pop(same.pop(0))[0])
            while len(self._waiting) >= self._most:
                leaving.append(self._waiting.pop(self._longest_of_the_most())[0])
            self._waiting[id(connection)] = connection, address, now
            return leaving

    def remove(self, connection: C) -> bool:
        """Remove a connection that has authenticated or closed; return whether it was present."""
        with self._lock:
            return self._waiting.pop(id(connection), None) is not None

    def remove_overdue(self, now: float) -> list[C]:
        """Remove and return the connections that have not authenticated in time."""
        with self._lock:
            late = [key for key, (_, _, since) in self._waiting.items() if now - since >= self._seconds]
            return [self._waiting.pop(key)[0] for key in late]

    def remove_all(self) -> list[C]:
        """Remove and return all connections."""
        with self._lock:
            remaining = [connection for connection, _, _ in self._waiting.values()]
            self._waiting.clear()
            return remaining

    def waiting(self) -> list[C]:
        """Return the connections, oldest first.

        It takes no lock, so that a forked child, in which no thread would release the lock, can call it.
        """
        return [connection for connection, _, _ in list(self._waiting.values())]

    def _longest_of_the_most(self) -> int:
        counts: dict[str, int] = {}
        for _, address, _ in self._waiting.values():
            counts[address] = counts.get(address, 0) + 1
        largest = max(counts.values())
        return next(key for key, (_, address, _) in self._waiting.items() if counts[address] == largest)


def origin_of(peer: Any) -> str:
    """Return the address under which a connection is counted: the host, or the /64 network of an IPv6 host.

    Args:
        peer: the peer, as `getpeername` or `accept` returned it.
    """
    if not isinstance(peer, tuple) or not peer:
        return "a local process"
    host = str(peer[0])  # pyright: ignore[reportUnknownArgumentType]
    try:
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return host
    if packed.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntoa(packed[12:])
    # One machine can use all addresses of a /64 network.
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))


class LimitedWarnings:
    """A limiter of warnings that unauthenticated peers can cause; warnings above the limit are only counted.

    Args:
        warn: a function that takes the text of a warning.
        most: the maximum number of warnings per interval.
        seconds: the length of the interval.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        most: int = 5,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warn, self._most, self._seconds, self._clock = warn, most, seconds, clock
        self._lock = threading.Lock()
        self._begun, self._count = clock(), 0

    def __call__(self, text: str) -> None:
        with self._lock:
            now, left_out = self._clock(), 0
            if now - self._begun >= self._seconds:
                left_out, self._begun, self._count = max(0, self._count - self._most), now, 0
            self._count += 1
            silent = self._count > self._most
            last = self._count == self._most
        self._tell_left_out(left_out)
        if not silent:
            self._warn(f"{text}; further ones within {self._seconds:g} s are only counted" if last else text)

    def close(self) -> None:
        """Log the number of omitted warnings."""
        with self._lock:
            left_out, self._count = max(0, self._count - self._most), 0
        self._tell_left_out(left_out)

    def _tell_left_out(self, count: int) -> None:
        if count:
            self._warn(f"{count} more warnings of that kind were left out")
