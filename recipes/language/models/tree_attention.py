"""Attention of a packed row on a GPU: one fused kernel for all its segments, torch's FlexAttention."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recipes.language.models.attention_rule import AttentionRule

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Queries and keys of a tile of the kernel.
BLOCK = 128
# Kernels are compiled for each type, head size and rule; torch's own limit counts those of all models of a process.
_KERNELS = 64


class TreeAttention:
    """The attention of a row whose segments stand in preorder: what continues a segment follows it at once.

    A token then sees those before it whose segment's subtree it lies in. Tiles of the score matrix without such pairs
    are skipped, and tiles of such pairs alone need no mask.

    Args:
        ends: int64 [T], for each token the place in the row where the subtree of its segment ends; on the CPU.
        positions: int64 [T], of each token in its sequence; on the CPU.
        device: the device of the tensors.
    """

    def __init__(self, ends: Tensor, positions: Tensor, device: torch.device) -> None:
        self._cpu = ends, positions
        self._ends, self._positions = ends.to(device), positions.to(device)
        self._masks: dict[int | None, BlockMask] = {}

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Return whether the kernel can be compiled for a device."""
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Return [1, H, T, E] of queries [1, H, T, D], keys [1, G, T, D] and values [1, G, T, E]."""
        if rule.window not in self._masks:
            self._masks[rule.window] = self._mask(rule.window)
        options: dict[str, Any] = {
            "score_mod": None if rule.softcap is None else _capped(rule.softcap, queries.device),
            "block_mask": self._masks[rule.window],
            "scale": rule.scale,
            "enable_gqa": queries.shape[1] != keys.shape[1],
        }
        compiler: Any = importlib.import_module("torch._dynamo.config")
        with compiler.patch(recompile_limit=_KERNELS):
            if rule.sinks is None:
                return _kernel()(queries, keys, values, **options)
            result, normalizers = _kernel()(queries, keys, values, **options, return_lse=True)
        # A sink takes its share of the softmax and gives nothing.
        share = torch.sigmoid(normalizers - rule.sinks.to(normalizers.dtype)[None, :, None])
        return result * share[..., None].to(result.dtype)

    def _mask(self, window: int | None) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        ends, positions = self._ends, self._positions
        # As a tensor, so that one kernel serves windows of every size.
        reach = torch.tensor(len(ends) if window is None else window, device=ends.device)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key]) & (positions[query] - positions[key] < reach)

        partial, full = tiles(*self._cpu, window)
        counts, indices = zip(_listed(partial), _listed(full), strict=True)
        device = ends.device
        return BlockMask.from_kv_blocks(
            counts[0].to(device),
            indices[0].to(device),
            counts[1].to(device),
            indices[1].to(device),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(len(ends), len(ends)),
        )


def subtree_ends(segments: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """Return where each segment's subtree ends in the row; None where segments are not in preorder.

    Args:
        segments: start, length and parent of each, in the order of the row; a negative parent: none.
    """
    ends = [start + length for start, length, _ in segments]
    path: list[int] = []
    for index, (_, _, parent) in enumerate(segments):
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            return None
        path.append(index)
    for index in range(len(segments) - 1, -1, -1):
        parent = segments[index][2]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return ends


def tiles(ends: Tensor, positions: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Return which tiles of the score matrix have some pairs that see each other, and which have these alone.

    Args:
        ends, positions: see `TreeAttention`.
        window: how many tokens of its sequence a token sees at most; None: all.

    Returns:
        bool [n, n] each, queries by keys; no tile is in both. A tile of the first may turn out to have none.
    """
    length = len(ends)
    count = -(-length // BLOCK)
    first = torch.arange(count) * BLOCK
    behind = (first + BLOCK).clamp(max=length)
    lowest, highest = _extremes(ends, count)
    before = torch.arange(count)[None] < torch.arange(count)[:, None]
    same = torch.eye(count, dtype=torch.bool)
    seen = (before & (highest[None] > first[:, None])) | same
    full = before & (lowest[None] >= behind[:, None])
    if window is not None:
        nearest, farthest = _extremes(positions, count)
        seen &= nearest[:, None] - farthest[None] < window
        full &= farthest[:, None] - nearest[None] < window
    full &= seen
    return seen & ~full, full


def _extremes(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each tile, int64 [n]."""
    missing = count * BLOCK - len(values)
    tiled = torch.cat((values, values[-1:].expand(missing))).reshape(count, BLOCK)
    return tiled.min(dim=1).values, tiled.max(dim=1).values


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles each row of them has, int32 [1, 1, n], and which, first, int32 [1, 1, n, n]."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    # As a tensor: the compiler makes a number of it that stays on the CPU.
    cap = torch.tensor(softcap, device=device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


@cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Callable[..., Any]", torch.compile(flex_attention, dynamic=True))
