"""Rollout workers that receive weights: when an engine may go on with the memory that they came in."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("transformers")

from recipes.language.config.group_names import LanguageLayout
from recipes.language.weights.weight_transfer import IncomingWeights
from recipes.language.workers.rollout_worker import LanguageRolloutWorker
from recipes.math.config import MathConfig
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, in_thread


@pytest.mark.parametrize(("actors", "rollouts", "expected"), [(1, 1, True), (2, 2, True), (1, 2, False), (2, 3, False)])
def test_weights_are_kept_where_nobody_else_receives_them(
    monkeypatch: pytest.MonkeyPatch, actors: int, rollouts: int, expected: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(IncomingWeights, "__init__", lambda self, receive, *, may_keep: asked.append(may_keep))
    config = cast("MathConfig", load_job("math_laptop", environ={}).config)
    worker = in_thread(LanguageRolloutWorker, config.rollout.group_name, Hub(), 0, rollouts)(config)
    worker.init_worker(LanguageLayout(actors, rollouts, 1, "answers", "scored", 0, 0))

    worker._receive()

    assert asked == [expected]
