"""`rlinf eval` of language models, `recipes.language.using.answer_scoring`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.language.using.answer_scoring import evaluate
from rlinf_core import CheckpointError, ConfigError, Job
from rlinf_core.job.load import load_job
from tests.unit.recipes.language import own_verdicts
from tests.unit.recipes.sft_chat.chats import actor_of, config_of, jsonl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model that knows a chat template."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    actor_of().save_model(str(folder))
    return folder


def job_of(model: Path, *overrides: str) -> Job:
    settings = (
        f"actor.model.model_path={model}",
        "data.max_prompt_length=16",
        "rollout.sampling_params.max_new_tokens=5",
        "runner.seq_length=32",
    )
    job = load_job("math_eval", (*settings, *overrides), environ={})
    job.raise_if_bad()
    return job


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_right_answers_count_by_data_set(model: Path, tmp_path: Path) -> None:
    problems = [{"prompt": f"{n}+{n}=", "answer": "?"} for n in range(4)]
    asked = jsonl(tmp_path / "asked.jsonl", problems)
    evaluate(job_of(model, f"data.val_data_paths={asked}", "reward.reward_type=exact"), None, tmp_path / "first")
    answers = [line["text"] for line in lines(tmp_path / "first")]
    jsonl(tmp_path / "right.jsonl", [{**row, "answer": text} for row, text in zip(problems, answers, strict=True)])
    jsonl(tmp_path / "wrong.jsonl", problems)
    paths = f"data.val_data_paths=[{tmp_path / 'right.jsonl'}, {tmp_path / 'wrong.jsonl'}]"
    result = evaluate(job_of(model, paths, "reward.reward_type=exact"), None, tmp_path / "second")
    assert {name: figures["pass@1"] for name, figures in result["sets"].items()} == {
        "right": 1.0,
        "wrong": 0.0,
        "all": 0.5,
    }
    assert {name: figures["problems"] for name, figures in result["sets"].items()} == {"right": 4, "wrong": 4, "all": 8}
    assert result["sets"]["all"]["pass@1_low"] < 0.5 < result["sets"]["all"]["pass@1_high"]
    assert json.loads((tmp_path / "second" / "eval.json").read_text()) == result


def test_several_sampled_answers_give_pass_at_k(model: Path, tmp_path: Path) -> None:
    job = job_of(model, "~data.val_data_paths", "data.type=sums", "data.val_samples=4")
    result = evaluate(job, None, tmp_path / "out", episodes=6)
    figures = result["sets"]["all"]
    assert figures["problems"] == 6
    assert figures["pass@1"] == figures["mean@4"] <= figures["pass@2"] <= figures["pass@4"]
    assert result["sampling"]["temperature"] == 0.6
    assert len(lines(tmp_path / "out")) == 24


def test_too_long_prompts_are_counted_and_not_asked(model: Path, tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": "1" * n, "answer": "1"} for n in (1, 60)])
    result = evaluate(job_of(model, f"data.val_data_paths={asked}"), None, tmp_path / "out")
    assert result["sets"]["all"]["prompts_skipped"] == 1
    assert len(lines(tmp_path / "out")) == 1


def test_answers_are_judged_by_a_model(model: Path, tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": f"{n}+{n}=", "answer": "?"} for n in range(3)])
    judged = (
        *("reward.reward_type=judge", f"judge.model_path={model}", "judge.apply_chat_template=false"),
        *("judge.template='{text}'", f"judge.verdict={own_verdicts.__name__}:always_right", "judge.max_new_tokens=2"),
        "cluster.component_placement={'actor,rollout,reward,judge': {node_group: node, placement: 0}}",
    )
    result = evaluate(job_of(model, f"data.val_data_paths={asked}", *judged), None, tmp_path / "out")
    assert result["sets"]["all"]["pass@1"] == 1.0
    assert all(line["reason"].startswith("judge: ") for line in lines(tmp_path / "out"))


def test_checkpoint_that_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        evaluate(job_of(model, "~data.val_data_paths", "data.type=sums"), tmp_path / "none", tmp_path / "out")


def test_evaluation_files_alone_need_a_run_that_only_evaluates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training files"):
        job_of(tmp_path, "data.val_data_paths=test.jsonl", "runner.only_eval=false")


def test_loss_of_a_chat_model_equals_that_of_its_run(tmp_path: Path) -> None:
    from recipes.sft_chat.chat_evaluation import evaluate as evaluate_chat

    actor = actor_of()
    actor.learn(1, None)
    actor.save_model(str(tmp_path / "model"))
    config = config_of(f"actor.model.model_path={tmp_path / 'model'}")
    job = Job("chat", load_job("sft_chat_laptop", environ={}).diagnostics, config=config)
    result = evaluate_chat(job, None, tmp_path / "out")
    assert result["sets"]["all"]["loss"] == pytest.approx(actor.evaluate()["eval/loss"], abs=1e-5)
