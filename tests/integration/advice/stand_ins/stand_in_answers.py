"""An engine that draws no tokens, and learners that learn slowly: answers have lengths with a long tail."""

from __future__ import annotations

import random
import zlib
from math import exp
from statistics import NormalDist
from typing import Any, Final

from stand_in_devices import settings, work

# Logarithms of the tokens of an answer.
_LENGTHS: Final = NormalDist(2.9, 0.7)
# Multiples of it fill an interval evenly.
_GOLDEN: Final = 0.6180339887


def _lengths(seed: int, first: int, number: int, most: int) -> list[int]:
    """Return lengths of answers to a request: log-normal, cut.

    They are the same for the same request. Those of a group are spread over the distribution: a step has about as many
    tokens as any other.
    """
    quantiles = ((seed / 2**32 + sample * _GOLDEN) % 1.0 for sample in range(first, first + number))
    most = min(most, settings()["longest"])
    return [max(2, min(most, int(exp(_LENGTHS.inv_cdf(min(max(at, 1e-3), 1 - 1e-3)))))) for at in quantiles]


def draw_by_sleep(module: Any) -> None:
    """Have the product's own engine sleep for a step of all running answers, instead of drawing."""
    engine, sequence = module.TorchEngine, module.Sequence
    begin = engine.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._rows = []

    def submit(self: Any, request: Any) -> None:
        # Names of requests differ from run to run.
        # Turns of a conversation differ, as their contexts grow.
        seed = zlib.crc32(repr((request.prompt[:8], len(request.prompt), request.params.seed)).encode())
        first, most = request.sample_offset, request.params.max_new_tokens
        for sample, length in enumerate(_lengths(seed, first, request.group_size, most), first):
            self._rows.append((request, sample, length, []))

    def step(self: Any) -> list[Any]:
        if not self._rows or self._paused:
            return []
        work("draw", len(self._rows))
        for row in self._rows:
            row[3].append(self._version)
        ended = [row for row in self._rows if len(row[3]) >= row[2]]
        self._rows = [row for row in self._rows if len(row[3]) < row[2]]
        return [_answer(sequence, *row) for row in ended]

    def pause(self: Any, mode: str) -> list[Any]:
        done: list[Any] = []
        while mode == "drain" and self._rows:
            done += step(self)
        self._paused = True
        return done

    engine.__init__, engine.submit, engine.step, engine.pause = init, submit, step, pause
    engine.unfinished = property(lambda self: len(self._rows))
    engine.unfinished_answers = lambda self: []
    engine.continues = False


def _answer(sequence: Any, request: Any, sample: int, length: int, versions: list[int]) -> Any:
    return sequence(
        request_id=request.request_id,
        sample=sample,
        prompt=request.prompt,
        tokens=tuple(random.randrange(3, 9) for _ in versions),
        logprobs=(-2.0,) * len(versions),
        versions=tuple(versions),
        finish_reason="stop",
        metadata=request.metadata,
    )


def learn_by_sleep(module: Any) -> None:
    """Have the learner sleep by the tokens of each micro-batch besides."""
    learner = module.LanguageLearner
    loss_of = learner._loss_of

    def slow(self: Any, row: Any, lengths: Any, targets: Any, totals: Any) -> Any:
        work("learn", int(lengths.sum()))
        return loss_of(self, row, lengths, targets, totals)

    learner._loss_of = slow


def update_by_sleep(module: Any) -> None:
    """Have an update off-policy sleep by the rows of its batch besides."""
    algorithm = module.OffPolicyAlgorithm
    update = algorithm.update

    def slow(self: Any, batch: Any, *settings: Any) -> None:
        work("update", len(batch.rewards))
        update(self, batch, *settings)

    algorithm.update = slow
