"""Fingerprints of weights, equal on both sides of a transfer."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_BLOCK_BYTES = 16384
# Read, then copied: little enough to be in the second-level cache of a core still. `memmove` from there takes half the
# processor time of torch's own copy.
_COPIED_BYTES = 512 << 10


class Fingerprint:
    """An order-independent fingerprint of tensors that arrive one by one.

    It depends on the names, types, shapes and contents of all of them. Contents enter as sums of their bits, eight
    bytes a number, over blocks of 16 KiB, at the speed of reading memory: a torn or stale transfer is found, a forged
    one is not.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def add(self, name: str, tensor: Tensor, *, copy_to: Tensor | None = None) -> None:
        """Take a tensor into account; its bytes are read now.

        Args:
            name: its name; a tensor of the same name that was added before is replaced.
            tensor: the tensor.
            copy_to: a contiguous tensor of its shape and type, on the host as well, which is filled with its values on
                the way: each part is read while it is in the processor's cache.

        Raises:
            ValueError: `copy_to` is not such a tensor.
        """
        if copy_to is not None:
            # Its memory is written without torch, which would look.
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
    """Return sums of bits by block, as wrapping int64 numbers; the last is that of the remainder."""
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
