"""Between two processes on one GPU: a copy on the device, whose handle travels.

The copy is the receiver's: torch keeps it alive in the sender until the receiver lets go of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlinf_core.collective.payload import HostPart, Part, PartKind
from rlinf_core.collective.transports.device import DeviceTransport, flat_bytes

if TYPE_CHECKING:
    import torch

    from rlinf_core.collective.connection import Connection


def device_identity(tensor: torch.Tensor) -> str:
    """Name the physical GPU, whatever number each process sees it under."""
    import torch

    cuda: Any = torch.cuda
    return str(cuda.get_device_properties(tensor.device).uuid)


class CudaIpcTransport(DeviceTransport):
    """Serves peers of this host that use the same GPU."""

    kind = PartKind.CUDA_IPC

    def __init__(self, identify: Callable[[torch.Tensor], str] = device_identity) -> None:
        self._identify = identify

    def serves(self, tensor: torch.Tensor, connection: Connection) -> bool:
        # An empty tensor has no memory to share.
        return (
            tensor.device.type == "cuda"
            and tensor.numel() > 0
            and connection.shares_memory
            and self._identify(tensor) in connection.peer.devices
        )

    def export(self, tensor: torch.Tensor, connection: Connection) -> Part:
        from torch.multiprocessing import reductions

        share: Any = reductions
        return HostPart(memoryview(pickle.dumps(share.reduce_tensor(flat_bytes(tensor)), protocol=5)), self.kind)

    def adopt(self, handle: memoryview) -> torch.Tensor:
        rebuild, arguments = pickle.loads(handle)  # noqa: S301 - the peer is authenticated
        return rebuild(*arguments)
