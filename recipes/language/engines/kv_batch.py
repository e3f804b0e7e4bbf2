"""Batches of rows with similar lengths that decode together, with their KV cache for transformers."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from recipes.language.engines.kv_cache import ForwardPass, KeyValues, KvLayer, Lanes, Prefilled, Tokens

# Rows that share tokens are queries of one row while their own tokens are at most this many times the shared ones: each
# query attends over the own tokens of all rows.
_MOST_OTHERS = 4
# Lengths up to this share a batch; beyond it a batch takes lengths that differ by less than a factor of 4.
_SHORT = 512


@dataclass(frozen=True)
class NewRow:
    """An answer that enters a batch.

    Attributes:
        shared: initial tokens of the context that all rows with them store once: the whole context, the common prefix
            of all contexts, or none.
        length: the number of tokens of the context.
        most: the maximum number of tokens of context and answer.
    """

    shared: Tokens
    length: int
    most: int

    @property
    def most_own(self) -> int:
        """Maximum tokens of the row besides the shared ones."""
        return self.most - len(self.shared)

    @cached_property
    def key(self) -> tuple[int, int]:
        """The key of the row's batch, by the lengths of shared and own tokens."""
        return (_size(len(self.shared)) + 1 if self.shared else 0), _size(self.length - len(self.shared))


class Reservation:
    """The cache tokens that rows may need: every row of a batch is as wide as the widest."""

    def __init__(self, rows: Sequence[NewRow] = ()) -> None:
        # By batch: the number of rows with the most own tokens of a row, and the shared stems.
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._stems: dict[tuple[int, int], set[Tokens]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: NewRow) -> None:
        """Count a row."""
        count, widest = self._rows.get(row.key, (0, 0))
        self._rows[row.key] = count + 1, max(widest, row.most_own)
        if row.shared:
            self._stems.setdefault(row.key, set()).add(row.shared)

    @property
    def tokens(self) -> int:
        """Tokens of all rows and of all stems."""
        rows = sum(count * widest for count, widest in self._rows.values())
        return rows + sum(len(stems) * max(map(len, stems)) for stems in self._stems.values())


