"""Fingerprints of weights, equal on both sides of a transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_BLOCK_BYTES = 16384


class Fingerprint:
    """An order-independent fingerprint of tensors that arrive one by one.

    It depends on the names, types, shapes and contents of all of them. Contents enter as sums of their bits, eight
    bytes a number, over blocks of 16 KiB, at the speed of reading memory: a torn or stale transfer is found, a forged
    one is not.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor into account; its bytes are read now."""
        plain = tensor.detach().contiguous().flatten()
        head = f"{name} {plain.dtype} {list(tensor.shape)}\n".encode()
        self._parts[name] = head + _block_sums(plain).cpu().numpy().tobytes()

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


def _block_sums(flat: Tensor) -> Tensor:
    """Return sums of bits by block, as wrapping int64 numbers; the last is that of the remainder."""
    size = flat.element_size()
    whole = flat.numel() * size // _BLOCK_BYTES * _BLOCK_BYTES // size
    blocks = flat[:whole]
    if blocks.storage_offset() * size % 8:
        blocks = blocks.clone()  # eight bytes are one number only where a multiple of eight begins
    sums = blocks.view(torch.int64).view(-1, _BLOCK_BYTES // 8).sum(dim=1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return torch.cat((sums, flat[whole:].view(bits).sum(dtype=torch.int64)[None]))
