"""Two or more processes with an endpoint each, without Ray."""

from __future__ import annotations

import array
import importlib.util
import inspect
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.handshake import ClusterSecret

_SCRIPT = Path(__file__).with_name("peer_process.py")
_ROOT = Path(__file__).parents[3]
_PATIENCE = 60.0
THERE = WorkerAddress("there", 0)


def _side_type() -> Any:
    spec = importlib.util.spec_from_file_location("rlinf_test_peer_process", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Side


def _started(pipe: socket.socket, *command: str, server: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, str(_SCRIPT), *(["--server"] if server else []), str(pipe.fileno())],
        pass_fds=[pipe.fileno()],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )


@cache
def _server() -> socket.socket:
    """Start the process that has imported torch, and forks peers; it ends with this one."""
    ours, theirs = socket.socketpair()
    _started(theirs, sys.executable, server=True)
    theirs.close()
    return ours


class Forked:
    """A process that the server forked, as `subprocess.Popen` has one."""

    def __init__(self, pipe: socket.socket) -> None:
        socket.send_fds(_server(), [b"f"], [pipe.fileno()])
        (self.pid,) = array.array("q", _server().recv(8))
        self._end = os.pidfd_open(self.pid)

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, number)

    def poll(self) -> int | None:
        return 0 if select.select([self._end], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)

    def close(self) -> None:
        os.close(self._end)


class Peer:
    """A process of its own that runs functions of the test: `peer.call(function, *args)` calls `function(side, *args)`.

    The function is sent as source, so it can use nothing of the test module but its arguments.
    """

    def __init__(
        self,
        name: str,
        secret: ClusterSecret,
        settings: Settings,
        *,
        ip: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
        interpreter: str = sys.executable,
    ) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        own = prefix or interpreter != sys.executable
        self.process = _started(theirs, *prefix, interpreter) if own else Forked(theirs)
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._pipe.send((name, secret.key, ip, settings))
        self.info = self._receive()

    def _receive(self) -> Any:
        assert self._pipe.poll(_PATIENCE), f"{self.name} does not answer"
        return self._pipe.recv()

    def meet(self, name: str, info: Any) -> None:
        self._pipe.send(("meet", name, info))
        self._receive()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((textwrap.dedent(inspect.getsource(function)), function.__name__, args))

    def result(self) -> Any:
        good, value = self._receive()
        if not good:
            raise value.unpack()
        return value

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.result()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def dismiss(self) -> None:
        """Let it end by itself."""
        with suppress(OSError):
            self._pipe.send(None)

    def stop(self) -> None:
        if self.process.poll() is None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        if isinstance(self.process, Forked):
            self.process.close()
        self._pipe.close()


class Cast:
    """This process and its peers, which all know one another."""

    def __init__(self, secret: ClusterSecret, settings: Settings, ip: str = "127.0.0.1") -> None:
        self.secret = secret
        self.settings = settings
        self.here = _side_type()("here:0", secret.key, ip, settings)
        self.peers: dict[str, Peer] = {}

    def add(self, name: str, **options: Any) -> Peer:
        peer = Peer(name, self.secret, options.pop("settings", self.settings), **options)
        self.here.meet(name, peer.info)
        peer.meet("here:0", self.here.endpoint.info)
        self.peers.pop(name, None)  # a relaunch
        for other in self.peers.values():
            other.meet(name, peer.info)
            peer.meet(other.name, other.info)
        self.peers[name] = peer
        return peer

    def stop(self) -> None:
        for peer in self.peers.values():
            peer.dismiss()
        for peer in self.peers.values():
            peer.stop()
        if self.here is not None:
            self.here.endpoint.close()


def over_tcp(here: Any) -> None:
    """Make this process believe that its peers are on other hosts."""
    infos = here.resolver.endpoints
    for address, info in infos.items():
        if address != here.me:
            infos[address] = replace(info, unix_path=None)


def receive(side: Any) -> Any:
    return side.group().recv(WorkerAddress("here", 0))


def echo(side: Any, times: int) -> None:
    group = side.group()
    here = WorkerAddress("here", 0)
    for _ in range(times):
        group.send(group.recv(here), here)


@pytest.fixture
def make_cast() -> Iterator[Callable[..., Cast]]:
    """Makes casts with settings of their own."""
    made: list[Cast] = []

    def make(**settings: Any) -> Cast:
        values = {"timeout": 30.0, "connect_timeout": 10.0, "arena_bytes": 128 << 20, **settings}
        made.append(Cast(ClusterSecret.generate(), Settings(**values)))
        return made[-1]

    yield make
    for cast in made:
        cast.stop()


@pytest.fixture(scope="module")
def make_duo() -> Iterator[Callable[[], tuple[Any, Peer]]]:
    """Makes pairs of this process and one peer `there:0` that last as long as the tests of a module."""
    made: list[Cast] = []

    def make() -> tuple[Any, Peer]:
        made.append(Cast(ClusterSecret.generate(), Settings(timeout=30.0, connect_timeout=10.0, arena_bytes=128 << 20)))
        return made[-1].here, made[-1].add("there:0")

    yield make
    for cast in made:
        cast.stop()


@pytest.fixture(scope="module", params=["unix", "tcp"])
def two_ways(request: pytest.FixtureRequest, make_duo: Callable[[], tuple[Any, Peer]]) -> tuple[Any, Peer]:
    """This process and one peer, on one host or as if on two."""
    here, there = make_duo()
    if request.param == "tcp":
        over_tcp(here)
    here.group().send("the connection is made from here", THERE)
    there.call(receive)
    return here, there


@pytest.fixture(scope="module")
def duo(make_duo: Callable[[], tuple[Any, Peer]]) -> tuple[Any, Peer]:
    """This process and one peer `there:0`, shared by the tests of a module."""
    return make_duo()
