"""Tensors on a GPU between two processes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlinf_core.address import WorkerAddress  # noqa: E402 - after the check for torch
from rlinf_core.collective.connections.handshake import ClusterSecret  # noqa: E402
from rlinf_core.collective.connections.settings import Settings  # noqa: E402
from rlinf_core.collective.devices.cuda_ipc import CudaIpcTransport, device_identity, visible_devices  # noqa: E402
from rlinf_core.collective.devices.device_paths import PathState  # noqa: E402
from rlinf_core.collective.messages.payload import PartKind  # noqa: E402
from rlinf_core.collective.messages.pinned import PinnedStager  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

_HELPERS = Path(__file__).parents[1] / "integration" / "collective" / "conftest.py"
THERE = WorkerAddress("there", 0)


def make_cast(device_transport: str) -> Any:
    spec = importlib.util.spec_from_file_location("rlinf_test_collective_helpers_gpu", _HELPERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = Settings(timeout=60.0, connect_timeout=20.0, arena_bytes=1 << 29, device_transport=device_transport)
    return module.Cast(ClusterSecret.generate(), settings)


@pytest.fixture(params=["host", "auto"])
def cast(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make_cast(request.param)
    yield made
    made.stop()


def echo(side: Any, times: int) -> None:
    here = WorkerAddress("here", 0)
    for _ in range(times):
        side.group().send(side.group().recv(here), here)


def test_a_device_tensor_comes_back_on_a_device(cast: Any) -> None:
    there = cast.add("there:0")
    there.begin(echo, 1)
    group = cast.here.group()
    value = {"gpu": torch.arange(10_000_000, device="cuda", dtype=torch.bfloat16), "cpu": torch.ones(3)}
    group.send(value, THERE)
    back = group.recv(THERE)
    there.result()
    assert back["gpu"].device.type == "cuda"
    assert back["cpu"].device.type == "cpu"
    assert torch.equal(back["gpu"], value["gpu"])


def test_recv_tensor_fills_a_buffer_on_the_device(cast: Any) -> None:
    there = cast.add("there:0")

    def send(side: Any) -> None:
        import torch

        side.group().send_tensor(torch.ones(1_000_000, device="cuda"), WorkerAddress("here", 0))

    there.begin(send)
    buffer = torch.zeros(1_000_000, device="cuda")
    cast.here.group().recv_tensor(buffer, THERE)
    there.result()
    assert buffer.sum().item() == 1_000_000


def test_pinned_staging_is_exact() -> None:
    source = torch.randint(0, 256, (50_000_001,), dtype=torch.uint8, device="cuda")
    target = bytearray(source.numel())
    PinnedStager().copy_off(source, memoryview(target))
    assert torch.equal(torch.frombuffer(target, dtype=torch.uint8), source.cpu())


def test_a_gpu_has_an_identity_and_cuda_ipc_makes_a_handle() -> None:
    tensor = torch.ones(1000, device="cuda")
    assert device_identity(tensor) in visible_devices()
    assert CudaIpcTransport().export(tensor, "0123456789abcdef").nbytes > 0


@pytest.mark.parametrize(("choice", "kind"), [("ipc", PartKind.CUDA_IPC), ("nccl", PartKind.NCCL)])
def test_a_verified_path_carries_tensors(choice: str, kind: PartKind) -> None:
    if choice == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU at each end")
    made = make_cast(choice)
    try:
        there = made.add("there:0")
        group = made.here.group()
        deadline = time.monotonic() + 60
        number = 0.0
        while (kind, PathState.VERIFIED) not in made.here.endpoint.devices.states() or number < 3:
            assert time.monotonic() < deadline, made.here.endpoint.devices.states()
            number += 1
            there.begin(echo_on_last_gpu)
            group.send(torch.full((1000,), number, device="cuda:0"), THERE)
            assert torch.equal(group.recv(THERE).cpu(), torch.full((1000,), number))
            there.result()
    finally:
        made.stop()


def echo_on_last_gpu(side: Any) -> None:
    import torch

    torch.cuda.set_device(torch.cuda.device_count() - 1)
    here = WorkerAddress("here", 0)
    side.group().send(side.group().recv(here).cpu(), here)
