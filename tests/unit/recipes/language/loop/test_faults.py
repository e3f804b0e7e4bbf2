"""Failures of machinery are no samples: engines, servers, functions that score, and the processes that they run in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, tensor

pytest.importorskip("transformers")

from recipes.language.answers.answer_batch import RolloutBatch, ScoredAnswers
from recipes.language.answers.sequences import Request, Sequence
from recipes.language.config.rollout_config import ServerSettings
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.engines.server_engine import ServerEngine
from recipes.language.rewards.scoring import Item, Scorer
from rlinf_core import RLinfError
from rlinf_core.errors import RunError
from tests.unit.recipes.language.engines.contract import END, contract_model, greedy, run
from tests.unit.recipes.language.engines.fake_server import FakeServer, fake_server
from tests.unit.recipes.language.in_threads import LocalTrain, local_train

WHY = "the engine has lost its memory"
JUDGES = "tests.unit.recipes.language.loop.faulty_judges"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTrain]:
    with local_train(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """The answers that actors are given to learn from."""
    answers: list[Sequence] = []
    of_groups = RolloutBatch.of_groups

    def noted(groups: list[ScoredAnswers]) -> RolloutBatch:
        answers.extend(answer for group in groups for answer in group.answers)
        return of_groups(groups)

    monkeypatch.setattr(RolloutBatch, "of_groups", noted)
    return answers


def failing(monkeypatch: pytest.MonkeyPatch, share: int, tries: int = 2) -> None:
    """Let the engine fail the answers of every `share`-th number, as often as `tries`."""
    step, failed = TorchEngine.step, dict[tuple[Any, ...], int]()

    def faulty(engine: TorchEngine) -> list[Sequence]:
        answers: list[Sequence] = []
        for answer in step(engine):
            key = (answer.request_id, answer.sample, answer.prompt)
            if answer.sample % share == 0 and failed.setdefault(key, 0) < tries:
                failed[key] += 1
                answer = replace(answer, finish_reason="aborted", failure=WHY)
            answers.append(answer)
        return answers

    monkeypatch.setattr(TorchEngine, "step", faulty)


def spoiling(monkeypatch: pytest.MonkeyPatch, bad: float, samples: set[int]) -> None:
    """Give the answers of these numbers logits that are not finite."""
    draw = TorchEngine._draw

    def faulty(engine: TorchEngine, logits: Tensor, first: int) -> list[Sequence]:
        asked = [row.answer for row in engine._rows._rows[first:]]
        # The first comparisons of a run have other requests.
        spoiled = [one.request.request_id.startswith("train:") and one.sample in samples for one in asked]
        logits = logits.masked_fill(tensor(spoiled)[:, None], bad)
        return draw(engine, logits, first)

    monkeypatch.setattr(TorchEngine, "_draw", faulty)


class TestEngines:
    def test_an_answer_is_drawn_again(
        self, train: LocalTrain, monkeypatch: pytest.MonkeyPatch, learned: list[Sequence]
    ) -> None:
        failing(monkeypatch, 3, tries=1)
        metrics = train("runner.max_steps=2").metrics
        assert all("failed/engine" not in record.metrics for record in metrics)
        assert {answer.failure for answer in learned} == {""}

    def test_one_that_fails_again_is_left_out_and_counted(
        self, train: LocalTrain, monkeypatch: pytest.MonkeyPatch, learned: list[Sequence]
    ) -> None:
        failing(monkeypatch, 3)
        metrics = train("runner.max_steps=2").metrics
        # One of the three answers to each of five prompts.
        assert [record.metrics["failed/engine"] for record in metrics] == [5.0, 5.0]
        shown = [answer for answer in learned if answer.request_id]
        assert {answer.sample for answer in shown} == {1, 2}
        assert len(shown) == 2 * 2 * 5

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_row_without_probabilities_is_left_out(
        self, train: LocalTrain, monkeypatch: pytest.MonkeyPatch, learned: list[Sequence], bad: float
    ) -> None:
        spoiling(monkeypatch, bad, {1})
        metrics = train("runner.max_steps=2").metrics
        assert [record.metrics["failed/engine"] for record in metrics] == [5.0, 5.0]
        assert {answer.sample for answer in learned if answer.request_id} == {0, 2}
        assert all(math.isfinite(value) for record in metrics for value in record.metrics.values())

    def test_a_run_none_of_whose_rows_has_probabilities_ends(
        self, train: LocalTrain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spoiling(monkeypatch, math.nan, {0, 1, 2})
        with pytest.raises(RunError, match="answers of step 1 failed: engine") as caught:
            train("runner.max_steps=2")
        assert "not finite numbers" in str(caught.value)

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_a_run_whose_answers_all_fail_ends(
        self, train: LocalTrain, monkeypatch: pytest.MonkeyPatch, learned: list[Sequence], staleness: int
    ) -> None:
        failing(monkeypatch, 1, tries=1000)
        with pytest.raises(RunError, match="answers of step 1 failed: engine") as caught:
            train(f"runner.max_staleness={staleness}", "runner.max_steps=2")
        assert WHY in str(caught.value)
        assert [answer for answer in learned if answer.request_id] == []


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def engine(server: FakeServer, tmp_path: Path) -> Iterator[ServerEngine]:
    contract_model().save_pretrained(tmp_path)
    settings = {"url": server.url, "timeout": 30, "retries": 0, "max_concurrent": 2}
    made = ServerEngine(ServerSettings.model_validate(settings), tmp_path, stop_token_ids=(END,))
    yield made
    made.stop()


def ask(engine: ServerEngine) -> Sequence:
    (answer,) = run(engine, [Request(request_id="a", prompt=(9, 17, 4), params=greedy(6))]).values()
    return answer


def of_first(**new: Any) -> Any:
    """Return a change of the first choice of an answer."""
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **new}, *answer["choices"][1:]]}


class TestServers:
    @pytest.mark.parametrize(
        ("status", "why"), [(500, "status 500"), (503, "status 503"), (504, "status 504"), (429, "status 429")]
    )
    def test_a_request_that_a_server_fails_is_no_answer(
        self, server: FakeServer, engine: ServerEngine, status: int, why: str
    ) -> None:
        assert not ask(engine).failed
        server.faults = [(status, {"error": "overloaded"})]
        answer = ask(engine)
        assert (answer.finish_reason, answer.tokens) == ("aborted", ())
        assert why in answer.failure
        assert not ask(engine).failed

    def test_an_answer_that_breaks_off_is_none(self, server: FakeServer, engine: ServerEngine) -> None:
        ask(engine)
        server.cut = [9]
        assert "cannot be reached" in ask(engine).failure
        server.faults = [(200, b'{"choices": [')]
        assert "not JSON" in ask(engine).failure

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (of_first(finish_reason="abort"), "for the reason 'abort'"),
            (of_first(finish_reason="error"), "for the reason 'error'"),
            (of_first(finish_reason=None), "its finish reason is None"),
            (of_first(logprobs={"token_logprobs": [None] * 6}), "log-probability is missing"),
            (lambda answer: {**answer, "choices": []}, "returned 0 answers; 1 were requested"),
        ],
    )
    def test_an_answer_that_a_server_gave_up_is_none(
        self, server: FakeServer, engine: ServerEngine, change: Any, why: str
    ) -> None:
        ask(engine)
        server.change = change
        assert why in ask(engine).failure

    def test_a_request_that_takes_too_long_is_none(self, server: FakeServer, tmp_path: Path) -> None:
        contract_model().save_pretrained(tmp_path)
        settings = {"url": server.url, "timeout": 5, "retries": 0, "max_concurrent": 1}
        engine = ServerEngine(ServerSettings.model_validate(settings), tmp_path, stop_token_ids=(END,))
        ask(engine)
        engine._server._timeout = 0.05
        server.hold.clear()
        assert "did not respond within 0.05 s" in ask(engine).failure
        server.hold.set()
        engine.stop()

    def test_a_server_that_fails_on_and_on_ends_the_run(self, server: FakeServer, engine: ServerEngine) -> None:
        ask(engine)
        server.faults = [(503, None)] * 5
        assert [ask(engine).failed for _ in range(4)] == [True] * 4
        with pytest.raises(RLinfError, match="status 503"):
            ask(engine)

    def test_what_a_setting_mends_ends_the_run(self, server: FakeServer, engine: ServerEngine) -> None:
        ask(engine)
        server.change = of_first(token_ids=None, logprobs={"tokens": ["a"]})
        with pytest.raises(RLinfError, match="returns texts without token ids"):
            ask(engine)


class TestScoring:
    def test_a_judge_that_was_away_is_asked_again(self, tmp_path: Path) -> None:
        with Scorer(f"{JUDGES}:once_away") as scorer:
            score = scorer.score(Item(text="x", answer="", row={"seen": str(tmp_path / "seen")}))
        assert (score.reward, score.failure) == (1.0, "")

    @pytest.mark.parametrize(("name", "cause"), [("always_away", "error"), ("kills_itself", "crash")])
    def test_what_fails_again_is_no_score(self, name: str, cause: str) -> None:
        with Scorer(f"{JUDGES}:{name}") as scorer:
            one, other = scorer.score_all([Item(text="x", answer=""), Item(text="y", answer="")])
        assert (one.failure, other.failure) == (cause, cause)
        assert one.failed
