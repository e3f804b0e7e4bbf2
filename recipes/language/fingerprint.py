"""Fingerprints of weights, equal on both sides of a transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_BLOCK = 4096


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return 16 hexadecimal digits that depend on the names, types, shapes and contents of all tensors.

    Contents enter as sums of their bits over blocks of 4,096 elements, at the speed of reading memory: a torn or stale
    transfer is found, a forged one is not. Tensors are taken in the order of their names.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        plain = tensor.detach().contiguous().flatten()
        digest.update(f"{name} {plain.dtype} {list(tensor.shape)}\n".encode())
        digest.update(memoryview(_block_sums(plain).cpu().numpy()))
    return digest.hexdigest()


def _block_sums(flat: Tensor) -> Tensor:
    """Return the sums of the elements' bits by block, int64; they wrap around."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    whole = flat.numel() // _BLOCK * _BLOCK
    numbers = flat.view(bits)
    sums = numbers[:whole].view(-1, _BLOCK).sum(dim=1, dtype=torch.int64)
    return torch.cat((sums, numbers[whole:].sum(dtype=torch.int64)[None]))
