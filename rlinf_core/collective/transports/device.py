"""The seam for memory on accelerators: ways in which a tensor reaches a peer without passing through host memory.

Where none serves, a tensor is staged through the host like any other, see `pinned`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rlinf_core.collective.payload import DeviceExport, Part, PartKind
from rlinf_core.errors import PayloadError

if TYPE_CHECKING:
    import torch

    from rlinf_core.collective.connection import Connection


class DeviceTransport(ABC):
    """One way for tensors on accelerators."""

    kind: ClassVar[PartKind]

    @abstractmethod
    def serves(self, tensor: torch.Tensor, connection: Connection) -> bool:
        """Return whether `tensor` can go this way to the other side of `connection`."""

    @abstractmethod
    def export(self, tensor: torch.Tensor, connection: Connection) -> Part:
        """Return a part of `kind` that stands for the tensor; the tensor itself may change as soon as this returns."""

    def announce(self, handle: memoryview) -> None:  # noqa: B027 - most need not know
        """Take note of a part, in the order of arrival and before it is adopted. Must not block."""

    @abstractmethod
    def adopt(self, handle: memoryview) -> torch.Tensor:
        """Return the bytes that the part stands for, as a flat tensor on a device of this process."""


class DeviceRouter:
    """Chooses among the ways, the best first."""

    def __init__(self, transports: Sequence[DeviceTransport]) -> None:
        self._transports = tuple(transports)

    def export_to(self, connection: Connection | None) -> DeviceExport | None:
        """Return how tensors on accelerators go to the other side of a connection; None: all through the host."""
        if connection is None or not self._transports:
            return None

        def export(tensor: torch.Tensor) -> Part | None:
            for transport in self._transports:
                if transport.serves(tensor, connection):
                    return transport.export(tensor, connection)
            return None

        return export

    def announce(self, kind: int, handle: memoryview) -> None:
        """Take note of a part that stands for device memory."""
        for transport in self._transports:
            if transport.kind == kind:
                transport.announce(handle)

    def adopt(self, kind: int, handle: memoryview) -> torch.Tensor:
        """Return the tensor of bytes that an arrived handle stands for.

        Raises:
            PayloadError: this process knows no such way.
        """
        for transport in self._transports:
            if transport.kind == kind:
                return transport.adopt(handle)
        raise PayloadError(
            f"a tensor arrived by way {PartKind(kind).name}, which this process does not know",
            help="both processes need the same accelerator software",
        )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a private copy of a tensor as flat bytes, in C order, on its own device."""
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
