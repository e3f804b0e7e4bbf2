"""CUDA IPC: between two processes on one GPU, a copy on the device whose handle is sent.

The copy belongs to the receiver: torch keeps it alive in the sender until the receiver drops it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlinf_core.collective.devices.device_paths import DeviceTransport, Rendezvous
from rlinf_core.collective.messages.payload import HostPart, Part, PartKind
from rlinf_core.collective.messages.pinned import flat_bytes
from rlinf_core.errors import PayloadError

if TYPE_CHECKING:
    import torch

    from rlinf_core.collective.connections.connection import Connection


def device_identity(tensor: torch.Tensor) -> str:
    """Return the UUID of the physical GPU that holds a tensor, whatever number each process sees it under."""
    import torch

    cuda: Any = torch.cuda
    return str(cuda.get_device_properties(tensor.device).uuid)


def visible_devices() -> list[str]:
    """Return the UUIDs of the GPUs that this process can use."""
    import torch

    cuda: Any = torch.cuda
    return [str(cuda.get_device_properties(number).uuid) for number in range(cuda.device_count())]


class CudaIpcTransport(DeviceTransport):
    """The transport of tensors to peers of this host that can use the same GPU."""

    kind = PartKind.CUDA_IPC

    def __init__(
        self,
        identify: Callable[[torch.Tensor], str] = device_identity,
        visible: Callable[[], list[str]] = visible_devices,
    ) -> None:
        self._identify = identify
        self._visible = visible

    def serves(self, tensor: torch.Tensor, connection: Connection) -> bool:
        # An empty tensor has no memory to share.
        return tensor.device.type == "cuda" and tensor.numel() > 0 and connection.shares_memory

    def offer(self, tensor: torch.Tensor) -> str:
        return self._identify(tensor)

    def accept(self, path: str, offer: str, rendezvous: Rendezvous) -> None:
        if offer not in self._visible():
            raise PayloadError(f"the receiver does not use GPU {offer}")

    def export(self, tensor: torch.Tensor, path: str) -> Part:
        from torch.multiprocessing import reductions

        share: Any = reductions
        return HostPart(memoryview(pickle.dumps(share.reduce_tensor(flat_bytes(tensor)), protocol=5)), self.kind)

    def adopt(self, handle: memoryview) -> torch.Tensor:
        rebuild, arguments = pickle.loads(handle)  # noqa: S301 - the peer is authenticated
        return rebuild(*arguments)
