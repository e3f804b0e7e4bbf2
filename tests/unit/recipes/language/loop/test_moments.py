"""Asynchronous runs that are killed at any moment: no prompt is lost, and none is trained on twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.loop.arrivals import Arrivals
from recipes.language.loop.generation import AsyncRollouts
from recipes.language.loop.reasoning_runner import ReasoningRunner
from recipes.language.workers.actor_worker import LanguageActor
from rlinf_core.runners import events
from tests.unit.recipes.language.in_threads import LocalTrain, local_train

# Twenty groups, in four steps; a checkpoint after each of them, while answers of two later steps are under way.
AHEAD = (
    "runner.max_staleness=2",
    "runner.save_interval=1",
    "runner.max_steps=4",
    "rollout.sampling_params.max_new_tokens=16",
    "rollout.sampling_params.min_new_tokens=12",
    "runner.seq_length=48",
)
# Tokens that engines draw of answers which nobody waits for, before they wait for a checkpoint.
AHEAD_OF_TIME = 3
MOMENTS = range(1, 21)
EVERY_DAY = (4, 11, 17)

# The prompts that the actor learned from, one for each answer, by step; of a step that was repeated, the last time.
Trained = dict[int, Counter[tuple[int, ...]]]
# Those of a run that nothing happened to, made once.
UNDISTURBED: Trained = {}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTrain]:
    with local_train(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    result: Trained = {}
    receive = LanguageActor.recv_rollout_batch

    def noted(actor: LanguageActor, step: int, *args: Any) -> None:
        receive(actor, step, *args)
        batch: Any = actor._batch  # pyright: ignore[reportPrivateUsage]
        sequences = batch.tokens.split(batch.lengths.tolist())
        sizes = batch.prompt_lengths.tolist()
        result[step] = Counter(tuple(sequence[:size].tolist()) for sequence, size in zip(sequences, sizes, strict=True))

    monkeypatch.setattr(LanguageActor, "recv_rollout_batch", noted)
    return result


@pytest.fixture(autouse=True)
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

    def drawn(engine: TorchEngine) -> list[Answer]:
        present = attempts.setdefault(engine, attempt[0]) == attempt[0]
        answers = [answer for answer in engine.unfinished_answers() if answer.request_id.startswith("train:")]
        begun = all(len(answer.tokens) >= AHEAD_OF_TIME for answer in answers)
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


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Have a worker die when that many scored groups have come to the runner."""
    running: list[ReasoningRunner] = []
    start, take = ReasoningRunner.start_workers, Arrivals.take
    left = [moment]

    def started(runner: ReasoningRunner) -> None:
        running.append(runner)
        start(runner)

    def taken(arrivals: Arrivals, groups: Sequence[Any]) -> None:
        take(arrivals, groups)
        left[0] -= len(groups)
        if left[0] <= 0 < left[0] + len(groups):
            group: Any = running[-1].groups[("rollout", "reward", "actor")[moment % 3]]
            group.die()

    monkeypatch.setattr(ReasoningRunner, "start_workers", started)
    monkeypatch.setattr(Arrivals, "take", taken)


@pytest.mark.parametrize(
    "moment", [moment if moment in EVERY_DAY else pytest.param(moment, marks=pytest.mark.nightly) for moment in MOMENTS]
)
def test_a_run_that_is_killed_trains_on_each_prompt_once(
    train: LocalTrain, trained: Trained, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    if not UNDISTURBED:
        train(*AHEAD, rollouts=2)
        UNDISTURBED.update(trained)
        trained.clear()
    kill_at(monkeypatch, moment)

    run = train(*AHEAD, rollouts=2)

    assert [type(event) for event in run.events].count(events.RunRestarted) == 1
    assert [record.step for record in run.metrics] == [1, 2, 3, 4]
    assert trained == UNDISTURBED
    # What the run told of the checkpoint is all that had been set aside by then, and was not trained on.
    for event in run.events:
        if isinstance(event, events.ItemsResumed):
            named = [name for names in event.fates.values() for name in names]
            assert len(set(named)) == len(named) == min(2, 4 - event.step) * 5
