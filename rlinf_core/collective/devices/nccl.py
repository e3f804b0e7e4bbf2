"""NCCL: between two GPUs, the bytes go from device to device and a message only announces them.

NCCL matches sends and receives by their order alone, while messages may be opened in any order. So the receiver takes
the tensors in the order of their announcements: opening one receives those before it as well, and keeps them.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from rlinf_core.collective.devices.device_paths import DeviceTransport, Rendezvous
from rlinf_core.collective.messages.payload import HostPart, Part, PartKind
from rlinf_core.collective.messages.pinned import flat_bytes
from rlinf_core.errors import PayloadError
from rlinf_core.waiting import stretched

if TYPE_CHECKING:
    import torch

    from rlinf_core.collective.connections.connection import Connection

# The name of the path (16 hexadecimal digits), the number among its transfers, bytes.
_ANNOUNCEMENT = struct.Struct("<16sQQ")


class PairCommunicator(ABC):
    """One direction between two devices."""

    @abstractmethod
    def send(self, data: torch.Tensor) -> None:
        """Start to send flat bytes; keep them until they have left."""

    @abstractmethod
    def receive(self, size: int) -> torch.Tensor:
        """Return the next bytes, on a device of this process."""


# (rendezvous, rank of this end: 0 sends and 1 receives, the sender's device or None at the receiver) -> communicator
MakePair: TypeAlias = "Callable[[Rendezvous, int, torch.device | None], PairCommunicator]"


def nccl_pair(rendezvous: Rendezvous, rank: int, device: torch.device | None) -> PairCommunicator:
    """Return one end of a NCCL communicator of two."""
    import torch
    import torch.distributed as dist

    distributed: Any = dist
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    torch.cuda.set_device(device)
    return TorchPair(distributed.ProcessGroupNCCL(rendezvous_store(rendezvous), rank, 2), 1 - rank, device)


class NcclTransport(DeviceTransport):
    """The transport of tensors between peers on different GPUs."""

    kind = PartKind.NCCL

    def __init__(self, make: MakePair = nccl_pair, device_type: str = "cuda") -> None:
        self._make = make
        self._device_type = device_type
        self._lock = threading.Lock()
        self._outgoing: dict[str, tuple[PairCommunicator, int]] = {}
        self._inbound: dict[str, _Inbound] = {}

    def serves(self, tensor: torch.Tensor, connection: Connection) -> bool:
        return tensor.device.type == self._device_type and tensor.numel() > 0

    def offer(self, tensor: torch.Tensor) -> str:
        return self._device_type

    def open(self, path: str, tensor: torch.Tensor, rendezvous: Rendezvous) -> None:
        communicator = self._make(rendezvous, 0, tensor.device)
        with self._lock:
            self._outgoing[path] = (communicator, 0)

    def accept(self, path: str, offer: str, rendezvous: Rendezvous) -> None:
        inbound = self._inbound_of(path)
        try:
            inbound.connect(self._make(rendezvous, 1, None))
        except Exception as error:
            inbound.fail(error)
            raise

    def export(self, tensor: torch.Tensor, path: str) -> Part:
        data = flat_bytes(tensor)
        with self._lock:
            if path not in self._outgoing:
                raise PayloadError(f"there is no NCCL communicator for path {path}")
            communicator, number = self._outgoing[path]
            self._outgoing[path] = (communicator, number + 1)
            communicator.send(data)
        words = _ANNOUNCEMENT.pack(path.encode(), number + 1, data.numel())
        return HostPart(memoryview(words), self.kind)

    def announce(self, handle: memoryview) -> None:
        path, number, size = _read(handle)
        self._inbound_of(path).announce(number, size)

    def adopt(self, handle: memoryview) -> torch.Tensor:
        path, number, _ = _read(handle)
        with self._lock:
            inbound = self._inbound.get(path)
        if inbound is None:
            raise PayloadError("a tensor was to be received over NCCL that nothing announced")
        return inbound.take(number)

    def close(self, path: str) -> None:
        with self._lock:
            self._outgoing.pop(path, None)
            self._inbound.pop(path, None)

    def _inbound_of(self, path: str) -> _Inbound:
        """Return the receiving end of a path, which may be announced before its communicator is there."""
        with self._lock:
            inbound = self._inbound.get(path)
            if inbound is None:
                inbound = self._inbound[path] = _Inbound()
            return inbound


class _Inbound:
    """Tensors announced by one peer: received in that order, returned in any order."""

    _CONNECT_SECONDS = 30.0

    def __init__(self) -> None:
        self._communicator: PairCommunicator | None = None
        self._error: Exception | None = None
        self._connected = threading.Event()
        self._lock = threading.Lock()
        self._announced: dict[int, int] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._next = 1

    def connect(self, communicator: PairCommunicator) -> None:
        self._communicator = communicator
        self._connected.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._connected.set()

    def announce(self, number: int, size: int) -> None:
        with self._lock:
            self._announced[number] = size

    def take(self, number: int) -> torch.Tensor:
        self._connected.wait(stretched(self._CONNECT_SECONDS))
        communicator = self._communicator
        if communicator is None:
            raise PayloadError("the NCCL communicator could not be made", why=str(self._error or "in time"))
        with self._lock:
            while self._next <= number:
                if self._next not in self._announced:
                    raise PayloadError(f"tensor {self._next} over NCCL was never announced, tensor {number} was")
                size = self._announced.pop(self._next)
                self._received[self._next] = communicator.receive(size)
                self._next += 1
            return self._received.pop(number)


def _read(handle: memoryview) -> tuple[str, int, int]:
    name, number, size = _ANNOUNCEMENT.unpack(handle)
    return name.decode(), number, size


class TorchPair(PairCommunicator):
    """One end of a `torch.distributed` process group of two."""

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        """Received bytes are put on `device`; `peer` is the rank of the other end."""
        self._group = group
        self._peer = peer
        self._device = device
        self._leaving: list[tuple[Any, torch.Tensor]] = []

    def send(self, data: torch.Tensor) -> None:
        self._leaving = [(work, kept) for work, kept in self._leaving if not work.is_completed()]
        self._leaving.append((self._group.send([data], self._peer, 0), data))

    def receive(self, size: int) -> torch.Tensor:
        import torch

        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._group.recv([data], self._peer, 0).wait()
        return data


def rendezvous_store(rendezvous: Rendezvous) -> Any:
    """Return a rendezvous as the store by which `torch.distributed` makes a process group; nothing listens for it."""
    import torch.distributed as dist

    distributed: Any = dist
    base: Any = distributed.Store

    class Store(base):
        """The two ends' key-value store."""

        def set(self, key: str, value: str | bytes) -> None:
            rendezvous.set(key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return rendezvous.get(key)

        def wait(self, keys: list[str], timeout: object = None) -> None:
            for key in keys:
                rendezvous.get(key)

    return Store()
