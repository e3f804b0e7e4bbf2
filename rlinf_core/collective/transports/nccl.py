"""Between two GPUs: the bytes go over NCCL, and the frame only announces them.

NCCL matches sends and receives by their order alone, while messages may be opened in any order. So each side takes
them in the order of the announcements: opening one receives those before it as well, and keeps them.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlinf_core.collective.payload import HostPart, Part, PartKind
from rlinf_core.collective.transports.device import DeviceTransport, flat_bytes
from rlinf_core.errors import PayloadError

if TYPE_CHECKING:
    import torch

    from rlinf_core.collective.connection import Connection

# The pair's name (16 bytes of hexadecimal), the number among its transfers, bytes.
_ANNOUNCEMENT = struct.Struct("<16sQQ")


class PairCommunicator(ABC):
    """One direction between two devices."""

    @abstractmethod
    def send(self, data: torch.Tensor) -> None:
        """Start to send flat bytes; keep them until they have left."""

    @abstractmethod
    def receive(self, size: int) -> torch.Tensor:
        """Return the next bytes, on a device of this process."""


class NcclTransport(DeviceTransport):
    """Serves peers that have a communicator with this process."""

    kind = PartKind.NCCL

    def __init__(self, find: Callable[[str], PairCommunicator | None]) -> None:
        """`find` gives the communicator of a connection by its name, or None where there is none."""
        self._find = find
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._inbound: dict[str, _Inbound] = {}

    def serves(self, tensor: torch.Tensor, connection: Connection) -> bool:
        return tensor.device.type == "cuda" and tensor.numel() > 0 and self._find(connection.name) is not None

    def export(self, tensor: torch.Tensor, connection: Connection) -> Part:
        communicator = self._communicator(connection.name)
        data = flat_bytes(tensor)
        with self._lock:
            number = self._sent[connection.name] = self._sent.get(connection.name, 0) + 1
            communicator.send(data)
        words = _ANNOUNCEMENT.pack(connection.name.encode(), number, data.numel())
        return HostPart(memoryview(words), self.kind)

    def announce(self, handle: memoryview) -> None:
        name, number, size = _read(handle)
        with self._lock:
            inbound = self._inbound.get(name)
            if inbound is None:
                inbound = self._inbound[name] = _Inbound(self._communicator(name))
        inbound.announce(number, size)

    def adopt(self, handle: memoryview) -> torch.Tensor:
        name, number, _ = _read(handle)
        with self._lock:
            inbound = self._inbound.get(name)
        if inbound is None:
            raise PayloadError("a tensor that nothing announced was to be received over NCCL")
        return inbound.take(number)

    def _communicator(self, name: str) -> PairCommunicator:
        communicator = self._find(name)
        if communicator is None:
            raise PayloadError(f"there is no NCCL communicator for connection {name}")
        return communicator


class _Inbound:
    """Messages that one peer announced, received in its order and handed out in any."""

    def __init__(self, communicator: PairCommunicator) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._announced: dict[int, int] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._next = 1

    def announce(self, number: int, size: int) -> None:
        with self._lock:
            self._announced[number] = size

    def take(self, number: int) -> torch.Tensor:
        with self._lock:
            while self._next <= number:
                if self._next not in self._announced:
                    raise PayloadError(f"tensor {self._next} over NCCL was never announced, tensor {number} was")
                size = self._announced.pop(self._next)
                self._received[self._next] = self._communicator.receive(size)
                self._next += 1
            return self._received.pop(number)


def _read(handle: memoryview) -> tuple[str, int, int]:
    name, number, size = _ANNOUNCEMENT.unpack(handle)
    return name.decode(), number, size


class TorchPair(PairCommunicator):
    """A pair over `torch.distributed`, on a process group of two that both sides made beforehand."""

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        """
        Args:
            group: a NCCL process group of two.
            peer: the other's rank in it, 0 or 1.
            device: where received bytes are put.
        """
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
