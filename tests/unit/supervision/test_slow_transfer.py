"""A transfer that takes long is no deadlock, although one side waits to send and the other to receive."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.supervision.client import ManagerClient
from tests.unit.supervision.rig import Job

SIZE = 12 << 20
# Longer than a deadlock takes to be told, and in pieces that are further apart than two looks.
PIECE, PAUSE = 1 << 20, 0.4
ONE, OTHER = WorkerAddress("actor", 0), WorkerAddress("actor", 1)


class SlowRoad:
    """A way to a TCP port that lets so many bytes a second through."""

    def __init__(self, port: int) -> None:
        self._there = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._there))
                far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                self._sockets += [near, far]
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                carried += len(data)
                if carried > PIECE:
                    carried = 0
                    time.sleep(PAUSE)

    def close(self) -> None:
        for item in self._sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()


@pytest.fixture
def workers(job: Job) -> tuple[ManagerClient, ManagerClient]:
    """Two workers of a job, as if on two hosts."""
    incarnation = job.join("driver").open_group("actor", 2, 10)
    settings = Settings(timeout=60.0, socket_buffer=1 << 16)
    return (
        job.join("actor:0", incarnation, settings=settings),
        job.join("actor:1", incarnation, rank=1, settings=settings),
    )


def test_a_slow_transfer_is_no_deadlock(workers: tuple[ManagerClient, ManagerClient]) -> None:
    one, other = workers
    # Whichever side connects first.
    roads = [SlowRoad(worker.endpoint.info.tcp_port) for worker in workers]
    infos = [
        replace(worker.endpoint.info, unix_path=None, tcp_port=road.port)
        for worker, road in zip(workers, roads, strict=True)
    ]
    outcomes: dict[str, object] = {}

    def send() -> None:
        group = CollectiveGroup(one.endpoint, ONE, (OTHER,), StaticResolver({OTHER: infos[1]}))
        try:
            group.send(bytes(SIZE), OTHER)
            outcomes["sent"] = True
        except Exception as error:
            outcomes["sent"] = error

    sending = threading.Thread(target=send, name="rlinf-test-send", daemon=True)
    began = time.monotonic()
    sending.start()
    group = CollectiveGroup(other.endpoint, OTHER, (ONE,), StaticResolver({ONE: infos[0]}))
    received = group.recv(ONE)
    sending.join(30)
    for road in roads:
        road.close()
    assert received == bytes(SIZE)
    assert outcomes == {"sent": True}
    assert time.monotonic() - began > 3.5
