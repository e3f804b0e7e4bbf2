"""The engine of a rehearsal: it draws nothing, and its answers are as long as a run recorded.

Its steps take their time as all timed calls of a process that rehearses, see `pacing`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Final

import torch
from torch import Tensor

from recipes.language.answers.sequences import Request
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.engines.engine import ArrivingTensors, Engine, EngineStats, PauseMode
from recipes.language.models.fingerprint import Fingerprint
from rlinf_core.process import pacing
from rlinf_core.worker.timer import timer

# The phase of a record that has tokens of answers, and that of an engine's steps, which callers of `step` time.
_ANSWER: Final = "answer"
_STEP: Final = "engine/step"


class _Row:
    """An answer under way: its request, its number within the group, its tokens in the end, and their versions."""

    __slots__ = ("length", "request", "sample", "versions")

    def __init__(self, request: Request, sample: int, length: int) -> None:
        self.request, self.sample, self.length = request, sample, length
        self.versions: list[int] = []


class StandInEngine(Engine):
    """An engine whose answers repeat their prompts, and are as long as recorded.

    Args:
        whole: whether an answer has all tokens that it may have: its length is chosen by who asks.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._rows: list[_Row] = []
        self._paused = False
        self._version = self._generated = 0
        self._weights: dict[str, Tensor] = {}

    def submit(self, request: Request) -> None:
        most = request.params.max_new_tokens
        for sample in range(request.sample_offset, request.sample_offset + request.group_size):
            length = most if self._whole else _drawn(f"{request.request_id}:{request.params.seed}:{sample}", most)
            self._rows.append(_Row(request, sample, length))

    def step(self) -> list[Answer]:
        if self._paused:
            return []
        self._generated += len(self._rows)
        for row in self._rows:
            row.versions.append(self._version)
        ended = [_answer(row) for row in self._rows if len(row.versions) >= row.length]
        self._rows = [row for row in self._rows if len(row.versions) < row.length]
        return ended

    @property
    def unfinished(self) -> int:
        return len(self._rows)

    def pause(self, mode: PauseMode) -> list[Answer]:
        done: list[Answer] = []
        while mode == "drain" and self._rows:
            with timer(_STEP, len(self._rows)):
                done += self.step()
        if mode == "abort":
            done, self._rows = [_answer(row, aborted=True) for row in self._rows], []
        self._paused = True
        return done

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`: any weights are taken, and read as an engine reads them."""
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

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._rows),
            waiting=0,
            reserved_tokens=0,
            max_running_tokens=0,
            generated_tokens=self._generated,
            prefilled_tokens=0,
            prompt_tokens=0,
            cache_bytes=0,
            version=self._version,
        )

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


def _answer(row: _Row, *, aborted: bool = False) -> Answer:
    drawn = len(row.versions)
    return Answer(
        request_id=row.request.request_id,
        sample=row.sample,
        prompt=row.request.prompt,
        tokens=tuple(islice(cycle(row.request.prompt), drawn)),
        logprobs=(-1.0,) * drawn,
        versions=tuple(row.versions),
        finish_reason="aborted" if aborted else "length",
        metadata=row.request.metadata,
    )
