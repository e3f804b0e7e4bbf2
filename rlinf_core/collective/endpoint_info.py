"""Endpoint information: the location of a process, the resolvers from worker addresses to it, and its settings."""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.collective import memory_budget
from rlinf_core.errors import EnvironmentVariableError, PeerNotFoundError
from rlinf_core.process.proc import boot_id, namespace
from rlinf_core.suggest import quoted
from rlinf_core.waiting import contact_seconds


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """The network location and the identity of one process's endpoint; picklable.

    Attributes:
        incarnation: the unique id of this endpoint; a relaunched worker gets a new one.
        host: the boot id of the machine, the same in all its containers.
        network: the inode of the network namespace; unix sockets and addresses are valid within one.
        pid: the process id in the process's own namespace.
    """

    incarnation: str
    host: str
    network: int
    unix_path: str | None
    tcp_host: str
    tcp_port: int
    pid: int

    def shares_host_with(self, other: EndpointInfo) -> bool:
        """Return whether a unix socket may connect the two; only a connection attempt tells for certain."""
        return self.place == other.place and bool(self.unix_path and other.unix_path)

    @property
    def place(self) -> tuple[str, int]:
        """The machine and its network namespace: processes of one place usually see each other's files and pids."""
        return self.host, self.network

    def __str__(self) -> str:
        return f"pid {self.pid} at {self.tcp_host}:{self.tcp_port}"


def make_endpoint_info(unix_path: str | None, tcp_host: str, tcp_port: int) -> EndpointInfo:
    host, network = own_place()
    return EndpointInfo(
        incarnation=secrets.token_hex(8),
        host=host,
        network=network,
        unix_path=unix_path,
        tcp_host=tcp_host,
        tcp_port=tcp_port,
        pid=os.getpid(),
    )


def own_place() -> tuple[str, int]:
    """Return this process's place, as `EndpointInfo.place`."""
    return boot_id() or f"unknown-{platform.node()}", namespace("net")


_SIOCGIFADDR = 0x8915


def advertised_address() -> str:
    """Return the IPv4 address of the interface `RLINF_NET_IF` if set, else that of the default route.

    Raises:
        EnvironmentVariableError: no such interface, or it has no IPv4 address.
    """
    interface = env_vars.NET_IF.get()
    if interface is None:
        return _default_route_address()
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise EnvironmentVariableError(
                env_vars.NET_IF.name, interface, expected=_interfaces(), help=env_vars.NET_IF.doc
            ) from None
    return socket.inet_ntoa(answer[20:24])


def advertised_on(ip: str) -> str | None:
    """Return the address to advertise on a node that Ray reaches at `ip`; None if `RLINF_NET_IF` decides."""
    return None if env_vars.NET_IF.get() else ip


def _interfaces() -> str:
    names = quoted(name for _, name in socket.if_nameindex())
    return f"an interface with an IPv4 address; there are {names}"


def _default_route_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            # No packet is sent: the kernel only chooses the route. The address is reserved for documentation.
            sock.connect(("192.0.2.1", 9))
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class Resolver(ABC):
    """A way to find the endpoint of a worker."""

    @abstractmethod
    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        """Return the endpoint of `address`, waiting at most `timeout` seconds for it to be published.

        It is called again after a connection was lost, so it must not return a stale endpoint.

        Raises:
            UnknownGroupError: no such group exists or will exist.
            PeerNotFoundError: the endpoint was not published in time.
            WorkerDiedError: the worker is known to be dead.
        """


class StaticResolver(Resolver):
    """A resolver with a fixed table."""

    def __init__(self, endpoints: Mapping[WorkerAddress, EndpointInfo]) -> None:
        self.endpoints = dict(endpoints)

    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        info = self.endpoints.get(address)
        if info is None:
            raise PeerNotFoundError(address.get_name(), f"`{address.get_name()}` has no known endpoint")
        return info


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an endpoint. Sizes are bytes, times seconds.

    Attributes:
        timeout: the time limit of an operation without a timeout of its own.
        connect_timeout: the time limit of the first contact with a peer.
        handshake_timeout: the time limit for a connecting peer to prove that it belongs to the cluster.
        pending_handshakes: the most unproven connections per listening socket; an old one is closed for a new one.
        inline_limit: messages up to this size travel inside their frame.
        arena_bytes: the most shared memory that the arena holds.
        spill_after: how long a sender waits for room in the arena before it takes memory outside of it.
        direct_limit: asynchronous sends up to this size are done before the call returns, if they need not wait.
        inbox_messages: undelivered messages of one connection before its reading pauses.
        inbox_bytes: undelivered bytes outside the arena, of the whole endpoint, before reading pauses.
        socket_buffer: the kernel's buffer for each direction of a TCP connection.
        ports: the TCP ports to choose the listener's from; None for any.
        spin: how long a caller polls before it sleeps, since sleeping costs a wake-up: a caller of a channel its
            mailbox, and one that reads a connection the connection.
        reader_spin: how long the thread of a connection polls for the next frame before it sleeps.
    """

    timeout: float = 1800.0
    connect_timeout: float = 30.0
    handshake_timeout: float = 5.0
    pending_handshakes: int = 64
    inline_limit: int = 32 * KIB
    arena_bytes: int = GIB
    spill_after: float = 0.5
    direct_limit: int = MIB
    inbox_messages: int = 20_000
    inbox_bytes: int = 256 * MIB
    socket_buffer: int = 4 * MIB
    ports: range | None = None
    spin: float = 50e-6
    reader_spin: float = 0.0

    @classmethod
    def from_environment(cls) -> Settings:
        """Return the settings of this process.

        Raises:
            EnvironmentVariableError: a variable is invalid.
        """
        arena = env_vars.SHM_LIMIT.get()
        return cls(
            timeout=env_vars.TIMEOUT.get(),
            connect_timeout=contact_seconds(),
            arena_bytes=arena if arena is not None else memory_budget.default_arena_bytes(),
            ports=env_vars.PORTS.get(),
        )
