"""Device paths between two endpoints, with host memory in place of a device's.

They are verified by a probe before they are used, and left for the host path on any failure.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.connections.handshake import ClusterSecret
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.devices import device_paths
from rlinf_core.collective.devices.device_paths import DeviceTransport, PathState, Rendezvous
from rlinf_core.collective.devices.nccl import NcclTransport, TorchPair, rendezvous_store
from rlinf_core.collective.endpoint import Endpoint, device_transports
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.collective.messages.payload import HostPart, Part, PartKind
from rlinf_core.collective.messages.pinned import flat_bytes
from rlinf_core.errors import EnvironmentVariableError, PayloadError
from tests.waiting import until

A, B = WorkerAddress("a", 0), WorkerAddress("b", 0)


class FakeDevice(DeviceTransport):
    """Carries tensors of the host as if they were on a device that both processes use.

    Args:
        memory: the device's.
        fault: what goes wrong: in `offer`, `open`, `accept`, `export`, `adopt`, or `bytes` that arrive changed.
    """

    kind = PartKind.CUDA_IPC

    def __init__(self, memory: list[torch.Tensor], fault: str = "") -> None:
        self.memory = memory
        self.fault = fault
        self.adopted = 0

    def _may_fail(self, step: str) -> None:
        if self.fault == step:
            raise RuntimeError(f"no {step} today")

    def serves(self, tensor: torch.Tensor, connection: Any) -> bool:
        return tensor.numel() > 0

    def offer(self, tensor: torch.Tensor) -> str:
        self._may_fail("offer")
        return "here"

    def open(self, path: str, tensor: torch.Tensor, rendezvous: Rendezvous) -> None:
        self._may_fail("open")

    def accept(self, path: str, offer: str, rendezvous: Rendezvous) -> None:
        self._may_fail("accept")

    def export(self, tensor: torch.Tensor, path: str) -> Part:
        self._may_fail("export")
        self.memory.append(flat_bytes(tensor))
        return HostPart(memoryview(bytearray((len(self.memory) - 1).to_bytes(4, "big"))), self.kind)

    def adopt(self, handle: memoryview) -> torch.Tensor:
        self._may_fail("adopt")
        self.adopted += 1
        data = self.memory[int.from_bytes(handle, "big")]
        if self.fault == "bytes":
            data[data.numel() // 2] ^= 1
        return data


class Pair:
    """Two endpoints in this process, and the group of each."""

    def __init__(self, ours: DeviceTransport | None, theirs: DeviceTransport | None) -> None:
        secret, settings = ClusterSecret.generate(), Settings(timeout=20.0, connect_timeout=5.0, arena_bytes=32 << 20)
        self.a, self.b = (
            Endpoint(secret, ip="127.0.0.1", settings=settings, transports=[item] if item else [])
            for item in (ours, theirs)
        )
        resolver = StaticResolver({A: self.a.info, B: self.b.info})
        self.from_a = CollectiveGroup(self.a, A, [B], resolver)
        self.at_b = CollectiveGroup(self.b, B, [A], resolver)

    def send(self, value: float) -> None:
        """Send an object and a tensor, and check what arrives."""
        self.from_a.send({"deep": [torch.full((1000,), value)]}, B)
        assert torch.equal(self.at_b.recv(A)["deep"][0], torch.full((1000,), value))
        self.from_a.send_tensor(torch.full((2, 3), value), B)
        buffer = torch.zeros(2, 3)
        self.at_b.recv_tensor(buffer, A)
        assert torch.equal(buffer, torch.full((2, 3), value))

    def until(self, state: PathState) -> None:
        until(lambda: [path for _, path in self.a.devices.states()] == [state], f"a path that is {state}")


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(ours: DeviceTransport | None, theirs: DeviceTransport | None) -> Pair:
        made.append(Pair(ours, theirs))
        return made[-1]

    yield make
    for item in made:
        item.a.close()
        item.b.close()


def test_a_path_is_used_once_a_probe_has_passed_unchanged(pair: Any) -> None:
    memory: list[torch.Tensor] = []
    ours, theirs = FakeDevice(memory), FakeDevice(memory)
    two = pair(ours, theirs)
    # On first contact nothing is known of the peer; the second message opens the path.
    two.send(1.0)
    two.send(2.0)
    two.until(PathState.VERIFIED)
    probe, before = memory[0], theirs.adopted
    assert probe.nbytes == device_paths._PROBE_BYTES, "nothing goes by the path before the probe"
    assert before >= 1
    two.send(3.0)
    assert theirs.adopted == before + 2


@pytest.mark.parametrize("fault", ["offer", "open", "export"])
def test_a_failure_at_the_sender_leaves_the_host_path(pair: Any, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    memory: list[torch.Tensor] = []
    check_the_host_path(pair(FakeDevice(memory, fault), FakeDevice(memory)), caplog, f"no {fault} today")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("accept", "no accept today"), ("adopt", "no adopt today"), ("bytes", "checksum")],
)
def test_a_failure_at_the_receiver_leaves_the_host_path(
    pair: Any, caplog: pytest.LogCaptureFixture, fault: str, reason: str
) -> None:
    memory: list[torch.Tensor] = []
    check_the_host_path(pair(FakeDevice(memory), FakeDevice(memory, fault)), caplog, reason)


def test_a_peer_without_the_transport_leaves_the_host_path(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_the_host_path(pair(FakeDevice([]), None), caplog, "RLINF_DEVICE_TRANSPORT")


def test_a_peer_that_does_not_answer_leaves_the_host_path(
    pair: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_paths, "_PROBE_SECONDS", 0.2)
    two = pair(FakeDevice([]), FakeDevice([]))
    monkeypatch.setattr(two.b._receiver, "_handlers", {device_paths.TAG: lambda message: message.received.release()})
    check_the_host_path(two, caplog, "did not answer")


def check_the_host_path(two: Pair, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Nothing is lost, and the log says once why no path is used."""
    with caplog.at_level(logging.WARNING):
        two.send(1.0)
        two.send(2.0)
        two.until(PathState.FAILED)
        two.send(3.0)
        two.send(4.0)
    (record,) = [record for record in caplog.records if "host memory" in record.message]
    assert reason in record.message
    assert "`b:0`" in record.message


