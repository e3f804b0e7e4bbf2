"""Which tensors CUDA IPC may carry, and which peers it accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlinf_core.collective.devices.cuda_ipc import CudaIpcTransport
from rlinf_core.collective.devices.device_paths import Rendezvous
from rlinf_core.errors import PayloadError

ON_DEVICE: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: 4)
NEAR: Any = SimpleNamespace(shares_memory=True)
FAR: Any = SimpleNamespace(shares_memory=False)


def test_it_carries_tensors_of_a_gpu_within_one_host() -> None:
    transport = CudaIpcTransport()
    assert transport.serves(ON_DEVICE, NEAR)
    assert not transport.serves(ON_DEVICE, FAR)
    assert not transport.serves(torch.ones(4), NEAR)


def test_a_path_needs_the_same_gpu_at_both_ends() -> None:
    sender = CudaIpcTransport(lambda tensor: "GPU-1")
    CudaIpcTransport(visible=lambda: ["GPU-0", "GPU-1"]).accept("", sender.offer(ON_DEVICE), Rendezvous(print))
    with pytest.raises(PayloadError, match="GPU-1"):
        CudaIpcTransport(visible=lambda: ["GPU-2"]).accept("", sender.offer(ON_DEVICE), Rendezvous(print))
