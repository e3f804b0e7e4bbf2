"""Attention of causal language models over packed sequences, shared prefixes and key-value caches.

A HuggingFace model computes projections, norms and MLPs; `use_plans` makes it hand every layer's queries, keys and
values to the plan that the caller passes as `attention_plan=`. One packed row of tokens can then hold many sequences,
tokens that several sequences share can stand once, and keys can be kept wherever the caller keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from recipes.language.models.attention_rule import AttentionRule, attention, band
from recipes.language.models.tree_attention import TreeAttention, subtree_ends
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "rlinf"
NO_PARENT = -1
SLIDING = "sliding_attention"
# Keywords that models pass on and that change no number: what they say is the plan's, or of other kernels.
_NEUTRAL = frozenset(
    ("position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "past_key_values")
)
_REMEDY = "use a model family listed in docs/language-models.md"


class AttentionPlan(Protocol):
    """The attention of one forward pass, layer by layer."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Return what a layer's attention gives.

        Args:
            layer: index of the layer.
            queries: float [B, H, T, D], rotated.
            keys: float [B, G, T, D], of the same tokens, rotated; each serves H / G query heads.
            values: float [B, G, T, E].
            rule: the rule of the layer.

        Returns:
            float [B, H, T, E].
        """
        ...


def use_plans(model: PreTrainedModel) -> None:
    """Let `model` take an `attention_plan` in every forward pass.

    Raises:
        ConfigError: the model's attention cannot be replaced, or is of a kind that is not computed here.
    """
    from transformers import AttentionInterface

    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"the attention of `{kind}` cannot be replaced", help=_REMEDY)
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    unknown = sorted(set(layers) - {"full_attention", SLIDING})
    if unknown:
        raise ConfigError(f"`{kind}` has unsupported layers: {', '.join(unknown)}", help=_REMEDY)
    if getattr(model.config.get_text_config(), "attention_chunk_size", None) and not layers:
        raise ConfigError(f"`{kind}` uses chunked attention, which is not supported", help=_REMEDY)
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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hand a layer's tensors to the plan; the signature is that of transformers' attention functions.

    Raises:
        ConfigError: the layer asks for attention of a kind that is not computed here.
    """
    if attention_plan is None:
        raise ConfigError("the model's layers do not pass on the arguments of their attention", help=_REMEDY)
    layer: int = module.layer_idx
    asked = [name for name, value in others.items() if name not in _NEUTRAL and value is not None]
    asked += ["attention_mask"] if attention_mask is not None else []
    asked += ["dropout"] if dropout else []
    asked += ["is_causal=False"] if is_causal is False else []
    if asked:
        raise ConfigError(
            f"layer {layer} of the model passes `{asked[0]}` to its attention, which is not supported", help=_REMEDY
        )
    kinds = getattr(module.config, "layer_types", None)
    if not kinds and sliding_window is None:
        # PhiMoE passes its window only to the mask.
        sliding_window = getattr(module.config, "sliding_window", None)
    if kinds and kinds[layer] == SLIDING and sliding_window is None:
        raise ConfigError(
            f"layer {layer} of the model has a sliding window that it does not pass to its attention", help=_REMEDY
        )
    rule = AttentionRule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return attention_plan.attend(layer, query, key, value, rule).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a packed row that continues its parent's tokens, or starts a sequence.

    Attributes:
        start: position of its first token in the packed row.
        length: the number of its tokens.
        parent: index of the segment that it continues; it stands earlier in the row. `NO_PARENT`: none.
    """

    start: int
    length: int
    parent: int = NO_PARENT


def longest_exact(config: Any) -> int | None:
    """Return the maximum sequence length for which a model's rotary angles depend only on positions; None: unlimited.

    `longrope` (Phi-3) changes its angles where a sequence is longer than the original length, and `dynamic` where it is
    longer than `max_position_embeddings`. In a packed row, and while an answer grows, one length would decide for all.

    Args:
        config: the configuration of a text model of transformers.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(cast("dict[str, Any]", part) for part in rope.values() if isinstance(part, dict))]
    kinds = {part.get("rope_type") for part in parts}
    limits: list[int] = []
    if "longrope" in kinds:
        original = rope.get("original_max_position_embeddings")
        limits.append(
            original or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        )
    if "dynamic" in kinds:
        limits.append(config.max_position_embeddings)
    return min(limits, default=None)


