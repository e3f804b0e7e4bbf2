"""What tests of language models share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.loop.generation import AsyncRollouts
from recipes.language.loop.reasoning_runner import ReasoningRunner
from recipes.language.weights import written_model
from recipes.language.weights.written_model import answer
from recipes.language.workers.actor_worker import LanguageActor
from tests.unit.recipes.language.in_threads import LocalTrain, local_train


@pytest.fixture(scope="package", autouse=True)
def _written_models_loaded_here() -> Iterator[None]:
    """Save the seconds that another process takes to import transformers; `test_written_model.py` has one that does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_model, "_answer_of", lambda folder, tokens, seconds: answer(str(folder), tokens))
        yield


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTrain]:
    with local_train(tmp_path / "runs", monkeypatch) as made:
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines go on with answers while the runner waits for them: each checkpoint has some that are under way."""
    step, start = TorchEngine.step, ReasoningRunner.start_workers
    wait, write = AsyncRollouts.wait, ReasoningRunner.write_checkpoint
    waited_for = threading.Event()
    # The attempt that each engine belongs to, and the requests that it holds, by the engine.
    attempts: dict[TorchEngine, int] = {}
    holding: dict[TorchEngine, set[str]] = {}
    attempt = [0]

    def started(runner: ReasoningRunner) -> None:
        attempt[0] += 1
        holding.clear()
        start(runner)

    def drawn(engine: TorchEngine) -> list[Sequence]:
        present = attempts.setdefault(engine, attempt[0]) == attempt[0]
        answers = [answer for answer in engine.unfinished_answers() if answer.request_id.startswith("train:")]
        begun = all(len(answer.tokens) >= 3 for answer in answers)
        if present and answers and begun and not waited_for.is_set():
            holding[engine] = {answer.request_id for answer in answers}
            return []
        holding.pop(engine, None)
        return step(engine)

    def waiting(service: AsyncRollouts) -> list[Any]:
        waited_for.set()
        try:
            return wait(service)
        finally:
            waited_for.clear()

    def written(runner: ReasoningRunner, folder: Path) -> None:
        plan, arrivals = runner._plan, runner._arrivals  # pyright: ignore[reportPrivateUsage]
        while plan.in_flight > sum(map(len, list(holding.values()))):
            arrivals.take(runner._service.poll())  # pyright: ignore[reportPrivateUsage]
        write(runner, folder)

    monkeypatch.setattr(ReasoningRunner, "start_workers", started)
    monkeypatch.setattr(TorchEngine, "step", drawn)
    monkeypatch.setattr(AsyncRollouts, "wait", waiting)
    monkeypatch.setattr(ReasoningRunner, "write_checkpoint", written)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> dict[int, RolloutBatch]:
    """What the actor learned from, by step; of a step that was repeated, the last time."""
    result: dict[int, RolloutBatch] = {}
    receive = LanguageActor.recv_rollout_batch

    def noted(actor: LanguageActor, step: int, *args: Any) -> None:
        receive(actor, step, *args)
        result[step] = actor._batch  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(LanguageActor, "recv_rollout_batch", noted)
    return result
