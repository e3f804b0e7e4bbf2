"""The addresses and the identity of a process: the value that it publishes once."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """The ways to reach the endpoint of one process; pickles, so that a registry can hold it.

    Attributes:
        incarnation: names this endpoint among all that ever were; a relaunched worker has another one.
        host: the boot id of the machine; equal in all containers of one machine.
        network: the inode of the network namespace; unix sockets and addresses mean the same within one.
        unix_path: the unix socket it listens at, or None.
        tcp_host: the address it listens at, as others see it.
        tcp_port: the port there.
        pid: its process id, as itself sees it.
        interpreter: the Python that runs it.
        python: that Python's version.
        torch: the version of torch installed there, or None.
    """

    incarnation: str
    host: str
    network: int
    unix_path: str | None
    tcp_host: str
    tcp_port: int
    pid: int
    interpreter: str
    python: str
    torch: str | None

    def shares_host_with(self, other: EndpointInfo) -> bool:
        """Return whether a unix socket may reach from one to the other; only trying it tells for certain."""
        return self.host == other.host and self.network == other.network and bool(self.unix_path and other.unix_path)

    def __str__(self) -> str:
        return f"pid {self.pid} at {self.tcp_host}:{self.tcp_port}"


def make_endpoint_info(unix_path: str | None, tcp_host: str, tcp_port: int) -> EndpointInfo:
    """Return the info of this process, under a new incarnation."""
    return EndpointInfo(
        incarnation=secrets.token_hex(8),
        host=host_identity(),
        network=network_identity(),
        unix_path=unix_path,
        tcp_host=tcp_host,
        tcp_port=tcp_port,
        pid=os.getpid(),
        interpreter=sys.executable,
        python=platform.python_version(),
        torch=_torch_version(),
    )


def host_identity() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{platform.node()}"


def network_identity() -> int:
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def _torch_version() -> str | None:
    """Without importing torch, which takes seconds."""
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
