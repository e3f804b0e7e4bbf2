"""The settings of an endpoint, read from the environment once."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_core import env_vars
from rlinf_core.collective import memory_budget
from rlinf_core.waiting import contact_seconds

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
