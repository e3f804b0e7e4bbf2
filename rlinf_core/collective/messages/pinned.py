"""Pinned staging: copies from a device to the host, piece by piece, through two buffers of pinned memory.

Copies between a device and ordinary memory are several times slower than through pinned memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlinf_core.collective.messages.payload import copy_bytes

if TYPE_CHECKING:
    import torch

_PIECE = 16 << 20


class Staging(ABC):
    """Two pinned buffers of a device, filled in the background."""

    piece: int

    @abstractmethod
    def begin(self, slot: int, source: torch.Tensor) -> None:
        """Start to copy a flat tensor of bytes, at most `piece` long, into buffer `slot` (0 or 1)."""

    @abstractmethod
    def finish(self, slot: int, size: int) -> memoryview:
        """Wait for that copy, and return its bytes: valid until the next `begin` for the slot."""


class CudaStaging(Staging):
    """Staging from a CUDA device, on its own stream."""

    def __init__(self, device: torch.device, piece: int = _PIECE) -> None:
        import torch

        self.piece = piece
        self._torch: Any = torch
        self._stream: Any = torch.cuda.Stream(device)
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events: list[Any] = [torch.cuda.Event() for _ in range(2)]

    def begin(self, slot: int, source: torch.Tensor) -> None:
        # The tensor may still be being computed on the caller's stream.
        self._stream.wait_stream(self._torch.cuda.current_stream(source.device))
        with self._torch.cuda.stream(self._stream):
            self._buffers[slot][: source.numel()].copy_(source, non_blocking=True)
            self._events[slot].record(self._stream)

    def finish(self, slot: int, size: int) -> memoryview:
        self._events[slot].synchronize()
        array: Any = self._buffers[slot].numpy()
        return memoryview(array)[:size]


class PinnedStager:
    """The copier of tensors from devices. Each device has one staging, used by one thread at a time."""

    def __init__(self, make: Callable[[torch.device], Staging] = CudaStaging) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._stagings: dict[str, tuple[Staging, threading.Lock]] = {}

    def copy_off(self, source: torch.Tensor, target: memoryview) -> None:
        with self._lock:
            entry = self._stagings.get(str(source.device))
            if entry is None:
                entry = self._stagings[str(source.device)] = (self._make(source.device), threading.Lock())
        staging, lock = entry
        size, piece = source.numel(), staging.piece
        pieces = [(start, min(size, start + piece)) for start in range(0, size, piece)]
        with lock:
            for number, (start, end) in enumerate(pieces):
                staging.begin(number % 2, source[start:end])
                if number:
                    self._drain(staging, number - 1, pieces, target)
            if pieces:
                self._drain(staging, len(pieces) - 1, pieces, target)

    def _drain(self, staging: Staging, number: int, pieces: list[tuple[int, int]], target: memoryview) -> None:
        start, end = pieces[number]
        copy_bytes(target[start:end], staging.finish(number % 2, end - start))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a private copy of a tensor as flat bytes, in C order, on its own device."""
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
