"""A thread for calls that block, so that a controller keeps answering meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class WorkerThread:
    """Runs jobs one after the other. A daemon: a job that never returns does not keep the process alive.

    Args:
        name: the name of the thread.
        failed: receives the error of a job, on this thread.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Jobs that wait or run. Not whether the queue is empty: a job that was just taken from it has not begun.
        self._left = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether no job runs or waits."""
        with self._lock:
            return self._left == 0

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after those that wait; returns at once."""
        with self._lock:
            self._left += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - reported to the owner of the thread
                self._failed(error)
            with self._lock:
                self._left -= 1
