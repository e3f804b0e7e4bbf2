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

# How many processes may wait for one device at a time.
_WAITERS = 1024


class DeviceLock:
    """The lock of the accelerators that are assigned to one worker: `with self.device_lock: ...`.

    Of the workers of a job on one node, at most one at a time holds an accelerator's lock. A worker that is assigned
    several accelerators takes all of their locks; one that is assigned none shares nothing, and takes none. The lock is
    about its block only: it keeps nobody from computing outside one. It ends with its process at the latest. Waiters
    are served in no particular order.

    Each lock is a listening socket of Linux's abstract namespace, whose name only this job knows: one process can bind
    it, the others connect to it and read until it is gone. So it needs no file, and no clean-up after a kill.

    Args:
        secret: of the job; locks of other jobs are others.
        devices: the accelerators, as in `NVIDIA 3`.
        waits: where a wait for it is published.
    """

    def __init__(self, secret: bytes, devices: Iterable[str], waits: WaitTable) -> None:
        # In one order, whoever asks: two workers never hold what the other one waits for.
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
                "this thread holds the device lock already", help="release it first: it is not held twice"
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
        """Let the next process have the accelerators.

        Raises:
            RuntimeFailure: the calling thread does not hold the lock.
        """
        if not self.held:
            raise RuntimeFailure("this thread does not hold the device lock", help="`acquire` it first")
        held, self._held, self._owner = self._held, [], None
        _close(held)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _wait_for_holder(self, name: bytes, device: str, seconds: float) -> None:
        """Return when a lock that another process holds may be free again."""
        work = Work[object](OperationKind.DEVICE_LOCK, device, seconds, self._waits)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, suppress(ConnectionError):
            # At 0 it would not wait for the connection either.
            line.settimeout(max(1e-3, seconds))
            line.connect(name)

            def wake() -> None:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

            # Whoever cancels the wait fails `work`.
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
    """Return the socket that is the lock of one device, or None while another process has it."""
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
    """Return the name of a device's lock: nobody who does not know the secret can guess it."""
    digest = hashlib.blake2b(device.encode(), key=secret[:64], digest_size=16).hexdigest()
    return b"\0rlinf-device-" + str(os.getuid()).encode() + b"-" + digest.encode()


def _peer(line: socket.socket) -> int:
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def _close(sockets: list[socket.socket]) -> None:
    for lock_socket in sockets:
        lock_socket.close()
