"""The loop of language models in processes that rehearse: messages of the true size, and no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes.language.advice.language_flow import ANSWER, STEP, LanguageFlow
from recipes.language.answers.sequences import Request
from recipes.language.engines.stand_in_engine import StandInEngine
from recipes.language.models.load_model import make_model, make_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.language.models.stand_in_policy import StandInLanguagePolicy
from rlinf_core.job.load import load_job
from rlinf_core.process import pacing
from rlinf_core.process.pacing import Pace, PacedCalls, Pacing
from tests.unit.recipes.language.in_threads import LocalTrain, local_train

WORDS = tuple(LanguageFlow(load_job("math_laptop").config).rehearsal())  # type: ignore[arg-type]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTrain]:
    with local_train(tmp_path, monkeypatch) as made:
        yield made


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_moves_recorded_answers_and_zeros(
    train: LocalTrain, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    def computes(*_: Any, **__: Any) -> Any:
        raise AssertionError("a rehearsal computes nothing")

    monkeypatch.setattr(LanguagePolicy, "forward", computes)
    monkeypatch.setattr("recipes.language.engines.own.torch_engine.TorchEngine", computes)
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({}, {ANSWER: ((2.0, 1), (3.0, 3))})))
    run = train(*WORDS, "runner.save_interval=-1", f"runner.max_staleness={ahead}", rollouts=2, rewards=2)
    assert run.steps == [1, 2, 3, 4]
    assert all(2.0 < metrics.metrics["rollout/response_length"] < 3.0 for metrics in run.metrics)
    # All answers are learned from, so that an update has as many tokens as were drawn.
    assert all(metrics.metrics["train/actor/learned_fraction"] == 1.0 for metrics in run.metrics)
    group: Any = run.runner.groups["actor"]
    (actor,) = group.workers
    policy = actor._state.policy
    assert isinstance(policy, StandInLanguagePolicy)
    section: Any = actor._config.actor
    true = make_model(section, make_tokenizer(section)).state_dict()
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in policy.model.state_dict().items()}
    assert kinds == {name: (tensor.shape, tensor.dtype) for name, tensor in true.items()}
    assert not any(bool(weight.any()) for weight in policy.model.parameters())
    assert bool(torch.isfinite(policy.base).all())


def test_answers_end_before_new_weights_in_recorded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rlinf_core.process.pacing.time.sleep", slept.append)
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({STEP: Pace(60.0, 10.0)}, {ANSWER: ((3.0, 1),)})))
    engine = StandInEngine()
    engine.submit(Request(request_id="a", prompt=(5, 6), group_size=2))
    assert len(engine.pause("drain")) == 2
    assert [round(seconds, -1) for seconds in slept] == [80.0, 80.0, 80.0]
