"""`rlinf eval` and `rlinf export` of language models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.loop import model_checkpoints
from recipes.language.loop.model_checkpoints import MODEL, require_state, save_parts
from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.trained_models import evaluate, export_checkpoint, model_of
from recipes.language.weights.written_model import expected_logprobs
from rlinf_core import CheckpointError, ConfigError, Job, RLinfError
from rlinf_core.config.secrets import MASK
from rlinf_core.errors import RunError
from rlinf_core.job.load import load_job
from tests.unit.recipes.language import own_verdicts
from tests.unit.recipes.sft_chat.chats import WORDS, actor_of, config_of, jsonl


def trained(tmp_path: Path, *overrides: str) -> tuple[Any, Path]:
    """Return a worker after a step, and its checkpoint."""
    actor, folder = actor_of(*overrides), tmp_path / "global_step_1"
    actor.learn(1, None)
    actor.save_checkpoint(str(folder))
    return actor, folder


def test_exported_weights_equal_the_trained_ones(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    actor, checkpoint = trained(tmp_path)
    record = export_checkpoint(actor._config, checkpoint, tmp_path / "out", "safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    ours = actor._state.policy.causal.state_dict()
    assert loaded.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in loaded.items())
    assert record["difference"] < 1e-5
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(record["files"])


def test_adapters_are_merged_into_the_exported_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = built_tokenizer("0123456789+=", WORDS, str(config_of().actor.built_template))
    base = tmp_path / "base"
    built_model(tokenizer, hidden_dim=32, layers=1).save_pretrained(base)
    tokenizer.save_pretrained(str(base))
    actor, checkpoint = trained(
        tmp_path, f"actor.model.model_path={base}", "actor.model.lora={rank: 4}", "actor.optim.lr=0.1"
    )
    record = export_checkpoint(actor._config, checkpoint, tmp_path / "out", "safetensors")
    assert record["difference"] < 1e-5
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (base, tmp_path / "out")]
    assert any(not torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize(
    ("out", "kind", "words"),
    [("out", "onnx", "cannot be exported as `onnx`"), (".", "safetensors", "the export folder already exists")],
)
def test_exports_that_cannot_be_are_refused(tmp_path: Path, out: str, kind: str, words: str) -> None:
    with pytest.raises(RLinfError, match=words):
        export_checkpoint(config_of(), tmp_path, tmp_path / out, kind)


@pytest.mark.parametrize(("value", "parts"), [("dcp", ["actor"]), ("huggingface", [MODEL]), ("both", ["actor", MODEL])])
def test_save_format_decides_what_a_checkpoint_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, parts: list[str]
) -> None:
    written: list[str] = []

    class Group:
        def save_checkpoint(self, folder: str) -> Any:
            written.append("actor")
            return self

        def save_model(self, folder: str) -> Any:
            written.append(Path(folder).name)
            return self

        def wait(self) -> None:
            return None

    monkeypatch.setattr(model_checkpoints, "wait_together", lambda *handles: None)
    save_parts(Group(), tmp_path, config_of(f"runner.save_format={value}").runner)
    assert written == parts


def test_checkpoint_of_a_model_alone_exports_and_does_not_resume(tmp_path: Path) -> None:
    actor, _ = trained(tmp_path)
    checkpoint = tmp_path / "alone"
    actor.save_model(str(checkpoint / MODEL))
    export_checkpoint(actor._config, checkpoint, tmp_path / "out", "safetensors")
    exported, saved = (folder / "model.safetensors" for folder in (tmp_path / "out", checkpoint / MODEL))
    assert exported.read_bytes() == saved.read_bytes()
    with pytest.raises(CheckpointError, match="cannot be resumed from") as error:
        require_state(checkpoint)
    assert "save_format" in str(error.value.help)


def test_model_of_a_checkpoint_computes_as_the_trained_one(tmp_path: Path) -> None:
    from recipes.language.models.load_model import load_model
    from recipes.language.models.policy import LanguagePolicy

    actor, checkpoint = trained(tmp_path)
    with model_of(actor._config, checkpoint) as folder:
        loaded = LanguagePolicy(load_model(folder)).eval()
    ours, theirs = (expected_logprobs(policy, torch.float32) for policy in (actor._state.policy, loaded))
    assert ours == theirs
    assert not Path(folder).exists()


def test_evaluation_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights are named"), model_of(config_of(), None):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model that knows a chat template."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    actor_of().save_model(str(folder))
    return folder


def job_of(model: Path, *overrides: str) -> Job:
    settings = (f"actor.model.model_path={model}", "data.max_prompt_length=16", "runner.seq_length=32")
    settings += ("rollout.sampling_params.max_new_tokens=5",)
    job = load_job("math/eval", (*settings, *overrides), environ={})
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
    shares = {name: (figures["pass@1"], figures["problems"]) for name, figures in result["sets"].items()}
    assert shares == {"right": (1.0, 4), "wrong": (0.0, 4), "all": (0.5, 8)}
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


def test_an_evaluation_of_no_prompts_is_none(model: Path, tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": "1" * 60, "answer": "1"}])
    with pytest.raises(RunError, match="the evaluation has no answers"):
        evaluate(job_of(model, f"data.val_data_paths={asked}"), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def changed(model: Path, folder: Path, **settings: Any) -> Path:
    """Copy a model with other settings of generation, and a chat template that refuses the number 7."""
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    refuses = "{% if '7' in messages[0].content %}{{ raise_exception('no sevens') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refuses + "{{ messages[0].content }}")
    return folder


def test_ending_tokens_that_are_not_special_are_left_out(model: Path, tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    every = changed(model, tmp_path / "model", eos_token_id=list(range(3, 12)))
    evaluate(job_of(every, f"data.val_data_paths={asked}"), None, tmp_path / "out")
    (line,) = lines(tmp_path / "out")
    assert (line["finish_reason"], line["tokens"], line["text"]) == ("stop", 1, "")


def test_a_prompt_that_the_template_refuses_is_skipped(model: Path, tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": f"{n}+1=", "answer": "2"} for n in (1, 7)])
    job = job_of(changed(model, tmp_path / "model"), f"data.val_data_paths={asked}", "data.apply_chat_template=true")
    lines_shown: list[str] = []
    result = evaluate(job, None, tmp_path / "out", emit=lines_shown.append)
    assert (result["sets"]["all"]["answers"], result["sets"]["all"]["prompts_skipped"]) == (1, 1)
    assert "skipped problem 1: no sevens (line 1 of" in lines_shown[0]


def test_answers_are_written_without_secrets(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-123456")
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": "1+1=", "answer": "sk-123456"}])
    job = job_of(model, f"data.val_data_paths={asked}", "reward.reward_type=exact")
    evaluate(job, None, tmp_path / "out")
    (line,) = lines(tmp_path / "out")
    assert (line["answer"], line["tokens"] > 0) == (MASK, True)
    assert "sk-123456" not in line["reason"]


def test_answers_are_judged_by_a_model(model: Path, tmp_path: Path) -> None:
    asked = jsonl(tmp_path / "asked.jsonl", [{"prompt": f"{n}+{n}=", "answer": "?"} for n in range(3)])
    judged = (
        *("reward.reward_type=judge", f"judge.model_path={model}", "reward.options.apply_chat_template=false"),
        *(
            "reward.options.template='{text}'",
            f"reward.options.verdict={own_verdicts.__name__}:always_right",
            "reward.options.max_new_tokens=2",
        ),
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
    from recipes.sft_chat.chat_actor import evaluate as evaluate_chat

    actor = actor_of()
    actor.learn(1, None)
    actor.save_model(str(tmp_path / "model"))
    config = config_of(f"actor.model.model_path={tmp_path / 'model'}")
    job = Job("chat", load_job("sft/sums-chat-laptop", environ={}).diagnostics, partial_config=config, is_whole=True)
    result = evaluate_chat(job, None, tmp_path / "out")
    assert result["sets"]["all"]["loss"] == pytest.approx(actor.evaluate()["eval/loss"], abs=1e-5)