class PackedPlan:
    """Attention within the sequences of one packed row, in which shared prefixes stand once.

    Every token attends to itself, to the tokens before it in its segment, and to all tokens of the segments that its
    own continues: the result is that of each sequence by itself. On a GPU one kernel computes all of them; elsewhere
    segments of equal shape are computed together.

    Args:
        segments: the segments in the order of the row, which they fill.
        device: the device of the tensors.

    Attributes:
        positions: int64 [1, T], the position of each token in its sequence, for the model's `position_ids`.
        longest: tokens of the longest sequence.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        context: list[list[tuple[int, int]]] = []
        offsets: list[int] = []
        for segment in segments:
            if segment.parent == NO_PARENT:
                context.append([])
                offsets.append(0)
            else:
                parent = segments[segment.parent]
                context.append([*context[segment.parent], (parent.start, parent.length)])
                offsets.append(offsets[segment.parent] + parent.length)
        self.longest = max(
            (offset + segment.length for offset, segment in zip(offsets, segments, strict=True)), default=0
        )
        lengths = torch.tensor([segment.length for segment in segments], dtype=torch.int64)
        # A token's place in the row, less that of its segment, plus what its segment continues.
        shifts = torch.tensor([offset - segment.start for offset, segment in zip(offsets, segments, strict=True)])
        positions = torch.arange(int(lengths.sum())) + shifts.to(torch.int64).repeat_interleave(lengths)
        self.positions = positions.to(self._device)[None]
        self._whole = len(segments) == 1
        self._tree = _tree(segments, positions, self._device)
        self._buckets: list[_Bucket] = []
        if self._tree is None:
            shapes: dict[tuple[int, int], list[int]] = {}
            for index, segment in enumerate(segments):
                shapes.setdefault((offsets[index], segment.length), []).append(index)
            self._buckets = [
                _bucket([segments[i] for i in indices], [context[i] for i in indices], self._device)
                for indices in shapes.values()
            ]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`; B is 1."""
        if self._whole:
            length = queries.shape[2]
            if self._tree is not None and (rule.hides(length) or not rule.is_plain):
                return self._tree.attend(queries, keys, values, rule)
            mask = band(length, length, rule.window, queries.device) if rule.hides(length) else None
            return attention(queries, keys, values, mask, rule, causal=mask is None)
        if self._tree is not None:
            return self._tree.attend(queries, keys, values, rule)
        pieces = [bucket.attend(queries[0], keys[0], values[0], rule) for bucket in self._buckets]
        return torch.cat(pieces, dim=1).index_select(1, self._order)[None]

    @cached_property
    def _order(self) -> Tensor:
        """Positions of the row's tokens in the results of all buckets, int64 [T]."""
        row = torch.cat([bucket.own.reshape(-1) for bucket in self._buckets])
        inverse = torch.empty_like(row)
        inverse[row] = torch.arange(len(row), device=row.device)
        return inverse


def _tree(segments: Sequence[Segment], positions: Tensor, device: torch.device) -> TreeAttention | None:
    """Return the attention of the whole row by one kernel, where the device and the order of the row allow it."""
    if not segments or not TreeAttention.serves(device):
        return None
    ends = subtree_ends([(segment.start, segment.length, segment.parent) for segment in segments])
    if ends is None:
        return None
    lengths = torch.tensor([segment.length for segment in segments])
    return TreeAttention(torch.tensor(ends).repeat_interleave(lengths), positions, device)


class _Bucket:
    """Segments of one length with contexts of one length.

    Args:
        own: int64 [n, L], positions of their tokens in the row.
        all: int64 [n, C + L], positions of what they continue, in order, and of themselves.
    """

    def __init__(self, own: Tensor, all: Tensor) -> None:
        self.own = own
        self.all = all
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Return [H, n * L, E] of queries [H, T, D], keys [G, T, D] and values [G, T, E]."""
        count, length = self.own.shape
        mask = self._mask(rule)
        result = attention(
            _gathered(queries, self.own),
            _gathered(keys, self.all),
            _gathered(values, self.all),
            mask,
            rule,
            causal=mask is None,
        )
        return result.transpose(0, 1).reshape(queries.shape[0], count * length, values.shape[-1])

    def _mask(self, rule: AttentionRule) -> Tensor | None:
        """Return an attention mask, bool [L, C + L]; None if plain causal attention suffices."""
        length, seen = self.own.shape[1], self.all.shape[1]
        window = rule.window if rule.hides(seen) else None
        if window is None and length == seen:
            return None
        if window not in self._masks:
            self._masks[window] = band(length, seen, window, self.own.device)
        return self._masks[window]


def _gathered(tensor: Tensor, where: Tensor) -> Tensor:
    """Return [n, heads, L, D] of a tensor [heads, T, D] at positions [n, L]."""
    rows = tensor.index_select(1, where.reshape(-1))
    return rows.reshape(tensor.shape[0], where.shape[0], -1, tensor.shape[-1]).transpose(0, 1)


def _bucket(segments: Sequence[Segment], contexts: Sequence[list[tuple[int, int]]], device: torch.device) -> _Bucket:
    length = segments[0].length
    own = torch.tensor([segment.start for segment in segments])[:, None] + torch.arange(length)
    if not contexts[0]:
        return _Bucket(own.to(device), own.to(device))
    # Answers to one prompt continue the same tokens.
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    which = [numbers.setdefault(tuple(key), len(numbers)) for key in contexts]
    unlike = [torch.cat([torch.arange(start, start + count) for start, count in number]) for number in numbers]
    context = torch.stack(unlike)[which]
    return _Bucket(own.to(device), torch.cat((context, own), dim=1).to(device))