def test_a_path_that_fails_later_costs_one_message_at_most(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory: list[torch.Tensor] = []
    ours, theirs = FakeDevice(memory), FakeDevice(memory)
    two = pair(ours, theirs)
    two.send(1.0)
    two.send(2.0)
    two.until(PathState.VERIFIED)
    theirs.fault = "adopt"
    two.from_a.send(torch.ones(10), B)
    with pytest.raises(PayloadError, match="CUDA_IPC") as caught:
        two.at_b.recv(A)
    assert "no adopt today" in str(caught.value.why)
    two.until(PathState.FAILED)
    two.send(3.0)
    assert "no adopt today" in caplog.text


def test_an_export_that_fails_later_costs_nothing(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory: list[torch.Tensor] = []
    ours, theirs = FakeDevice(memory), FakeDevice(memory)
    two = pair(ours, theirs)
    two.send(1.0)
    two.send(2.0)
    two.until(PathState.VERIFIED)
    ours.fault = "export"
    two.send(3.0)
    two.until(PathState.FAILED)
    assert "no export today" in caplog.text


def gloo_pair(rendezvous: Rendezvous, rank: int, device: object) -> TorchPair:
    """As `nccl_pair`, over gloo on loopback."""
    import torch.distributed as dist

    distributed: Any = dist
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=30)
    group = distributed.ProcessGroupGloo(rendezvous_store(rendezvous), rank, 2, options)
    return TorchPair(group, 1 - rank, torch.device("cpu"))


def test_process_group_of_two_runs_over_the_connection(pair: Any) -> None:
    two = pair(NcclTransport(gloo_pair, "cpu"), NcclTransport(gloo_pair, "cpu"))
    two.send(1.0)
    two.send(2.0)
    two.until(PathState.VERIFIED)
    # Opened in another order than they were sent in.
    handles = [two.from_a.send(torch.full((5,), float(number)), B, async_op=True) for number in range(4)]
    received = [two.at_b.recv(A, async_op=True) for _ in range(4)]
    for number in (2, 0, 3, 1):
        assert torch.equal(received[number].wait(), torch.full((5,), float(number)))
    for handle in handles:
        handle.wait()
    assert two.a.devices.states() == [(PartKind.NCCL, PathState.VERIFIED)]


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ("", [PartKind.CUDA_IPC, PartKind.NCCL]),
        ("auto", [PartKind.CUDA_IPC, PartKind.NCCL]),
        ("host", []),
        ("ipc", [PartKind.CUDA_IPC]),
        ("nccl", [PartKind.NCCL]),
    ],
)
def test_the_variable_chooses_the_transports(
    monkeypatch: pytest.MonkeyPatch, choice: str, kinds: list[PartKind]
) -> None:
    monkeypatch.setenv("RLINF_DEVICE_TRANSPORT", choice)
    settings = Settings.from_environment()
    assert [device_transport.kind for device_transport in device_transports(settings.device_transport)] == kinds


def test_another_word_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_DEVICE_TRANSPORT", "rdma")
    with pytest.raises(EnvironmentVariableError, match="RLINF_DEVICE_TRANSPORT"):
        env_vars.DEVICE_TRANSPORT.get()


def test_choosing_transports_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from rlinf_core.collective.endpoint import device_transports; device_transports('auto')\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr
