"""The order of tensors over NCCL, with a queue in place of NCCL."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.devices.device_paths import Rendezvous
from rlinf_core.collective.devices.nccl import NcclTransport, PairCommunicator, TorchPair
from rlinf_core.errors import PayloadError

PATH = "0123456789abcdef"


class Wire(PairCommunicator):
    """Bytes in order, as NCCL has them."""

    def __init__(self) -> None:
        self.queue: deque[torch.Tensor] = deque()

    def send(self, data: torch.Tensor) -> None:
        self.queue.append(data)

    def receive(self, size: int) -> torch.Tensor:
        data = self.queue.popleft()
        assert data.numel() == size
        return data


def opened(wire: PairCommunicator) -> NcclTransport:
    transport = NcclTransport(lambda rendezvous, rank, device: wire)
    transport.open(PATH, torch.ones(1), Rendezvous(print))
    return transport


def accepted(wire: PairCommunicator) -> NcclTransport:
    transport = NcclTransport(lambda rendezvous, rank, device: wire)
    transport.accept(PATH, "cuda", Rendezvous(print))
    return transport


@given(st.permutations(range(6)))
def test_tensors_over_nccl_may_be_opened_in_any_order(order: list[int]) -> None:
    wire = Wire()
    sender, receiver = opened(wire), accepted(wire)
    tensors = [torch.full((number + 1,), float(number)) for number in range(6)]
    handles = []
    for tensor in tensors:
        handle = sender.export(tensor, PATH).view()
        assert handle is not None
        handles.append(handle)
        tensor.fill_(-1)  # it is the sender's again
        receiver.announce(handle)
    for number in order:
        assert receiver.adopt(handles[number]).view(torch.float32).tolist() == [float(number)] * (number + 1)


def test_a_tensor_that_nothing_announced_is_an_error() -> None:
    wire = Wire()
    sender, receiver = opened(wire), accepted(wire)
    first, second = (sender.export(torch.ones(2), PATH).view() for _ in range(2))
    assert first is not None
    assert second is not None
    with pytest.raises(PayloadError, match="announced"):
        receiver.adopt(first)
    receiver.announce(second)
    with pytest.raises(PayloadError, match="tensor 1"):
        receiver.adopt(second)
    with pytest.raises(PayloadError, match="no NCCL communicator"):
        NcclTransport().export(torch.ones(2), PATH)


def test_a_pair_keeps_what_it_sends_until_it_has_left() -> None:
    left = threading.Event()

    class Group:
        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            return SimpleNamespace(is_completed=left.is_set)

    pair = TorchPair(Group(), 1, torch.device("cpu"))
    pair.send(torch.ones(1))
    pair.send(torch.ones(1))
    assert len(pair._leaving) == 2
    left.set()
    pair.send(torch.ones(1))
    assert len(pair._leaving) == 1


def test_a_communicator_that_cannot_be_made_is_the_reason() -> None:
    def fail(rendezvous: Rendezvous, rank: int, device: object) -> PairCommunicator:
        raise RuntimeError("no NCCL here")

    sender, receiver = opened(Wire()), NcclTransport(fail)
    handle = sender.export(torch.ones(1), PATH).view()
    assert handle is not None
    receiver.announce(handle)
    with pytest.raises(RuntimeError):
        receiver.accept(PATH, "cuda", Rendezvous(print))
    with pytest.raises(PayloadError) as caught:
        receiver.adopt(handle)
    assert caught.value.why == "no NCCL here"
