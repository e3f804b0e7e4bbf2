"""The forward pass over prompts, tokens that they begin with alike once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recipes.language.engines.own.kv_memory import Tokens
from recipes.language.models.attention import NO_PARENT, PackedPlan, Segment
from recipes.language.models.attention_rule import AttentionRule


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys and values of tokens that prompts share as a prefix.

    Attributes:
        tokens: their ids; none where nothing is shared.
        keys, values: the keys and values, for each layer, float [heads, P, dim].
    """

    tokens: Tokens = ()
    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()

    def begins(self, prompt: Tokens) -> bool:
        """Return whether a prompt starts with the tokens and continues after them."""
        return len(prompt) > len(self.tokens) and prompt[: len(self.tokens)] == self.tokens


class PrefillPlan:
    """Attention of a packed row of prompts that also keeps each layer's keys and values.

    Args:
        plan: the whole row.
        layers: the layers of the model.
        known: what the row begins with, where its keys and values are there already: the forward pass takes the tokens
            after it alone.

    Attributes:
        positions: int64 [1, T], positions of the tokens of the forward pass in their sequences.
        keys, values: the keys and values, for each layer, float [heads, P + T, dim], after the forward pass.
    """

    def __init__(self, plan: PackedPlan, layers: int, known: SharedPrefix | None = None) -> None:
        self._plan = plan
        self._known = known
        self._first = len(known.tokens) if known else 0
        self.positions = plan.positions[:, self._first :]
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = [torch.empty(0)] * layers

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`; B is 1."""
        if self._known is not None:
            keys = torch.cat((self._known.keys[layer][None], keys), dim=2)
            values = torch.cat((self._known.values[layer][None], values), dim=2)
            # What known tokens attend to is of no use any more: any queries serve.
            queries = pad(queries, (0, 0, self._first, 0))
        self.keys[layer], self.values[layer] = keys[0], values[0]
        return self._plan.attend(layer, queries, keys, values, rule)[:, :, self._first :]

    def prefix(self, tokens: Tokens) -> SharedPrefix:
        """Return keys and values of the first tokens of the row, after the forward pass."""
        count = len(tokens)
        return SharedPrefix(
            tokens,
            [key[:, :count].clone() for key in self.keys],
            [value[:, :count].clone() for value in self.values],
        )


@dataclass(frozen=True, slots=True)
class PackedContexts:
    """Distinct contexts as one row of tokens, what all begin with first and once.

    Attributes:
        tokens: the tokens of the row.
        segments: the segments of the row.
        shared: how many tokens all begin with.
        numbers: the number of each context, by its tokens.
    """

    tokens: list[int]
    segments: list[Segment]
    shared: int
    numbers: dict[Tokens, int]

    @classmethod
    def of(cls, contexts: Sequence[Tokens], shared: int) -> PackedContexts:
        """Lay out contexts that all begin with the same `shared` tokens."""
        numbers: dict[Tokens, int] = {}
        for context in contexts:
            numbers.setdefault(context, len(numbers))
        tokens = list(contexts[0][:shared])
        segments = [Segment(0, shared)] if shared else []
        parent = 0 if shared else NO_PARENT
        for context in numbers:
            segments.append(Segment(len(tokens), len(context) - shared, parent))
            tokens += context[shared:]
        return cls(tokens, segments, shared, numbers)

    @property
    def _own(self) -> list[Segment]:
        return self.segments[1:] if self.shared else self.segments

    def last(self) -> list[int]:
        """Return the position of each context's last token in the row."""
        return [segment.start + segment.length - 1 for segment in self._own]

    def positions(self) -> list[Tensor]:
        """Return the positions of each context's tokens in the row, int64 [its length]."""
        begin = torch.arange(self.shared)
        return [
            torch.cat((begin, torch.arange(segment.start, segment.start + segment.length))) for segment in self._own
        ]
