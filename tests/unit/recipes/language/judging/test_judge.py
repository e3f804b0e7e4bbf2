"""Answers judged by a model: verdicts in its words, its engine, and the workers that ask and that judge."""

from __future__ import annotations

import json
import string
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from recipes.language.answers.prompt_messages import JudgeReply, JudgeRequest, judge_key
from recipes.language.answers.sequences import Request, Score, Sequence
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.models.load_model import built_model, built_tokenizer, make_tokenizer
from recipes.language.rewards import judge as judging
from recipes.language.rewards.judge import TEMPLATES, Judge, JudgeScorer, correct, filled, score, verdict_rule
from recipes.language.rewards.scoring import Item
from recipes.language.workers.reward_worker import JudgeWorker
from recipes.training.huggingface import load_tokenizer
from rlinf_core import ConfigError
from rlinf_core.runners.events import GENERATE_ROLLOUTS
from tests.unit.recipes.language.in_threads import Hub, LocalTrain, in_thread
from tests.unit.recipes.language.tiny import job_config, sequence

PLACED = "cluster.component_placement={'actor,rollout,reward,judge': {node_group: node, placement: 0}}"


@pytest.mark.parametrize(
    ("rule", "text", "verdict"),
    [
        (correct, "Verdict: CORRECT", 1.0),
        (correct, "It is correct.\n**Verdict:** INCORRECT", 0.0),
        (correct, "Verdict: INCORRECT ... no: verdict: correct", 1.0),
        *((correct, text, None) for text in ("It is correct.", "Verdict: correctly formatted", "")),
        (score, "Score: 7", 0.7),
        (score, "score: 2, no, **Score:** 10/10", 1.0),
        (score, "Score: 2.5", 0.25),
        *((score, text, None) for text in ("Score: 11", "7", "Score: -3")),
        *((score, text, 0.8) for text in ("Score (0-10): 8", "Score: 8 out of 10", "Score: 8.0/10.")),
        *((score, f"Score: {text}", None) for text in ("4/5", "4 out of 5", "85%", "5 %", "6-7", "8,5", "0.8/1")),
        (score, "Score - 3", 0.3),
    ],
)
def test_the_last_verdict_counts(rule: Callable[[str], float | None], text: str, verdict: float | None) -> None:
    assert rule(text) == verdict


def test_what_is_filled_in_is_no_place() -> None:
    template = "{prompt}|{text}|{answer}|{other}"
    assert filled(template, prompt="{text}", answer="4", text="{answer}") == "{text}|{answer}|4|{other}"
    assert all("{text}" in template for template in TEMPLATES.values())


def no_verdict(text: str) -> None:
    """Find no verdict in a reply."""


def by_parity(text: str) -> float:
    """Call replies of even length right."""
    return float(len(text) % 2 == 0)


def as_text(text: str) -> Any:
    """Find a number, and forget to convert it."""
    return text


