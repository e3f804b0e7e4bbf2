"""Sequences laid into packed rows for a forward pass, shared prompts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.models.attention import NO_PARENT, PackedPlan, Segment
from recipes.training.typed_tensors import integers

# Fewer common tokens than this are not worth their own segment.
MIN_SHARED = 8


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of tokens that holds many sequences.

    Attributes:
        tokens: int64 [1, T].
        plan: attention within the sequences; has the positions.
        predictors: int64 [A], the position in the row whose output predicts each answer token, answer by answer.
        targets: int64 [A], the answer tokens.
    """

    tokens: Tensor
    plan: PackedPlan
    predictors: Tensor
    targets: Tensor


def pack(batch: RolloutBatch, *, share_prompts: bool = True, device: torch.device | str = "cpu") -> PackedRow:
    """Lay a batch into one row.

    Args:
        batch: the sequences, in whatever order.
        share_prompts: whether tokens stand once that several sequences begin with: those of all prompts, and each
            prompt that has several answers. Losses and gradients are the same either way.
        device: the device of the result.
    """
    tokens = integers(batch.tokens)
    rows: list[_Sequence] = []
    start = 0
    for length, prompt in zip(integers(batch.lengths), integers(batch.prompt_lengths), strict=True):
        first, end = start + prompt, start + length
        rows.append(_Sequence(tuple(tokens[start:first]), tuple(tokens[first:end])))
        start = end
    writer = _Row()
    if share_prompts:
        _shared(rows, writer)
    else:
        for number, (prompt, answer) in enumerate(rows):
            writer.predict(number, answer, writer.add(prompt + answer[:-1], NO_PARENT), len(prompt) - 1)
    return writer.row(device)


def packed_tokens(batch: RolloutBatch, rows: Sequence[int], *, share_prompts: bool) -> int:
    """Return about how many tokens some answers of one group take in a row.

    Segments of a trajectory begin with prompts of different lengths; those that are as long are taken for equal.
    """
    lengths, prompts = integers(batch.lengths), integers(batch.prompt_lengths)
    if not share_prompts:
        return sum(lengths[row] for row in rows)
    return sum({prompts[row] for row in rows}) + sum(lengths[row] - prompts[row] for row in rows)


class _Sequence(NamedTuple):
    """The tokens of a sequence of a batch."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class _Row:
    """A packed row that is being written."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.segments: list[Segment] = []
        self._answers: dict[int, tuple[list[int], tuple[int, ...]]] = {}

    def add(self, tokens: Sequence[int], parent: int) -> int:
        """Append a segment, and return its number; one without tokens is its parent."""
        if not tokens:
            return parent
        self.segments.append(Segment(len(self.tokens), len(tokens), parent))
        self.tokens += tokens
        return len(self.segments) - 1

    def predict(self, number: int, answer: tuple[int, ...], segment: int, first: int) -> None:
        """Note that `answer` is predicted from offset `first` of a segment on."""
        start = self.segments[segment].start + first
        self._answers[number] = (list(range(start, start + len(answer))), answer)

    def predict_after(self, number: int, answer: tuple[int, ...], last: int, segment: int) -> None:
        """Record that position `last` of the row predicts `answer`, and a segment of all but its last token does."""
        positions = [last]
        if len(answer) > 1:
            start = self.segments[segment].start
            positions += range(start, start + len(answer) - 1)
        self._answers[number] = (positions[: len(answer)], answer)

    def row(self, device: torch.device | str) -> PackedRow:
        """Return the row."""
        predictors = [position for number in sorted(self._answers) for position in self._answers[number][0]]
        targets = [token for number in sorted(self._answers) for token in self._answers[number][1]]
        return PackedRow(
            torch.tensor([self.tokens], device=device),
            PackedPlan(self.segments, device),
            torch.tensor(predictors, dtype=torch.int64, device=device),
            torch.tensor(targets, dtype=torch.int64, device=device),
        )


def _shared(rows: Sequence[_Sequence], writer: _Row) -> None:
    """Pack sequences as a tree: the common prefix of all prompts, then each prompt, then its answers."""
    members: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        members.setdefault(row.prompt, []).append(number)
    common = common_prefix(list(members))
    root = writer.add(rows[0].prompt[:common], NO_PARENT) if common else NO_PARENT
    for prompt, numbers in members.items():
        own = prompt[common:]
        if len(numbers) == 1:
            answer = rows[numbers[0]].answer
            writer.predict(numbers[0], answer, writer.add(own + answer[:-1], root), len(own) - 1)
            continue
        stem = writer.add(own, root)
        last = writer.segments[stem].start + len(own) - 1
        for number in numbers:
            answer = rows[number].answer
            writer.predict_after(number, answer, last, writer.add(answer[:-1], stem))


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the length of several prompts' common prefix, if worth sharing; each keeps its own token."""
    if len(prompts) < 2:
        return 0
    low, high = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    common = 0
    while common < limit and low[common] == high[common]:
        common += 1
    return common if common >= MIN_SHARED else 0
