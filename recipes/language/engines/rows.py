"""The state of running answers, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recipes.language.answers.sequences import FinishReason, SamplingParams, Sequence
from recipes.language.engines.engine import NOT_FINITE, Answer, StopTexts
from recipes.language.engines.sampling import prompt_key, stream_key, uniforms
from recipes.training.typed_tensors import integers

# The number of tokens whose random numbers are drawn at once.
_AHEAD = 16


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of the next token of each row; all [n]."""

    uniform: Tensor
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None


@dataclass(frozen=True, slots=True)
class _Row:
    """An answer with all tokens that end it."""

    answer: Answer
    stops: frozenset[int]

    @property
    def params(self) -> SamplingParams:
        return self.answer.request.params


class Rows:
    """The sampling parameters and tokens of running answers.

    Args:
        device: the device of the tensors.
        stop_token_ids: tokens that end every answer.
        decode: returns the text of token ids, for answers that stop at a text.
    """

    def __init__(
        self,
        device: torch.device,
        stop_token_ids: frozenset[int],
        decode: Callable[[SequenceABC[int]], str] | None,
    ) -> None:
        self._device = device
        self._stops = stop_token_ids
        self._stop_texts = None if decode is None else StopTexts(decode)
        self._rows: list[_Row] = []
        self._alive = torch.empty(0, dtype=torch.bool)
        self._running = 0
        self._numbers = torch.empty(3, 0, dtype=torch.int64, device=device)  # key of the draws, drawn, top_k
        self._shares = torch.empty(2, 0, device=device)  # temperature, top_p
        self._limits = torch.empty(0, dtype=torch.int64, device=device)
        self._tokens = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.empty(0, 0, device=device)
        self._versions = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=device)
        self._early = self._truncated = self._texts = self._tempered = False
        # Random numbers for the next tokens, [n, _AHEAD], and how many of these columns are used.
        self._uniforms = torch.empty(0, 0, dtype=torch.float64, device=device)
        self._used = 0

    @property
    def count(self) -> int:
        """Number of rows, including ended rows that were not dropped yet."""
        return len(self._rows)

    @property
    def running(self) -> int:
        """Number of answers that have not ended."""
        return self._running

    @property
    def ended(self) -> int:
        """Number of ended rows to drop."""
        return self.count - self._running

    def alive(self) -> list[int]:
        """Return the numbers of rows that have not ended."""
        return integers(self._alive.nonzero()[:, 0])

    @property
    def newest(self) -> Tensor:
        """The last token of each row, int64 [n]."""
        return self._tokens.gather(1, (self._numbers[1] - 1)[:, None])[:, 0]

    def add(self, answers: SequenceABC[Answer]) -> None:
        """Append a row for each answer."""
        numbers: list[list[int]] = [[], [], []]
        shares: list[list[float]] = [[], []]
        limits: list[int] = []
        # Answers to one prompt share these, so they are made once.
        keys: dict[int, tuple[int, frozenset[int]]] = {}
        first = self.count
        for answer in answers:
            request, params = answer.request, answer.request.params
            if id(request) not in keys:
                stops = self._stops | frozenset(params.stop_token_ids)
                keys[id(request)] = prompt_key(params.seed, request.prompt), stops
            key, stops = keys[id(request)]
            own = stream_key(key, answer.sample), len(request.begun.tokens), params.top_k
            for column, value in zip(numbers, own, strict=True):
                column.append(value)
            shares[0].append(params.temperature)
            shares[1].append(params.top_p)
            limits.append(params.max_new_tokens)
            self._rows.append(_Row(answer, stops))
        self._numbers = torch.cat((self._numbers, torch.tensor(numbers, device=self._device)), dim=1)
        self._shares = torch.cat((self._shares, torch.tensor(shares, device=self._device)), dim=1)
        self._limits = torch.cat((self._limits, torch.tensor(limits, device=self._device)))
        self._alive = torch.cat((self._alive, torch.ones(len(limits), dtype=torch.bool)))
        self._running += len(limits)
        width = max(*limits, self._tokens.shape[1])
        self._tokens = _grown(self._tokens, self.count, width)
        self._logprobs = _grown(self._logprobs, self.count, width)
        self._versions = _grown(self._versions, self.count, width)
        for row, answer in enumerate(answers, first):
            begun = answer.request.begun
            if count := len(begun.tokens):
                self._tokens[row, :count] = torch.tensor(begun.tokens, device=self._device)
                self._logprobs[row, :count] = torch.tensor(begun.logprobs, device=self._device)
                self._versions[row, :count] = torch.tensor(begun.versions, device=self._device)
        self._look_at_params()

    def _look_at_params(self) -> None:
        every = [row.params for row in self._rows]
        self._early = any(params.min_new_tokens for params in every)
        self._truncated = any(params.top_k >= 0 or params.top_p < 1 for params in every)
        self._tempered = any(params.temperature != 1 for params in every)
        self._uniforms = self._uniforms[:0]
        self._texts = any(params.stop for params in every)
        extra = {token for row in self._rows for token in row.stops}
        self._stop_ids = torch.tensor(sorted(extra), dtype=torch.int64, device=self._device)

    def settings(self, first: int) -> RowSettings:
        """Return the sampling settings of the next tokens of the rows from `first` on."""
        truncated = self._truncated
        return RowSettings(
            self._next_uniforms(first),
            self._shares[0, first:] if self._tempered else None,
            self._numbers[2, first:] if truncated else None,
            self._shares[1, first:] if truncated else None,
        )

    def _next_uniforms(self, first: int) -> Tensor:
        """Return the random numbers for the next tokens of the rows from `first` on, float64 [n]."""
        keys, drawn = self._numbers[0, first:], self._numbers[1, first:]
        if first:
            return uniforms(keys, drawn)
        if not len(self._uniforms) or self._used == _AHEAD:
            # Draw for many tokens at once: a single token would take a dozen small operations.
            ahead = drawn[:, None] + torch.arange(_AHEAD, device=self._device)
            numbers = uniforms(keys[:, None].expand_as(ahead).reshape(-1), ahead.reshape(-1))
            self._uniforms, self._used = numbers.view(-1, _AHEAD), 0
        self._used += 1
        return self._uniforms[:, self._used - 1]

    def too_early(self, logits: Tensor, first: int) -> Tensor | None:
        """Return the mask of tokens that would end an answer too early, bool like `logits` [n, V]; None: no token
        would."""
        if not self._early:
            return None
        drawn = integers(self._numbers[1, first:])
        banned = torch.zeros_like(logits, dtype=torch.bool)
        for index, (row, count) in enumerate(zip(self._rows[first:], drawn, strict=True)):
            if count + 1 < row.params.min_new_tokens:
                banned[index, list(row.stops)] = True
        return banned

    def put(self, tokens: Tensor, logprobs: Tensor, version: int, first: int) -> list[Sequence]:
        """Append a token to each row from `first` on, and return the answers that end with it."""
        rows = slice(first, self.count)
        drawn = self._numbers[1, rows]
        # A finished row keeps sampling until it is dropped; its tokens overwrite the last one and are never read.
        at = torch.minimum(drawn, self._limits[rows] - 1)[:, None]
        self._tokens[rows].scatter_(1, at, tokens[:, None])
        self._logprobs[rows].scatter_(1, at, logprobs[:, None])
        self._versions[rows].scatter_(1, at, version)
        drawn += 1
        failed = ~logprobs.isfinite()
        over = torch.isin(tokens, self._stop_ids) | (drawn >= self._limits[rows]) | failed
        over = over.cpu() & self._alive[rows]
        candidates = integers(over.nonzero()[:, 0])
        if self._texts:
            may_end = self._may_end(integers(tokens), first)
            candidates = sorted({*candidates, *(index for index in may_end if self._alive[first + index])})
        drawn.clamp_(max=self._limits[rows])
        if not candidates:
            return []
        lost = [first + index for index in integers((failed.cpu() & over).nonzero()[:, 0])]
        ended = self._ended([first + index for index in candidates if first + index not in lost])
        self._alive[[*ended, *lost]] = False
        self._running -= len(ended) + len(lost)
        return self._sequences(ended) + [self._rows[row].answer.sequence(failure=NOT_FINITE) for row in lost]

    def _ended(self, candidates: list[int]) -> dict[int, FinishReason]:
        """Return the finish reason of each row that has ended, by row number."""
        reasons: dict[int, FinishReason] = {}
        for row, tokens in zip(candidates, self._drawn(self._tokens, candidates), strict=True):
            reason = self._reason(row, tokens)
            if reason is not None:
                reasons[row] = reason
        return reasons

    def _drawn(self, values: Tensor, rows: list[int]) -> list[list[Any]]:
        """Return the values of all tokens of `rows`, from a tensor [all rows, longest answer]."""
        counts = integers(self._numbers[1, rows])
        laid = cast("list[list[Any]]", values[rows, : max(counts, default=0)].tolist())
        return [row[:count] for row, count in zip(laid, counts, strict=True)]

    def _may_end(self, newest: list[int], first: int) -> list[int]:
        """Return the rows that may have reached a stop text, counted from `first`."""
        texts = self._stop_texts
        if texts is None:
            return []
        stops = [row.params.stop for row in self._rows[first:]]
        return [i for i, stop in enumerate(stops) if stop and texts.may_end(newest[i], stop)]

    def _reason(self, row: int, tokens: list[int]) -> FinishReason | None:
        """Return the finish reason of a row with these tokens; None if it has not ended."""
        state = self._rows[row]
        params = state.params
        if tokens[-1] in state.stops and len(tokens) >= params.min_new_tokens:
            return "stop"
        texts = self._stop_texts if params.stop and len(tokens) >= params.min_new_tokens else None
        if texts is not None and texts.ended(tokens, params.stop):
            return "stop"
        return "length" if len(tokens) >= params.max_new_tokens else None

    def _sequences(self, reasons: Mapping[int, FinishReason]) -> list[Sequence]:
        """Return the answers of rows that ended for these reasons."""
        rows = list(reasons)
        if not rows:
            return []
        columns = (self._drawn(values, rows) for values in (self._tokens, self._logprobs, self._versions))
        return [
            self._rows[row].answer.sequence(
                tuple(tokens),
                tuple(logprobs),
                tuple(versions),
                reasons[row],
            )
            for row, tokens, logprobs, versions in zip(rows, *columns, strict=True)
        ]

    def abort(self) -> list[Sequence]:
        """Stop all running answers, and return them unfinished."""
        aborted = self.unfinished()
        self._alive[:] = False
        self._running = 0
        return aborted

    def unfinished(self) -> list[Sequence]:
        """Return copies of all running answers, which continue."""
        return self._sequences(dict.fromkeys(self.alive(), "aborted"))

    def leave_out_ended(self) -> Tensor:
        """Drop ended rows, and return the former numbers of the others, int64 [n] on the CPU."""
        kept = numbers = self._alive.nonzero()[:, 0]
        self._rows = [self._rows[row] for row in integers(kept)]
        self._alive = self._alive[kept]
        kept = kept.to(self._device)
        self._numbers = self._numbers[:, kept]
        self._shares = self._shares[:, kept]
        self._limits = self._limits[kept]
        self._tokens = self._tokens[kept]
        self._logprobs = self._logprobs[kept]
        self._versions = self._versions[kept]
        self._look_at_params()
        return numbers


def _grown(tensor: Tensor, rows: int, columns: int) -> Tensor:
    new = tensor.new_zeros(rows, columns)
    new[: tensor.shape[0], : tensor.shape[1]] = tensor
    return new
