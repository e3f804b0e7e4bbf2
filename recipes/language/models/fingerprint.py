"""Checksums of weights, to compare both sides of a transfer."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_BLOCK_BYTES = 16384
# Bytes to read and then copy: little enough to stay in a core's second-level cache, from where `memmove` takes half the
# processor time of torch's copy.
_COPIED_BYTES = 512 << 10


class Fingerprint:
    """An order-independent checksum of tensors that arrive one by one.

    It depends on names, types, shapes and contents. Contents enter as sums of 8-byte integers over blocks of 16 KiB, at
    the speed of reading memory: this detects torn and stale transfers, but not forged ones.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def add(self, name: str, tensor: Tensor, *, copy_to: Tensor | None = None) -> None:
        """Add a tensor, whose bytes are read now.

        Args:
            name: the name of the tensor; an earlier tensor of this name is replaced.
            tensor: the tensor.
            copy_to: a contiguous tensor of the same shape and type to copy the values to, part by part while they are
                in the processor's cache; both tensors must be on the host.

        Raises:
            ValueError: `copy_to` differs in shape or type, is not contiguous, or is not on the host.
        """
        if copy_to is not None:
            # `memmove` writes this memory without torch's checks.
            alike = copy_to.shape == tensor.shape and copy_to.dtype == tensor.dtype
            if not (alike and copy_to.is_contiguous() and copy_to.is_cpu and tensor.is_cpu):
                raise ValueError(f"`{name}` cannot be copied to a tensor of another shape, dtype, layout or device")
        plain = tensor.detach().contiguous().flatten()
        head = f"{name} {plain.dtype} {list(tensor.shape)}\n".encode()
        target = None if copy_to is None else copy_to.detach().flatten()
        self._parts[name] = head + _block_sums(plain, target).cpu().numpy().tobytes()

    def text(self) -> str:
        """Return 16 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._parts):
            digest.update(self._parts[name])
        return digest.hexdigest()


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the `Fingerprint` of named tensors as text."""
    digest = Fingerprint()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.text()


def _block_sums(flat: Tensor, target: Tensor | None) -> Tensor:
    """Return wrapping int64 sums of each block, and of the remainder, last."""
    size = flat.element_size()
    whole = flat.numel() * size // _BLOCK_BYTES * _BLOCK_BYTES // size
    blocks = flat[:whole]
    if blocks.storage_offset() * size % 8:
        blocks = blocks.clone()  # eight bytes are one number only where a multiple of eight begins
    numbers = blocks.view(torch.int64).view(-1, _BLOCK_BYTES // 8)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    rest = flat[whole:].view(bits).sum(dtype=torch.int64)
    if target is None:
        return torch.cat((numbers.sum(dim=1), rest[None]))
    sums = numbers.new_empty(len(numbers) + 1)
    sums[-1] = rest
    source, place, end = flat.data_ptr(), target.data_ptr(), flat.numel() * size
    step = _COPIED_BYTES // _BLOCK_BYTES
    for first in range(0, len(numbers), step):
        part = numbers[first : first + step]
        begin = first * _BLOCK_BYTES
        torch.sum(part, dim=1, out=sums[first : first + len(part)])
        ctypes.memmove(place + begin, source + begin, part.nbytes)
    whole *= size
    ctypes.memmove(place + whole, source + whole, end - whole)
    return sums