def test_a_verdict_of_ones_own_is_imported() -> None:
    assert verdict_rule(f"{__name__}:by_parity")("ab") == 1.0
    assert verdict_rule(f"{__name__}:no_verdict")("ab") is None
    with pytest.raises(TypeError, match="`verdict` is str, not a number"):
        verdict_rule(f"{__name__}:as_text")("0.5")
    with pytest.raises(ConfigError, match="not a class or a function"):
        verdict_rule(f"{__name__}:PLACED")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without knowledge whose tokens are characters."""
    tokenizer = built_tokenizer(string.printable)
    cast("Any", built_model(tokenizer, hidden_dim=32, layers=1)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(str(tmp_path))
    return tmp_path


def config_of(folder: Path, *overrides: str) -> Any:
    inputs = (
        f"judge.model_path={folder}",
        "reward.reward_type=judge",
        PLACED,
        "reward.options.apply_chat_template=false",
    )
    return job_config(*inputs, *overrides)


class ScriptedEngine:
    """Gives each prompt the replies that a script has for it, one after another; an exception is a failure."""

    longest = 0

    def __init__(self, tokenizer: Any, script: Callable[[str], list[str]]) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._asked: list[Request] = []
        self._times: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.temperatures: list[float] = []
        self.stopped = False

    @property
    def unfinished(self) -> int:
        return len(self._asked)

    def submit(self, request: Request) -> None:
        self._asked.append(request)
        self.temperatures.append(request.params.temperature)

    def step(self) -> list[Sequence]:
        asked, self._asked = self._asked, []
        return [self._answer(request) for request in asked]

    def _answer(self, request: Request) -> Sequence:
        replies = self._script(self._tokenizer.decode(list(request.prompt)))
        text = replies[min(self._times[request.prompt], len(replies) - 1)]
        self._times[request.prompt] += 1
        about: Any = {"request_id": request.request_id}
        if text == "failure":
            return sequence((), request.prompt, **about, finish_reason="aborted", failure="no reply")
        return sequence(self._tokenizer.encode(text), request.prompt, **about)

    def stop(self) -> None:
        self.stopped = True


Judging = Callable[..., tuple[JudgeScorer, ScriptedEngine]]


@pytest.fixture
def judging_by(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Judging:
    """Makes a scorer that asks an engine of a script, by overrides; and that engine."""

    def make(script: Callable[[str], list[str]], *overrides: str, **rewards: Any) -> tuple[JudgeScorer, ScriptedEngine]:
        config = config_of(folder, *overrides)
        engine = ScriptedEngine(make_tokenizer(judging.judge_job(config).actor), script)
        monkeypatch.setattr(judging, "make_engine", lambda *args: engine)
        return JudgeScorer(Judge(config, torch.device("cpu")).results, **rewards), engine

    return make


def script(question: str) -> list[str]:
    """Return the replies by the answer; a tokenizer of characters has none for the end of a line."""
    answer = question.split("Answer to judge:")[1].split("Does the answer")[0]
    replies = {
        "right": ["Verdict: CORRECT"],
        "wrong": ["Verdict: INCORRECT"],
        "late": ["Let me think", "Verdict: CORRECT"],
        "never": ["Let me think"],
        "away": ["failure"],
        "4": ["Verdict: CORRECT"],
    }
    return next(texts for text, texts in replies.items() if text in answer)


def test_replies_become_scores(judging_by: Judging) -> None:
    scorer, engine = judging_by(script)
    texts = ["right", "wrong", "late", "never", "away"]
    scores = scorer.score_all([Item(text=text, answer="4", prompt="2 + 2 =") for text in texts])
    # An answer without a verdict is wrong: the right answer gets one. An engine that fails is no fault of an answer.
    assert [(one.correct, one.failure, one.exit) for one in scores] == [
        *((right, "", "") for right in (True, False, True)),
        *((False, *ends) for ends in (("", "judge"), ("judge", ""))),
    ]
    assert "no verdict: `Let me think`" in scores[3].reason
    assert "engine failed: no reply" in scores[4].reason
    # Greedy first; what had no verdict is drawn again, so that another reply can come.
    assert engine.temperatures == [0.0] * 5 + [1.0] * 3 + [0.0]


def test_a_judge_without_any_verdict_is_no_fault_of_an_answer(judging_by: Judging) -> None:
    scorer, _ = judging_by(lambda question: ["Let me think"])
    (result,) = scorer.score_all([Item(text="5", answer="4", prompt="2 + 2 =")])
    assert (result.failure, result.exit) == ("judge", "")


@pytest.mark.parametrize(("seq_length", "longest"), [(400, 0), (8192, 400)])
@pytest.mark.parametrize(("text", "question", "ends"), [(300, 7, ("", "judge")), (1, 300, ("judge", ""))])
def test_whose_fault_it_is_that_the_judge_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
    judging_by: Judging,
    text: int,
    question: int,
    ends: tuple[str, str],
    seq_length: int,
    longest: int,
) -> None:
    monkeypatch.setattr(ScriptedEngine, "longest", longest)
    limits = (f"reward.options.seq_length={seq_length}", "reward.options.max_new_tokens=20")
    scorer, _ = judging_by(lambda question: ["Verdict: CORRECT"], *limits)
    (result,) = scorer.score_all([Item(text="x" * text, answer="4", prompt="2" * question)])
    assert (result.failure, result.exit) == ends
    assert "more than 380 tokens" in result.reason


def test_shares_of_a_score_are_rewards(judging_by: Judging) -> None:
    scorer, _ = judging_by(lambda question: ["Score: 5"], "reward.options.verdict=score", correct=3.0, incorrect=-1.0)
    assert scorer.score_all([Item(text="x", answer="4")]) == [Score(1.0, "judge: `Score: 5`")]


def test_a_reply_is_read_without_its_ending_token(judging_by: Judging, folder: Path) -> None:
    (end,) = load_tokenizer(str(folder)).encode("#")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    scorer, _ = judging_by(lambda question: ["Score: 5#"], "reward.options.verdict=score")
    assert scorer.score_all([Item(text="x", answer="4")]) == [Score(0.5, "judge: `Score: 5`")]


def test_verdicts_for_a_worker_that_died_are_ignored() -> None:
    asked: list[JudgeRequest] = []

    def ask(requests: Any) -> list[JudgeReply]:
        stale = [JudgeReply(request.number, 0.0, "judge: stale") for request in asked]
        asked.extend(requests)
        return [*stale, *(JudgeReply(request.number, 1.0, "judge: fresh") for request in requests)]

    for _ in range(2):
        (result,) = JudgeScorer(ask).score_all([Item(text="4", answer="4")])
        assert result == Score(1.0, "judge: fresh", correct=True)


def test_requests_are_dealt_to_all_judges(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    config, hub = config_of(folder), Hub()
    tokenizer = make_tokenizer(judging.judge_job(config).actor)
    monkeypatch.setattr(judging, "make_engine", lambda *args: ScriptedEngine(tokenizer, script))
    workers = [in_thread(JudgeWorker, "JudgeGroup", hub, rank, 2)(config) for rank in range(2)]
    for worker in workers:
        worker.init_worker(LanguageLayout(1, 1, 1, "answers", "scored", judges=2))
    channel = hub.channel("answers")
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(worker.serve) for worker in workers]
        texts = ["right", "wrong", "late", "wrong", "right"]
        requests = [JudgeRequest(number, 0, "", "4", text) for number, text in enumerate(texts)]
        replies = {reply.number: reply for reply in judging.ask_judges(channel, 0, 2, requests)}
        for rank in range(2):
            channel.put(None, key=judge_key(rank))
        for call in calls:
            call.result(timeout=60)
    assert [replies[number].right for number in range(5)] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert isinstance(replies[0], JudgeReply)


BY_PARITY = (
    PLACED,
    "reward.reward_type=judge",
    "reward.options.template='{text}'",
    f"reward.options.verdict={__name__}:by_parity",
)
SHORT = (
    "reward.options.apply_chat_template=false",
    "reward.options.max_new_tokens=3",
    "reward.options.seq_length=64",
    "runner.max_steps=2",
)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_learns_from_a_judge(train: LocalTrain, folder: Path, staleness: int) -> None:
    run = train(*BY_PARITY, *SHORT, f"judge.model_path={folder}", f"runner.max_staleness={staleness}", rewards=2)
    assert run.steps == [1, 2]
    assert all(0 <= one.metrics["rollout/correct"] <= 1 for one in run.metrics)


def test_the_death_of_a_judge_restarts_the_run(train: LocalTrain, folder: Path) -> None:
    death = ("judge", 2, GENERATE_ROLLOUTS)
    run = train(*BY_PARITY, *SHORT, f"judge.model_path={folder}", "runner.save_interval=1", death=death)
    assert run.steps[-1] == 2


def test_a_step_of_failures_ends_the_run(train: LocalTrain, folder: Path) -> None:
    inputs = (*BY_PARITY[:3], f"reward.options.verdict={__name__}:no_verdict", *SHORT, f"judge.model_path={folder}")
    with pytest.raises(Exception, match="answers of step 1 failed: judge"):
        train(*inputs)
