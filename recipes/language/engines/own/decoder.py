"""The forward pass of a decoding step, which a CUDA graph repeats on a GPU."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from recipes.language.engines.own.kv_cache import KvBucket, KvCache
from recipes.language.models.attention_rule import AttentionRule, attention, attention_and_normalizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
# Steps without a graph after the cache has got other memory. Recording costs about as much as three of them.
_PLAIN_STEPS = 3


class Decoder:
    """Computes the logits of the next tokens of all rows of a cache.

    A step of a small batch takes a GPU less time than Python takes to start its kernels. On a GPU the kernels are
    therefore recorded once the cache has kept its memory for some steps, and started together from then on.

    Args:
        model: the model that `use_plans` has prepared.
        graphs: whether steps are recorded on a GPU.
    """

    def __init__(self, model: PreTrainedModel, *, graphs: bool = True) -> None:
        self._model: Any = model
        self._graphs = graphs and model.device.type == "cuda"
        self._graph: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop the recorded step: weights have moved, or the cache was replaced."""
        # The graph stays until the next is recorded, which takes over its memory.
        self._logits: Tensor | None = None
        self._steps = 0
        self._moves = -1

    def logits(self, tokens: Tensor, cache: KvCache) -> Tensor:
        """Return the logits after a token of each row, float [rows, V], and keep its keys and values.

        Args:
            tokens: int64 [rows].
            cache: the cache of the rows.
        """
        cache.reserve()
        if self._moves != cache.moves:
            self.forget()
            self._moves = cache.moves
            self._layout = DecodeLayout(cache)
        self._steps += 1
        if self._graphs and self._logits is None and self._steps > _PLAIN_STEPS:
            self._record(tokens, cache)
        if self._logits is None:
            logits = self._pass(tokens, DecodePlan(self._layout))
        else:
            self._tokens.copy_(tokens)
            self._graph.replay()
            self._ends += 1
            logits = self._logits
        cache.advance()
        return logits

    def _pass(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        logits: Tensor = self._model(
            input_ids=tokens[:, None],
            position_ids=plan.positions,
            use_cache=False,
            logits_to_keep=1,
            attention_plan=plan,
        ).logits
        return logits[:, -1]

    def _record(self, tokens: Tensor, cache: KvCache) -> None:
        """Record a step. A model that waits for its GPU within a step continues without."""
        self._tokens = tokens.clone()
        ends = [bucket.rows.end for bucket in cache.buckets]
        self._ends = torch.tensor(ends, device=tokens.device)
        here, apart = torch.cuda.current_stream(), torch.cuda.Stream()
        apart.wait_stream(here)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # Libraries take memory at their first call, which a graph must not record.
            with torch.cuda.stream(apart), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
                torch.cuda.set_sync_debug_mode("error")
                self._pass(self._tokens, DecodePlan(self._layout, self._ends))
        except RuntimeError as error:
            self._graphs = False
            reason = str(error).splitlines()[0]
            _log.warning("the model decodes without CUDA graphs, which makes small batches slower: %s", reason)
            return
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            here.wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._graph is None else self._graph.pool()):
            self._logits = self._pass(self._tokens, DecodePlan(self._layout, self._ends))
        self._graph = graph


class DecodeLayout:
    """The places of a cache's rows, for the steps in which it keeps its memory.

    Attributes:
        parts: the parts of each bucket.
        numbers: int64 [its rows] of each bucket, in the order of the engine; none where there is one bucket.
        order: int64 [rows], the place of each row of the engine among the rows of all buckets.
    """

    def __init__(self, cache: KvCache) -> None:
        device, buckets = cache.shape.device, cache.buckets
        self.parts = [_BucketLayout(bucket, device) for bucket in buckets]
        numbers = [bucket.numbers for bucket in buckets]
        self.numbers = [number.to(device) for number in numbers] if len(buckets) > 1 else []
        self.order = torch.cat(numbers).argsort().to(device)


