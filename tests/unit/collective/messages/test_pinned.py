"""Staging: copies off a device through two buffers, with host memory in place of the device's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.messages.pinned import PinnedStager, Staging


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
