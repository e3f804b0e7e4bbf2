"""Attention of causal language models over packed sequences, shared prefixes and key-value caches.

A HuggingFace model computes projections, norms and MLPs; `use_plans` makes it hand every layer's queries, keys and
values to the plan that the caller passes as `attention_plan=`. One packed row of tokens can then hold many sequences,
tokens that several sequences share can stand once, and keys can be kept wherever the caller keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "rlinf"
NO_PARENT = -1


class AttentionPlan(Protocol):
    """The attention of one forward pass, layer by layer."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return what a layer's attention gives.

        Args:
            layer: index of the layer.
            queries: float [B, H, T, D], rotated.
            keys: float [B, G, T, D], of the same tokens, rotated; each serves H / G query heads.
            values: float [B, G, T, D].
            scale: factor of the products of queries and keys.

        Returns:
            float [B, H, T, D].
        """
        ...


def use_plans(model: PreTrainedModel) -> None:
    """Let `model` take an `attention_plan` in every forward pass.

    Raises:
        ConfigError: the model's attention cannot be replaced, or some of its layers see a window of tokens only.
    """
    from transformers import AttentionInterface

    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"`{kind}` does not let its attention be replaced", help="use a model of the Llama, Qwen or Gemma families"
        )
    layers = getattr(model.config, "layer_types", None) or ()
    if any(each != "full_attention" for each in layers):
        raise ConfigError(
            f"`{kind}` has layers of other kinds than full attention: {', '.join(sorted(set(layers)))}",
            help="use a model whose layers all attend to the whole sequence",
        )
    AttentionInterface.register(ATTENTION, _attend)
    model.set_attn_implementation(ATTENTION)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hand a layer's tensors to the plan; the signature is that of transformers' attention functions."""
    if attention_plan is None:
        raise ValueError("a model prepared by `use_plans` needs `attention_plan=` in every call")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_plan.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a packed row that follows its parent's tokens, or begins a sequence.

    Attributes:
        start: position of its first token in the packed row.
        length: how many tokens it has.
        parent: index of the segment that it continues; it stands earlier in the row. `NO_PARENT`: none.
    """

    start: int
    length: int
    parent: int = NO_PARENT


class PackedPlan:
    """Attention within the sequences of one packed row, in which shared prefixes stand once.

    Every token attends to itself, to the tokens before it in its segment, and to all tokens of the segments that its
    own continues: the result is that of each sequence by itself. Segments of equal shape are computed together.

    Args:
        segments: in the order of the row, which they fill.
        device: of the tensors.

    Attributes:
        positions: int64 [1, T], the position of each token in its sequence, for the model's `position_ids`.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        context: list[list[tuple[int, int]]] = []
        offsets: list[int] = []
        for each in segments:
            if each.parent == NO_PARENT:
                context.append([])
                offsets.append(0)
            else:
                parent = segments[each.parent]
                context.append([*context[each.parent], (parent.start, parent.length)])
                offsets.append(offsets[each.parent] + parent.length)
        lengths = torch.tensor([each.length for each in segments], dtype=torch.int64)
        # A token's place in the row, less that of its segment, plus what its segment continues.
        shifts = torch.tensor([offset - each.start for offset, each in zip(offsets, segments, strict=True)])
        positions = torch.arange(int(lengths.sum())) + shifts.to(torch.int64).repeat_interleave(lengths)
        self.positions = positions.to(self._device)[None]
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, each in enumerate(segments):
            buckets.setdefault((offsets[index], each.length), []).append(index)
        self._buckets = [
            _bucket([segments[i] for i in indices], [context[i] for i in indices], self._device)
            for indices in buckets.values()
        ]
        self._whole = len(segments) == 1

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`; B is 1."""
        if self._whole:
            return _fused(queries, keys, values, None, scale)
        pieces = [bucket.attend(queries[0], keys[0], values[0], scale) for bucket in self._buckets]
        return torch.cat(pieces, dim=1).index_select(1, self._order)[None]

    @cached_property
    def _order(self) -> Tensor:
        """Positions of the row's tokens in the results of all buckets, int64 [T]."""
        row = torch.cat([bucket.own.reshape(-1) for bucket in self._buckets])
        inverse = torch.empty_like(row)
        inverse[row] = torch.arange(len(row), device=row.device)
        return inverse


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments of one length with contexts of one length.

    Attributes:
        own: int64 [n, L], positions of their tokens in the row.
        all: int64 [n, C + L], positions of what they attend to.
        mask: bool [L, C + L]; None where plain causal attention serves.
    """

    own: Tensor
    all: Tensor
    mask: Tensor | None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return [H, n * L, D] of queries [H, T, D], keys and values [G, T, D]."""
        count, length = self.own.shape
        heads, dim = queries.shape[0], queries.shape[-1]

        def gather(tensor: Tensor, where: Tensor) -> Tensor:
            rows = tensor.index_select(1, where.reshape(-1))
            return rows.reshape(tensor.shape[0], count, -1, dim).transpose(0, 1)

        result = _fused(gather(queries, self.own), gather(keys, self.all), gather(values, self.all), self.mask, scale)
        return result.transpose(0, 1).reshape(heads, count * length, dim)


def _fused(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention of queries [B, H, L, D] to keys and values [B, G, C + L, D]; causal where there is no mask.

    On the meta device, where memory is forecast, torch would take products with a matrix of all scores: there
    its kernel is called by name.
    """
    causal = mask is None
    if not queries.is_meta:
        shares = keys.shape[1] != queries.shape[1]
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shares
        )
    added = None if mask is None else torch.zeros(mask.shape, dtype=queries.dtype, device=queries.device)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: Tensor = kernel(queries, keys, values, 0.0, causal, attn_mask=added, scale=scale)[0]
    return found


def _bucket(segments: Sequence[Segment], contexts: Sequence[list[tuple[int, int]]], device: torch.device) -> _Bucket:
    length = segments[0].length
    own = torch.tensor([each.start for each in segments])[:, None] + torch.arange(length)
    if not contexts[0]:
        return _Bucket(own.to(device), own.to(device), None)
    # Answers to one prompt continue the same tokens.
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    which = [numbers.setdefault(tuple(each), len(numbers)) for each in contexts]
    unlike = [torch.cat([torch.arange(start, start + count) for start, count in each]) for each in numbers]
    context = torch.stack(unlike)[which]
    seen = torch.ones(length, context.shape[1], dtype=torch.bool)
    mask = torch.cat((seen, torch.ones(length, length, dtype=torch.bool).tril()), dim=1)
    return _Bucket(own.to(device), torch.cat((context, own), dim=1).to(device), mask.to(device))