class KvBatch:
    """Rows that decode together.

    Rows are flush right, after their stem, the tokens shared with other rows; a mask hides columns without a token.

    Args:
        layers: the number of the model's layers.
        folds: whether rows that share tokens may be queries of one row.

    Attributes:
        cache: the KV cache that the model reads and extends.
        rows: the rows in the order of entry.
        numbers: int64 [rows], number of each row in the engine, on the CPU.
        positions: int64 [rows, 1], position of each row's next token, on the device.
    """

    def __init__(self, layers: int, *, folds: bool) -> None:
        self._layers = [KvLayer() for _ in range(layers)]
        self.cache: Any = Cache(layers=[*self._layers])
        self._folds = folds
        self.rows: list[NewRow] = []
        self.numbers = torch.empty(0, dtype=torch.int64)
        self.positions = torch.empty(0, 1, dtype=torch.int64)
        self._last = torch.empty(0, 1, dtype=torch.int64)
        # The tokens of each stem; None closes a stem of replaced weights to further rows.
        self._stems: list[Tokens | None] = []
        self._owners = torch.empty(0, dtype=torch.int64)
        self._stem_mask = torch.empty(0, 0, dtype=torch.int64)
        self._own_mask = torch.empty(0, 0, dtype=torch.int64)
        self._mask: Tensor | None = None
        self._lanes: Lanes | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of keys and values."""
        return [tensor for layer in self._layers for tensor in layer.tensors]

    def stems(self) -> dict[Tokens, int]:
        """Return the numbers of the stems that further rows may share, by their tokens."""
        return {tokens: number for number, tokens in enumerate(self._stems) if tokens is not None}

    def close(self) -> None:
        """Close all stems to further rows, as new weights compute other keys and values."""
        self._stems = [None] * len(self._stems)

    def logits(self, forward: ForwardPass, newest: Tensor) -> Tensor:
        """Return the logits of each row's next token, float [rows, V], and keep the newest token's keys and values.

        Args:
            forward: the forward pass of the model.
            newest: int64 [rows], the last token of each row.
        """
        lanes, tokens, positions = self._lanes, newest[:, None], self.positions
        columns = self._layers[0].end + 1
        if lanes is not None and lanes.count * columns > _MOST_OTHERS * self._stem_mask.shape[1]:
            lanes = None
        for layer in self._layers:
            layer.lanes = lanes
        # Ended rows stay in the batch, and a model has no positions beyond its last.
        self.positions = torch.minimum(positions + 1, self._last)
        if lanes is None:
            mask = None if self._mask is None else self._mask[:, : self._stem_mask.shape[1] + columns]
            return forward.logits(tokens, mask, positions, self.cache)
        mask = self._mask_of_lanes(lanes, columns)
        tokens, positions = lanes.laid(tokens)[..., 0], lanes.laid(positions)[..., 0]
        wanted = torch.arange(lanes.count, device=tokens.device)
        return forward.logits(tokens, mask, positions, self.cache, wanted).index_select(0, lanes.places)

    def _mask_of_lanes(self, lanes: Lanes, columns: int) -> Tensor:
        """Return the mask of the stem and own columns that queries see, bool [stems, 1, queries, columns]."""
        grown = columns - self._own_mask.shape[1]
        own = lanes.laid(pad(self._own_mask, (0, grown), value=1).bool())
        same = torch.eye(lanes.count, dtype=torch.bool, device=own.device)[None, :, :, None]
        own = (same & own[:, None]).flatten(2, 3)
        stems = self._stem_mask.bool()[:, None].expand(-1, lanes.count, -1)
        return torch.cat((stems, own), dim=2)[:, None]

    def add(self, prefilled: Prefilled, rows: Sequence[NewRow], which: Sequence[int], numbers: Sequence[int]) -> None:
        """Append rows.

        Args:
            prefilled: keys and values of the rows' contexts.
            rows: new rows with the key of this batch; either all share the common prefix of all contexts, or none does.
            which: the number of each row's context.
            numbers: the number of each row in the engine.
        """
        contexts, shared = torch.tensor(which, device=prefilled.logits.device), rows[0].shared
        if not shared:
            own, mask = prefilled.whole(contexts)
        else:
            own, mask = prefilled.behind(contexts)
            if shared == prefilled.prefix.tokens:
                self._add_stems([shared], prefilled.prefix.layers, mask.new_ones(1, len(shared)))
            else:
                missing = {row.shared: place for row, place in zip(rows, which, strict=True)}
                missing = {tokens: place for tokens, place in missing.items() if tokens not in self.stems()}
                if missing:
                    places = torch.tensor(list(missing.values()), device=contexts.device)
                    self._add_stems(list(missing), *prefilled.whole(places))
                own, mask = [(keys[:, :, :0], values[:, :, :0]) for keys, values in own], mask[:, :0]
            stems = self.stems()
            self._owners = torch.cat((self._owners, torch.tensor([stems[row.shared] for row in rows])))
        was_empty = not self.rows
        self.rows += rows
        self.numbers = torch.cat((self.numbers, torch.tensor(numbers)))
        positions = torch.tensor([[row.length] for row in rows], device=contexts.device)
        self.positions = positions if was_empty else torch.cat((self.positions, positions))
        before = mask if was_empty else self._seen()
        width = max(before.shape[1], mask.shape[1])
        parts = [mask] if was_empty else [before, mask]
        self._own_mask = torch.cat([pad(part, (width - part.shape[1], 0)) for part in parts])
        self._settle()
        for layer, added in zip(self._layers, own, strict=True):
            layer.lay([added] if was_empty else [layer.own, added])

    def _add_stems(self, tokens: Sequence[Tokens], layers: Sequence[KeyValues], mask: Tensor) -> None:
        """Append stems, flush right."""
        if tokens[0] in self.stems():
            return
        held = self._stem_mask.to(mask.device)
        width = max(held.shape[1], mask.shape[1])
        parts = [mask] if not self._stems else [held, mask]
        self._stem_mask = torch.cat([pad(part, (width - part.shape[1], 0)) for part in parts])
        for layer, added in zip(self._layers, layers, strict=True):
            if layer.stems is None:
                layer.stems = added
                continue
            pairs = zip(layer.stems, added, strict=True)
            keys, values = (torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in pair]) for pair in pairs)
            layer.stems = keys, values
        self._stems += tokens

    def _seen(self) -> Tensor:
        """Return the mask of own tokens so far, int64 [rows, columns]."""
        grown = self._layers[0].end - self._own_mask.shape[1]
        return pad(self._own_mask, (0, grown), value=1)

    def _settle(self) -> None:
        """Prepare lanes, owners and mask for all tokens to come."""
        own, device = self._own_mask, self.positions.device
        stems = self._stem_mask.index_select(0, self._owners.to(device)) if self._stems else own[:, :0]
        self._lanes = _lanes(self._owners, len(self._stems), device) if self._folds and self._stems else None
        self._last = torch.tensor([[row.most - 1] for row in self.rows], device=device)
        coming = int((self._last - self.positions).max()) + 1
        for layer in self._layers:
            layer.owners, layer.most = self._owners.to(device), own.shape[1] + coming
        seen = torch.cat((stems, own), dim=1)
        self._mask = None if bool(seen.all()) else pad(seen, (0, coming), value=1)

    def keep(self, numbers: Tensor) -> bool:
        """Keep the rows whose new number is not negative, and their stems; return whether any row is left.

        Args:
            numbers: int64 [all rows of the engine], new number of each row, on the CPU.
        """
        new = numbers[self.numbers]
        kept = (new >= 0).nonzero()[:, 0]
        self.numbers = new[kept]
        if len(kept) == len(new) or not len(kept):
            return bool(len(kept))
        index = kept.to(self.positions.device)
        self.rows = [self.rows[row] for row in kept.tolist()]
        self.positions = self.positions[index]
        mask = self._seen()[index]
        first = int(mask.any(dim=0).int().argmax()) if mask.shape[1] else 0
        self._own_mask = mask[:, first:]
        if self._stems:
            self._keep_stems(self._owners[kept])
        self._settle()
        for layer in self._layers:
            keys, values = layer.own
            layer.lay([(keys[:, :, first:].index_select(0, index), values[:, :, first:].index_select(0, index))])
        return True

    def _keep_stems(self, owners: Tensor) -> None:
        """Keep the stems that rows own, by the stem of each row, int64 [rows] on the CPU."""
        used, self._owners = owners.unique(return_inverse=True)
        if len(used) == len(self._stems):
            return
        self._stems = [self._stems[number] for number in used.tolist()]
        index = used.to(self.positions.device)
        mask = self._stem_mask[index]
        first = int(mask.any(dim=0).int().argmax())
        self._stem_mask = mask[:, first:]
        for layer in self._layers:
            if layer.stems:
                keys, values = (part[:, :, first:].index_select(0, index) for part in layer.stems)
                layer.stems = keys, values


def _lanes(owners: Tensor, stems: int, device: torch.device) -> Lanes:
    """Return the lanes of rows, given the stem of each, int64 [rows] on the CPU."""
    counts = owners.bincount(minlength=stems)
    most = int(counts.max())
    order = owners.argsort(stable=True)
    before = (counts.cumsum(0) - counts)[owners[order]]
    places = torch.empty_like(owners)
    places[order] = owners[order] * most + torch.arange(len(owners)) - before
    rows = torch.zeros(stems * most, dtype=torch.int64)
    rows[places] = torch.arange(len(owners))
    return Lanes(rows.to(device), places.to(device), most)


def _size(length: int) -> int:
    """Return the class of a length: 0 up to `_SHORT`, then one for each factor of 4."""
    return max(0, (length - 1).bit_length() - (_SHORT - 1).bit_length() + 1) // 2
