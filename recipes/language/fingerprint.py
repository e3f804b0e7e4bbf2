"""Fingerprints of weights, equal on both sides of a transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

_BLOCK_BYTES: Final = 16384
# Tensors are copied and summed in sections of this size, so that the second reading comes from a processor's cache. The
# sums of 513 MB take 34 ms alone and 10 from the cache, where copying takes 50; smaller sections cost more calls.
_SECTION_BYTES: Final = 2 << 20


class Fingerprint:
    """A fingerprint of tensors that come one after the other, whole or in parts, in whatever order.

    It depends on the names, types, shapes and contents of all of them. Contents enter as sums of their bits, eight
    bytes a number, over blocks of 16 KiB, at the speed of reading memory, and the sums enter BLAKE2b in their order.
    A torn or stale transfer, whose blocks are those of other weights, is found with a probability of 1 - 2^-64; a
    forged one need not be.
    """

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        # Sums of parts, by the names of tensors and the first elements of the parts.
        self._sums: dict[str, dict[int, bytes]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor into account; its bytes are read now."""
        flat = tensor.detach().contiguous().flatten()
        for begin, end in sections(flat.numel(), flat.element_size()):
            self.add_part(name, tuple(tensor.shape), begin, flat[begin:end])

    def add_part(self, name: str, shape: tuple[int, ...], first: int, part: Tensor) -> None:
        """Take a part of a tensor into account; its bytes are read now. The same part may come again.

        Args:
            name: of the tensor.
            shape: of the whole tensor.
            first: element of the tensor that the part begins with; a multiple of 16 KiB.
            part: its elements, flat and contiguous.
        """
        if name not in self._heads:
            self._heads[name] = f"{name} {part.dtype} {list(shape)}\n".encode()
            self._sums[name] = {}
        self._sums[name][first] = _block_sums(part.detach())

    def text(self) -> str:
        """Return 16 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._heads):
            digest.update(self._heads[name])
            for _, sums in sorted(self._sums[name].items()):
                digest.update(sums)
        return digest.hexdigest()


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the `Fingerprint` of named tensors as text."""
    found = Fingerprint()
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.text()


def sections(count: int, element_size: int) -> Iterator[tuple[int, int]]:
    """Yield where the sections of `count` elements begin and end; one, of nothing, where there are none."""
    most = _SECTION_BYTES // element_size
    for begin in range(0, max(1, count), most):
        yield begin, min(count, begin + most)


def _block_sums(flat: Tensor) -> bytes:
    """Return the sums of the bits of blocks, as int64 numbers that wrap around, and that of what is left, if any is."""
    size = flat.element_size()
    whole = flat.numel() * size // _BLOCK_BYTES * _BLOCK_BYTES
    if flat.is_cpu:
        # numpy takes half of torch's time for so few numbers, and eight bytes may begin anywhere.
        octets = flat.view(torch.uint8).numpy()
        sums = octets[:whole].view(np.int64).reshape(-1, _BLOCK_BYTES // 8).sum(axis=1).tobytes()
        if whole == octets.size:
            return sums
        return sums + octets[whole:].view(f"i{size}" if size > 1 else "u1").sum(dtype=np.int64).tobytes()
    blocks, rest = flat[: whole // size], flat[whole // size :]
    if blocks.storage_offset() * size % 8:
        blocks = blocks.clone()  # eight bytes are one number only where a multiple of eight begins
    found = blocks.view(torch.int64).view(-1, _BLOCK_BYTES // 8).sum(dim=1)
    if rest.numel():
        bits = rest.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        found = torch.cat((found, bits.sum(dtype=torch.int64)[None]))
    return found.cpu().numpy().tobytes()
