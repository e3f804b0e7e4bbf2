"""The engine of a rehearsal, which samples nothing: its answers are as long as a run recorded.

`pacing` gives its steps their duration, as for all timed calls in a rehearsal.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.sequences import FinishReason, Request
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.engines.engine import ArrivingTensors, PauseMode
from recipes.language.engines.request_queue import Answer as QueuedAnswer
from recipes.language.engines.request_queue import QueuedEngine, RequestQueue
from recipes.language.models.fingerprint import Fingerprint
from rlinf_core.process import pacing
from rlinf_core.worker.timer import timer

# The recorded phase of answer lengths, and that of engine steps, which callers of `step` time.
_ANSWER: Final = "answer"
_STEP: Final = "engine/step"


class _Row(NamedTuple):
    """A running answer: its final length, and the versions of its tokens so far."""

    answer: QueuedAnswer
    length: int
    versions: list[int]

    def drawn(self, reason: FinishReason = "length") -> Answer:
        """Return the answer in the form that callers get."""
        count = len(self.versions)
        tokens = tuple(islice(cycle(self.answer.request.prompt), count))
        return self.answer.sequence(tokens, (-1.0,) * count, tuple(self.versions), reason)


class StandInEngine(QueuedEngine):
    """An engine whose answers repeat their prompts and are as long as recorded.

    Args:
        whole: whether every answer has `max_new_tokens`, so that the caller chooses its length.
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__(RequestQueue(stops_at_texts=True), 0)
        self._whole = whole
        self._rows: list[_Row] = []
        self._weights: dict[str, Tensor] = {}

    @property
    def _in_flight(self) -> int:
        return len(self._rows)

    @property
    def _reserved(self) -> int:
        return 0

    def submit(self, request: Request) -> None:
        super().submit(request)
        most = request.params.max_new_tokens
        while self._queue:
            answer = self._queue.pop()
            seed = f"{request.request_id}:{request.params.seed}:{answer.sample}"
            self._rows.append(_Row(answer, most if self._whole else _drawn(seed, most), []))

    def step(self) -> list[Answer]:
        if self._paused:
            return []
        self._generated += len(self._rows)
        for row in self._rows:
            row.versions.append(self._version)
        ended = [row.drawn() for row in self._rows if len(row.versions) >= row.length]
        self._rows = [row for row in self._rows if len(row.versions) < row.length]
        return ended

    def pause(self, mode: PauseMode) -> list[Answer]:
        done: list[Answer] = []
        while mode == "drain" and self._rows:
            with timer(_STEP, len(self._rows)):
                done += self.step()
        if mode == "abort":
            done, self._rows = [row.drawn("aborted") for row in self._rows], []
        self._paused = True
        return done

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`: accept any weights, and read them as an engine does."""
        digest = Fingerprint()
        keeps = isinstance(tensors, ArrivingTensors) and tensors.may_keep
        for name, value in tensors:
            own = self._weights.get(name)
            if keeps or own is None:
                own = self._weights[name] = value if keeps else torch.empty_like(value)
            if own is not value:
                own.copy_(value)
            digest.add(name, own)
        self._version = version
        return digest.text()

    def sleep(self, level: int = 1) -> None:
        if level > 1:
            self._weights.clear()

    def wake(self) -> None:
        """See `Engine`."""

    def stop(self) -> None:
        self._rows.clear()
        self._weights.clear()


def _drawn(seed: str, most: int) -> int:
    sizes = pacing.recorded(_ANSWER)
    if not sizes:
        return most
    lengths, numbers = zip(*sizes, strict=True)
    (length,) = random.Random(seed).choices(lengths, numbers)
    return max(1, min(most, round(length)))
