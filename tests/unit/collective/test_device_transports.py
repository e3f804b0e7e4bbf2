"""Ways for tensors on accelerators: their logic, with host memory in the place of a device's."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.codec import decode, encode
from rlinf_core.collective.payload import HostPart, Part, PartKind
from rlinf_core.collective.received_message import adopted
from rlinf_core.collective.transports.cuda_ipc import CudaIpcTransport
from rlinf_core.collective.transports.device import DeviceRouter, DeviceTransport, flat_bytes
from rlinf_core.collective.transports.nccl import NcclTransport, PairCommunicator, TorchPair
from rlinf_core.collective.transports.pinned import PinnedStager, Staging
from rlinf_core.errors import PayloadError


def connection(name: str = "0123456789abcdef", **facts: Any) -> Any:
    return SimpleNamespace(name=name, shares_memory=True, peer=SimpleNamespace(devices=("GPU-1",)), **facts)


class Drawer(DeviceTransport):
    """Keeps tensors in a list, and sends where they lie."""

    kind = PartKind.CUDA_IPC

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def serves(self, tensor: torch.Tensor, connection: Any) -> bool:
        return tensor.numel() > 1

    def export(self, tensor: torch.Tensor, connection: Any) -> Part:
        self.kept.append(flat_bytes(tensor))
        return HostPart(memoryview(bytes([len(self.kept) - 1])), self.kind)

    def adopt(self, handle: memoryview) -> torch.Tensor:
        return self.kept[handle[0]]


def test_what_a_way_does_not_serve_goes_through_the_host() -> None:
    router = DeviceRouter([Drawer()])
    export = router.export_to(connection())
    assert export is not None
    assert export(torch.ones(1)) is None
    part = export(torch.ones(2))
    assert part is not None
    assert part.kind == PartKind.CUDA_IPC
    assert router.export_to(None) is None
    assert DeviceRouter([]).export_to(connection()) is None


def test_a_handle_takes_the_place_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_core.collective import torch_payload

    drawer = Drawer()
    router = DeviceRouter([drawer])
    export = router.export_to(connection())
    # ReceiverContext tensors are never offered to a device's way, so this asks for all of them.
    reduce = torch_payload.TorchPickler.reducer_override

    def offer(self: Any, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            part = self._export(obj)
            if part is not None:
                import pickle

                placeholder = pickle.PickleBuffer(bytearray())
                self._placeholders[id(placeholder)] = part
                return torch_payload.rebuild_tensor, (placeholder, "float32", tuple(obj.shape), ("cpu", None))
        return reduce(self, obj)

    monkeypatch.setattr(torch_payload.TorchPickler, "reducer_override", offer)
    value = {"device": torch.arange(6.0).reshape(2, 3), "host": torch.ones(1)}
    encoded = encode(value, None, export)
    kinds = [part.kind for part in encoded.parts]
    assert sorted(kinds) == [PartKind.HOST, PartKind.CUDA_IPC]
    buffers = []
    for part in encoded.parts:
        target = memoryview(bytearray(part.nbytes))
        part.copy_into(target)
        buffers.append(target)
    back = decode(encoded.head, adopted(kinds, buffers, router.adopt))
    assert isinstance(back, dict)
    assert torch.equal(back["device"], value["device"])
    assert torch.equal(back["host"], value["host"])


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(PayloadError, match="NCCL"):
        DeviceRouter([Drawer()]).adopt(PartKind.NCCL, memoryview(b""))


def test_cuda_ipc_serves_the_same_gpu_on_the_same_host_only() -> None:
    on_device: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: 4)
    transport = CudaIpcTransport(lambda tensor: "GPU-1")
    assert transport.serves(on_device, connection())
    assert not CudaIpcTransport(lambda tensor: "GPU-2").serves(on_device, connection())
    far = connection()
    far.shares_memory = False
    assert not transport.serves(on_device, far)
    assert not transport.serves(torch.ones(4), connection())


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


@given(st.permutations(range(6)))
def test_tensors_over_nccl_may_be_opened_in_any_order(order: list[int]) -> None:
    wire = Wire()
    sender, receiver = NcclTransport(lambda name: wire), NcclTransport(lambda name: wire)
    tensors = [torch.full((number + 1,), float(number)) for number in range(6)]
    handles = []
    for tensor in tensors:
        handle = sender.export(tensor, connection()).view()
        assert handle is not None
        handles.append(handle)
        tensor.fill_(-1)  # it is the sender's again
        receiver.announce(handle)
    for number in order:
        assert receiver.adopt(handles[number]).view(torch.float32).tolist() == [float(number)] * (number + 1)


def test_a_tensor_that_nothing_announced_is_an_error() -> None:
    wire = Wire()
    sender, receiver = NcclTransport(lambda name: wire), NcclTransport(lambda name: wire)
    first, second = (sender.export(torch.ones(2), connection()).view() for _ in range(2))
    assert first is not None
    assert second is not None
    with pytest.raises(PayloadError, match="announced"):
        receiver.adopt(first)
    receiver.announce(second)
    with pytest.raises(PayloadError, match="tensor 1"):
        receiver.adopt(second)
    with pytest.raises(PayloadError, match="no NCCL communicator"):
        NcclTransport(lambda name: None).export(torch.ones(2), connection())


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


class SlowStaging(Staging):
    """Two buffers; what is asked for too early or overwritten too soon shows."""

    def __init__(self, piece: int) -> None:
        self.piece = piece
        self._buffers = [bytearray(piece), bytearray(piece)]
        self._busy: list[torch.Tensor | None] = [None, None]

    def begin(self, slot: int, source: torch.Tensor) -> None:
        assert self._busy[slot] is None, "the buffer was not read yet"
        assert source.numel() <= self.piece
        self._busy[slot] = source

    def finish(self, slot: int, size: int) -> memoryview:
        source, self._busy[slot] = self._busy[slot], None
        assert source is not None
        self._buffers[slot][:size] = bytes(source.tolist())
        return memoryview(self._buffers[slot])[:size]


@given(st.integers(0, 100), st.integers(1, 40))
def test_staging_copies_every_piece_once(size: int, piece: int) -> None:
    source = (torch.arange(size) % 251).to(torch.uint8)
    target = bytearray(size)
    PinnedStager(lambda device: SlowStaging(piece)).copy_off(source, memoryview(target))
    assert list(target) == source.tolist()
