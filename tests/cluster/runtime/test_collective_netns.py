"""The data plane between two network namespaces, and in a container's small /dev/shm: root on Linux only."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.errors import WorkerDiedError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None or shutil.which("unshare") is None, reason="needs ip and unshare"),
]

_HELPERS = Path(__file__).parents[2] / "integration" / "collective" / "conftest.py"
FAR = WorkerAddress("far", 0)


def make_cast(ip: str, **settings: Any) -> Any:
    spec = importlib.util.spec_from_file_location("rlinf_test_collective_helpers", _HELPERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = {"timeout": 30.0, "connect_timeout": 10.0, "arena_bytes": 64 << 20, **settings}
    return module.Cast(ClusterSecret.generate(), Settings(**values), ip=ip)


class Cable:
    """A second network namespace, connected with this one by a virtual cable."""

    ours, theirs = "10.98.76.1", "10.98.76.2"

    def __init__(self) -> None:
        self.name = f"rlinf-test-{os.getpid()}"
        self.prefix = ("ip", "netns", "exec", self.name)
        self.near, far = f"rt{os.getpid()}a", f"rt{os.getpid()}b"
        try:
            self._run(f"netns add {self.name}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        self._run(f"link add {self.near} type veth peer name {far} netns {self.name}")
        self._run(f"addr add {self.ours}/24 dev {self.near}")
        self._run(f"link set {self.near} up")
        self._run(f"-n {self.name} addr add {self.theirs}/24 dev {far}")
        self._run(f"-n {self.name} link set {far} up")
        self._run(f"-n {self.name} link set lo up")

    def _run(self, command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    def cut(self) -> None:
        self._run(f"link set {self.near} down")

    def remove(self) -> None:
        # The namespace takes its end of the cable along some time later; the next test's must not meet it.
        self._run(f"link del {self.near}")
        self._run(f"netns del {self.name}")


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable()
    yield made
    made.remove()


@pytest.fixture
def stop() -> Iterator[list[Any]]:
    casts: list[Any] = []
    yield casts
    for cast in casts:
        cast.stop()


def exchange(side: Any, peer: Any, sizes: list[int]) -> list[float]:
    import torch

    group = side.group()
    sums = []
    for size in sizes:
        group.send({"tensor": torch.full((size,), 2.0), "size": size}, peer)
        got = group.recv(peer)
        assert got["size"] == size
        sums.append(float(got["tensor"].double().sum()))
    buffer = torch.zeros(20_000_000, dtype=torch.bfloat16)
    group.send_tensor(torch.ones(20_000_000, dtype=torch.bfloat16), peer, async_op=True)
    group.recv_tensor(buffer, peer)
    sums.append(float(buffer.float().mean()))
    return sums


def test_tensors_cross_between_two_hosts(cable: Cable, stop: list[Any]) -> None:
    cast = make_cast(cable.ours)
    stop.append(cast)
    far = cast.add("far:0", ip=cable.theirs, prefix=cable.prefix)
    assert far.info.network != cast.here.endpoint.info.network
    # From nothing to more than the arena holds.
    sizes = [0, 1, 1_000, 100_000, 3_000_000, 30_000_000]
    far.begin(exchange, cast.here.me, sizes)
    expected = [2.0 * size for size in sizes] + [1.0]
    assert exchange(cast.here, FAR, sizes) == expected
    assert far.result() == expected


def test_who_sends_faster_than_the_other_receives_is_held_back(cable: Cable, stop: list[Any]) -> None:
    cast = make_cast(cable.ours, arena_bytes=8 << 20, inbox_bytes=8 << 20)
    stop.append(cast)
    far = cast.add("far:0", ip=cable.theirs, prefix=cable.prefix)

    def flood(side: Any, peer: Any) -> None:
        import torch

        for number in range(30):
            side.group().send(torch.full((1_000_000,), float(number)), peer)

    far.begin(flood, cast.here.me)
    group = cast.here.group()
    first = group.recv(FAR)
    time.sleep(0.5)
    with open("/proc/self/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
    assert resident < 2 << 20  # kB
    rest = [group.recv(FAR) for _ in range(29)]
    far.result()
    assert [float(tensor[0]) for tensor in [first, *rest]] == list(range(30))


@pytest.mark.nightly
def test_a_host_that_vanishes_is_noticed_within_fifteen_seconds(cable: Cable, stop: list[Any]) -> None:
    cast = make_cast(cable.ours, timeout=40.0)
    stop.append(cast)
    far = cast.add("far:0", ip=cable.theirs, prefix=cable.prefix)
    far.begin(exchange, cast.here.me, [10])
    exchange(cast.here, FAR, [10])
    far.result()
    cable.cut()
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match="far:0"):
        cast.here.group().recv(FAR)
    assert 5 < time.monotonic() - started < 16
    far.kill()


def test_a_small_dev_shm_is_no_limit(stop: list[Any]) -> None:
    cast = make_cast("127.0.0.1", arena_bytes=512 << 20)
    stop.append(cast)
    small = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"')
    far = cast.add("far:0", prefix=small)

    def send(side: Any, peer: Any) -> int:
        import os

        import torch

        side.group().send(torch.ones(64 << 20), peer)
        return os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize

    far.begin(send, cast.here.me)
    assert cast.here.group().recv(FAR).sum() == 64 << 20
    assert far.result() == 64 << 20
