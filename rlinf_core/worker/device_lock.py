"""Mutual exclusion among the processes of a job that share an accelerator."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from rlinf_core.collective.work import WaitTable, Work, plain_seconds
from rlinf_core.errors import CommunicationTimeoutError, RuntimeFailure
from rlinf_core.waiting import OperationKind

# Maximum number of processes waiting for one device.
_WAITERS = 1024


class DeviceLock:
    """The lock of the accelerators that are assigned to one worker: `with self.device_lock: ...`.

    Among the workers of a job on one node, at most one at a time holds an accelerator's lock. A worker with several
    accelerators takes all of their locks; one with none takes none. The lock is advisory: it does not prevent computing
    outside of a block. It is released with its process at the latest. Waiters are served in no particular order.

    Each lock is a listening socket in Linux's abstract namespace, under a name known only to this job: one process can
    bind it, the others connect and read until it is closed. So it needs no file, and no cleanup after a kill.

    Args:
        secret: the secret of the job; locks of other jobs are distinct.
        devices: the accelerators, as in `NVIDIA 3`.
        waits: the table in which waits are published.
    """

    def __init__(self, secret: bytes, devices: Iterable[str], waits: WaitTable) -> None:
        # In a fixed order, so that two workers cannot deadlock.
        self._names = {_socket_name(secret, device): device for device in sorted(devices)}
        self._waits = waits
        self._held: list[socket.socket] = []
        self._owner: int | None = None

    @property
    def held(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def acquire(self, timeout: float | None = None) -> None:
        """Wait until no other process holds the accelerators, and hold them.

        Args:
            timeout: seconds; by default `RLINF_TIMEOUT`.

        Raises:
            CommunicationTimeoutError: another process held one of them for that long.
            CancelledOperationError: the call that waits was cancelled.
            RuntimeFailure: the calling thread holds the lock already.
        """
        if self.held:
            raise RuntimeFailure(
                "this thread already holds the device lock", help="release it first: the lock is not reentrant"
            )
        seconds = self._waits.patience if timeout is None else plain_seconds(timeout)
        deadline = time.monotonic() + seconds
        held_sockets: list[socket.socket] = []
        try:
            for name, device in self._names.items():
                while (lock := _bound(name)) is None:
                    self._wait_for_holder(name, device, max(0.0, deadline - time.monotonic()))
                held_sockets.append(lock)
        except BaseException:
            _close(held_sockets)
            raise
        self._held, self._owner = held_sockets, threading.get_ident()

    def release(self) -> None:
        """Release the accelerators for the next process.

        Raises:
            RuntimeFailure: the calling thread does not hold the lock.
        """
        if not self.held:
            raise RuntimeFailure("this thread does not hold the device lock", help="call `acquire` first")
        held, self._held, self._owner = self._held, [], None
        _close(held)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _wait_for_holder(self, name: bytes, device: str, seconds: float) -> None:
        """Wait until a lock held by another process may be free again."""
        work = Work[object](OperationKind.DEVICE_LOCK, device, seconds, self._waits)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, suppress(ConnectionError):
            # At 0 it would not wait for the connection either.
            line.settimeout(max(1e-3, seconds))
            line.connect(name)

            def wake() -> None:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

            # Cancelling the wait fails `work`.
            work.add_done_callback(wake)
            try:
                with self._waits.during(work):
                    line.recv(1)
            except TimeoutError:
                holder = f"process {_peer(line)} of this machine holds the lock of {device}"
                raise CommunicationTimeoutError(work.title, seconds, picture=holder) from None
        if work.settled:
            work.result()


def _bound(name: bytes) -> socket.socket | None:
    """Return the bound socket of one device's lock, or None while another process has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        lock.listen(_WAITERS)
    except BaseException as error:
        lock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return None
        raise
    return lock


def _socket_name(secret: bytes, device: str) -> bytes:
    """Return the name of a device's lock, which cannot be guessed without the secret."""
    digest = hashlib.blake2b(device.encode(), key=secret[:64], digest_size=16).hexdigest()
    return b"\0rlinf-device-" + str(os.getuid()).encode() + b"-" + digest.encode()


def _peer(line: socket.socket) -> int:
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def _close(sockets: list[socket.socket]) -> None:
    for lock_socket in sockets:
        lock_socket.close()