class DecodePlan:
    """Attention of one new token for every row of a cache, which keeps the token's keys and values.

    Args:
        layout: the layout of the cache, which has room for the token.
        ends: int64 [buckets], the columns of the new tokens, which the caller keeps up to date. With it the operations
            are the same at every step of the layout, for a CUDA graph: all columns are read, and a mask hides those
            that have no tokens yet. None: of the cache at this moment.

    Attributes:
        positions: int64 [rows, 1], the position of each new token in its sequence.
    """

    def __init__(self, layout: DecodeLayout, ends: Tensor | None = None) -> None:
        self._numbers, self._order = layout.numbers, layout.order
        self._parts = [
            _BucketPlan(part, None if ends is None else ends[index : index + 1])
            for index, part in enumerate(layout.parts)
        ]
        self.positions = torch.cat([part.positions for part in self._parts])[:, None]
        if self._numbers:
            self.positions = self.positions.index_select(0, self._order)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`; T is 1."""
        if not self._numbers:
            return self._parts[0].attend(layer, queries, keys, values, rule)
        results: list[Tensor] = []
        for part, numbers in zip(self._parts, self._numbers, strict=True):
            own = [tensor.index_select(0, numbers) for tensor in (queries, keys, values)]
            results.append(part.attend(layer, own[0], own[1], own[2], rule))
        return torch.cat(results).index_select(0, self._order)


class _Lanes(NamedTuple):
    """Rows laid out by the prompts that they share.

    Attributes:
        rows: int64 [prompts * n], rows of each prompt; those of a prompt with fewer are filled up with row 0.
        places: int64 [rows], where each row is in it.
        size: n.
    """

    rows: Tensor
    places: Tensor
    size: int


class _BucketLayout:
    """The part of a `DecodeLayout` for one bucket.

    Attributes:
        rows, prompts: see `KvBucket`.
        first: first column that any row uses.
        is_ragged: whether rows begin at different columns.
        base: tokens of the longest prompt.
        starts, bases: int64 [rows], first columns, and tokens of each row's prompt; on the device.
        lanes: rows by their prompts; None where rows share none.
        lengths: int64 [prompts], on the device.
        is_padded: whether prompts are of different lengths.
    """

    def __init__(self, bucket: KvBucket, device: torch.device) -> None:
        self.rows, self.prompts = bucket.rows, bucket.prompts
        starts, bases, lengths = bucket.rows.starts, bucket.bases, bucket.prompts.lengths
        self.first = int(starts.min())
        self.is_ragged = bool((starts != self.first).any())
        self.base = int(bases.max())
        self.starts, self.bases, self.lengths = starts.to(device), bases.to(device), lengths.to(device)
        self.lanes = _lanes(bucket.owners, bucket.prompts.count, device) if bucket.prompts.count else None
        self.is_padded = bool((lengths != bucket.prompts.columns).any())


class _BucketPlan:
    """The part of a `DecodePlan` that is about one bucket.

    Attributes:
        positions: int64 [rows].
    """

    def __init__(self, layout: _BucketLayout, end: Tensor | None) -> None:
        rows = layout.rows
        self._layout = layout
        self._is_static = end is not None
        self._end: int | Tensor = rows.end if end is None else end
        self._first = 0 if self._is_static else layout.first
        self._behind = rows.columns if self._is_static else rows.end + 1
        self._longest = layout.base + rows.end + 1 - layout.first
        self.positions = layout.bases + (self._end - layout.starts)
        self._masks: dict[int | None, Tensor | None] = {}
        self._prompt_masks: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`. Query heads that share a key head are taken as rows of one product."""
        kept_keys, kept_values = self._layout.rows.layer(layer)
        if isinstance(self._end, Tensor):
            kept_keys.index_copy_(2, self._end, keys)
            kept_values.index_copy_(2, self._end, values)
        else:
            kept_keys[:, :, self._end] = keys[:, :, 0]
            kept_values[:, :, self._end] = values[:, :, 0]
        rows, heads, _, dim = queries.shape
        seen = slice(self._first, self._behind)
        own_keys, own_values = kept_keys[:, :, seen], kept_values[:, :, seen]
        # A recorded step is repeated when sequences have become longer.
        window = rule.window if self._is_static or rule.hides(self._longest) else None
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        mask = self._masks[window]
        grouped = queries.reshape(rows, keys.shape[1], heads // keys.shape[1], dim)
        if self._layout.lanes is None:
            result = attention(grouped if rule.is_plain else queries, own_keys, own_values, mask, rule)
            return result.reshape(rows, heads, 1, values.shape[-1])
        own, normalizers = attention_and_normalizers(grouped, own_keys, own_values, mask, rule)
        shared, of_shared = self._of_prompts(self._layout.lanes, layer, grouped, window, rule)
        # Each part counts by its share of the sum of exponentials.
        result = torch.lerp(own, shared, torch.sigmoid(of_shared - normalizers)[..., None].to(own.dtype))
        if rule.sinks is not None:
            sinks = rule.sinks.float().reshape(normalizers.shape[1:])
            result = result * torch.sigmoid(torch.logaddexp(normalizers, of_shared) - sinks)[..., None].to(own.dtype)
        return result.reshape(rows, heads, 1, values.shape[-1])

    def _of_prompts(
        self, lanes: _Lanes, layer: int, queries: Tensor, window: int | None, rule: AttentionRule
    ) -> tuple[Tensor, Tensor]:
        """Return attention of queries [rows, G, R, D] to the prompts alone, [rows, G, R, E], and its normalizers."""
        keys, values = self._layout.prompts.layer(layer)
        heads, share, dim = queries.shape[1:]
        if window not in self._prompt_masks:
            self._prompt_masks[window] = self._prompt_mask(lanes, window)
        mask = self._prompt_masks[window]
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat_interleave(share, dim=2)
        laid = queries.index_select(0, lanes.rows).reshape(-1, lanes.size, heads, share, dim).transpose(1, 2)
        laid = laid.reshape(-1, heads, lanes.size * share, dim)
        result, normalizers = attention_and_normalizers(laid, keys, values, mask, rule)
        result = result.reshape(-1, heads, lanes.size, share, values.shape[-1]).transpose(1, 2)
        normalizers = normalizers.reshape(-1, heads, lanes.size, share).transpose(1, 2)
        return (
            result.reshape(-1, heads, share, values.shape[-1]).index_select(0, lanes.places),
            normalizers.reshape(-1, heads, share).index_select(0, lanes.places),
        )

    def _mask(self, window: int | None) -> Tensor | None:
        """Return the columns that each row's new token sees, bool [rows, 1, 1, columns]; None: all."""
        if window is None and not (self._is_static or self._layout.is_ragged):
            return None
        starts = self._layout.starts
        columns = torch.arange(self._first, self._behind, device=starts.device)
        seen = columns[None] >= starts[:, None]
        if self._is_static:
            seen &= columns <= self._end
        if window is not None:
            seen &= self._end - columns[None] < window
        return seen[:, None, None]

    def _prompt_mask(self, lanes: _Lanes, window: int | None) -> Tensor | None:
        """Return the columns that the new tokens of each prompt's rows see; None: all.

        Returns:
            bool [prompts, 1, n, columns], or with 1 for n where all rows of a prompt see the same.
        """
        if window is None and not self._layout.is_padded:
            return None
        lengths = self._layout.lengths
        columns = torch.arange(self._layout.prompts.columns, device=lengths.device)
        seen = (columns[None] < lengths[:, None])[:, None]
        if window is not None:
            newest = self.positions.index_select(0, lanes.rows).reshape(-1, lanes.size)
            seen = seen & (newest[..., None] - columns < window)
        return seen[:, None]


def _lanes(owners: Tensor, prompts: int, device: torch.device) -> _Lanes:
    """Lay rows out by their prompts, int64 [rows]."""
    counts = owners.bincount(minlength=prompts)
    most = int(counts.max())
    order = owners.argsort(stable=True)
    before = (counts.cumsum(0) - counts)[owners[order]]
    places = torch.empty_like(owners)
    places[order] = owners[order] * most + torch.arange(len(owners)) - before
    rows = torch.zeros(prompts * most, dtype=torch.int64)
    rows[places] = torch.arange(len(owners))
    return _Lanes(rows.to(device), places.to(device), most)
