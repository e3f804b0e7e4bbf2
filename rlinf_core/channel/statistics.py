"""Statistics of the items that went through a channel, by key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """The figures of one key of a channel.

    Attributes:
        puts: items that were accepted.
        gets: items that were delivered and did not come back.
        bytes: bytes of the accepted items.
        depth: items that nobody has taken or reserved.
        waiting_puts: puts that wait for room now.
        waiting_gets: gets that wait for items now.
        put_wait: seconds that producers have waited, over all puts whose wait has ended.
        get_wait: seconds that consumers have waited, over all gets whose wait has ended.
    """

    puts: int
    gets: int
    bytes: int
    depth: int
    waiting_puts: int
    waiting_gets: int
    put_wait: float
    get_wait: float


class Tally:
    """The counts behind `KeyStatistics`."""

    __slots__ = ("bytes", "get_wait", "gets", "put_wait", "puts")

    def __init__(self) -> None:
        self.puts = 0
        self.gets = 0
        self.bytes = 0
        self.put_wait = 0.0
        self.get_wait = 0.0

    def add(self, other: Tally) -> None:
        """Count in what `other` has counted."""
        self.puts += other.puts
        self.gets += other.gets
        self.bytes += other.bytes
        self.put_wait += other.put_wait
        self.get_wait += other.get_wait

    def snapshot(self, depth: int, waiting_puts: int, waiting_gets: int) -> KeyStatistics:
        """Return the figures now."""
        return KeyStatistics(
            self.puts, self.gets, self.bytes, depth, waiting_puts, waiting_gets, self.put_wait, self.get_wait
        )
