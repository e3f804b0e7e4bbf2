"""The deaths of workers that a process knows of: reported by the manager, or brought about by itself."""

from __future__ import annotations

import threading
from collections.abc import Collection

from rlinf_core.errors import WorkerDiedError
from rlinf_core.manager.manager_messages import Died

# Seconds that a failure may be delayed to learn why its peer died.
CAUSE_SECONDS = 1.0


class DeathNews:
    """The deaths that a process has heard of. Any thread may ask."""

    def __init__(self) -> None:
        self._deaths: dict[str, Died] = {}
        self._ended_here: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, died: Died) -> None:
        """Note a death, and wake those who wait for it."""
        with self._changed:
            self._deaths[died.address] = died
            self._changed.notify_all()

    def forget(self, name: str) -> None:
        """Drop the news of a worker, whose successor is launched."""
        with self._changed:
            self._deaths.pop(name, None)

    def of(self, peer: str, incarnation: int = 0) -> Died | None:
        """Return the death of a worker in this incarnation of its group or a later one; None while there is no news."""
        died = self._deaths.get(peer)
        return died if died is not None and died.incarnation >= incarnation else None

    def wait(self, peer: str, incarnation: int = 0, endpoints: Collection[str | None] = ()) -> Died | None:
        """Return how a worker died, as `of`; waits briefly for the manager's report.

        Args:
            peer: its address.
            incarnation: the incarnation of its group.
            endpoints: the incarnations of its endpoint that count; none: all.
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
        return WorkerDiedError(peer, node=died.node, cause=died.cause) if died is not None and died.vanished else None

    def end_here(self, name: str, incarnation: int, cause: str) -> None:
        """Note that this process ends a worker, and why."""
        self._ended_here[name, incarnation] = cause

    def ended_here(self, name: str, incarnation: int) -> str | None:
        """Return why this process has ended a worker; None where it has not."""
        return self._ended_here.get((name, incarnation))

    def close(self) -> bool:
        """Wake all who wait: no more news will come. Return False where that was done before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            return True
