"""The store through which the ranks of a group meet, and the network interface of their process group.

Torch's own store listens on every address without authentication. This store is in the job's manager, which each rank
reaches over the data plane.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, cast

from torch.distributed import DistStoreError, FileStore, Store  # pyright: ignore[reportPrivateImportUsage] - public

from rlinf_core import CommunicationTimeoutError
from rlinf_core.cluster.driver_folder import base_folder
from rlinf_core.supervision.client import ManagerClient, current_client

_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE: Final = "lo"
_SIOCGIFADDR: Final = 0x8915
# Torch's groups hold only the C++ half of a store, which cannot call back once the Python half is collected.
_opened: list[Store] = []


def open_rank_store(world_size: int, seconds: float) -> Store:
    """Return the store in which the ranks of this process's group meet; no other process can reach it.

    Without a job the store is a file of this user, for ranks that one process starts on one machine.

    Args:
        world_size: number of ranks.
        seconds: time limit of a wait for another rank.
    """
    client = current_client()
    if client is None:
        return FileStore(str(base_folder() / f"ranks-{int(os.environ['MASTER_PORT'])}-{os.getppid()}"), world_size)
    store = RankStore(client, seconds)
    _opened.append(store)
    return store


def bind_gloo(store: Store, rank: int, world_size: int) -> None:
    """Have gloo listen on loopback if all ranks are on one machine, else on the interface of the data plane.

    `GLOO_SOCKET_IFNAME` of the job file has precedence. Collective.
    """
    client = current_client()
    interface = _LOOPBACK_INTERFACE
    if client is not None:
        info = client.endpoint.info
        store.set(f"machine/{rank}", str(info.place))
        machines = {store.get(f"machine/{other}") for other in range(world_size)}
        if len(machines) > 1:
            interface = _interface_of(info.tcp_host)
    if interface is not None:
        os.environ.setdefault(_GLOO_INTERFACE, interface)


def _interface_of(address: str) -> str | None:
    """Return the interface with this IPv4 address; None if no interface has it, as behind NAT."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class RankStore(Store):
    """The store of this process's group. Torch calls it from any thread.

    Args:
        client: the connection to the job's manager.
        seconds: time limit of a wait for another rank.
    """

    def __init__(self, client: ManagerClient, seconds: float) -> None:
        super().__init__()
        self._client = client
        self._seconds = seconds

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._write(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it is stored."""
        (value,) = self._wait_for([key], self._seconds)
        return value

    def add(self, key: str, value: int) -> int:
        """Add `value` to a number, and return the sum."""
        return int(self._write(key, value) or 0)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return None not in self._client.read_store(keys, self._seconds, wait=False)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values."""
        self._wait_for(keys, self._seconds if timeout is None else timeout.total_seconds())

    # torch's C++ code calls methods of these names.

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Remove a value; return whether there was one."""
        return self._write(key, None) is not None

    def clone(self) -> RankStore:
        """Return this store, which any thread can use."""
        return self

    def _write(self, key: str, value: bytes | int | None) -> bytes | None:
        return self._client.write_store(key, value, self._seconds)

    def _wait_for(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        try:
            values = self._client.read_store(keys, seconds, wait=True)
        except CommunicationTimeoutError:
            # Torch's barriers wait in short steps, and take only this error as the end of a step.
            raise DistStoreError(
                f"`{self._client.me}` has waited {seconds:g} s for another rank of its group to store {', '.join(keys)}"
            ) from None
        return cast("tuple[bytes, ...]", values)
