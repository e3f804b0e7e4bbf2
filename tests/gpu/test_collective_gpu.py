"""Tensors on a GPU between two processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlinf_core.address import WorkerAddress  # noqa: E402 - after the check for torch
from rlinf_core.collective.endpoint_info import Settings  # noqa: E402
from rlinf_core.collective.handshake import ClusterSecret  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

_HELPERS = Path(__file__).parents[1] / "integration" / "collective" / "conftest.py"
THERE = WorkerAddress("there", 0)


def make_cast() -> Any:
    spec = importlib.util.spec_from_file_location("rlinf_test_collective_helpers_gpu", _HELPERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = Settings(timeout=60.0, connect_timeout=20.0, arena_bytes=1 << 29)
    return module.Cast(ClusterSecret.generate(), settings)


@pytest.fixture
def cast() -> Iterator[Any]:
    made = make_cast()
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
