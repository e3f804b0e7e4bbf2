"""Adapters that could not be written, and engines that would compute another model, are refused by the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from recipes.language.models.load_model import load_model
from recipes.language.rules.model_rules import require_model
from recipes.sections.actor import LoraSettings
from recipes.sft_chat.chat_rules import require_inputs
from recipes.training.huggingface import with_lora
from rlinf_cli.job.load import load_with_lint
from rlinf_core import ConfigError
from tests.unit.recipes.language.weights.written_cases import save


def findings(recipe: str, folder: Path, *settings: str) -> list[tuple[str, str]]:
    job = load_with_lint(recipe, [f"actor.model.model_path={folder}", *settings], environ={})
    return [(finding.code, finding.message) for finding in job.diagnostics if finding.severity.name == "ERROR"]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("[q_proj, lm_head]", "`lm_head` shares its weights with another layer"),
        ("[embed_tokens]", "`model.embed_tokens` is of kind `Embedding`"),
        ("[q_proj, v_prj]", "it has no layer `v_prj`"),
        ("[q_proj, norm]", "Target module Qwen2RMSNorm"),
        ("[self_attn]", "Target module Qwen2Attention"),
        ("[layers]", "Target module ModuleList"),
    ],
)
@pytest.mark.parametrize("recipe", ["math_laptop", "sft_chat_laptop"])
def test_adapters_that_cannot_be_written_are_refused(tmp_path: Path, recipe: str, layers: str, words: str) -> None:
    save("Qwen2", "tied", tmp_path)
    lora = f"actor.model.lora={{rank: 2, target_modules: {layers}}}"
    errors = findings(recipe, tmp_path, lora)
    assert [code for code, _ in errors] == ["conflicting-settings"]
    assert words in errors[0][1]


def test_layers_that_can_be_written_are_taken(tmp_path: Path) -> None:
    save("Qwen2", "tied", tmp_path / "tied")
    save("Qwen2", "unequal", tmp_path / "unequal")
    for folder, layers in (("tied", "[q_proj, mlp.up_proj]"), ("unequal", "[q_proj, lm_head]"), ("tied", "[]")):
        assert not findings("math_laptop", tmp_path / folder, f"actor.model.lora={{target_modules: {layers}}}")


def test_lora_of_a_family_without_linear_layers_is_refused(tmp_path: Path) -> None:
    save("GPT2", "tied", tmp_path)
    ((code, message),) = findings("math_laptop", tmp_path, "actor.model.is_lora=true")
    assert code == "conflicting-settings"
    assert "is of kind `Conv1D`" in message


def test_lora_of_a_mixture_adapts_what_is_linear(tmp_path: Path) -> None:
    save("Mixtral", "untied", tmp_path)
    adapted = with_lora(load_model(str(tmp_path)), LoraSettings(rank=2))
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if "lora" in name}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_critics_are_judged_like_actors(tmp_path: Path) -> None:
    save("Qwen2", "tied", tmp_path)
    critic = f"critic.model={{model_path: {tmp_path}, lora: {{target_modules: [lm_head]}}}}"
    ((_, message),) = findings("math_laptop_ppo", tmp_path, critic)
    assert "`lm_head` shares its weights" in message


def test_runs_refuse_what_validation_does(tmp_path: Path) -> None:
    save("Qwen2", "tied", tmp_path)
    for recipe, require in (("math_laptop", require_model), ("sft_chat_laptop", require_inputs)):
        lora = "actor.model.lora={target_modules: [lm_head]}"
        job = load_with_lint(recipe, [f"actor.model.model_path={tmp_path}", lora], environ={})
        with pytest.raises(ConfigError, match="`lm_head` shares its weights"):
            require(job.config)  # type: ignore[arg-type]


def test_a_server_that_would_tie_unequal_weights_is_refused(tmp_path: Path) -> None:
    save("Qwen2", "unequal", tmp_path)
    server = ["rollout.backend=server", "rollout.server.urls=[http://127.0.0.1:1]"]
    errors = findings("math_laptop", tmp_path, *server)
    assert any("this engine would compute with the embeddings" in message for _, message in errors)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
    assert not any(
        "compute with the embeddings" in message for _, message in findings("math_laptop", tmp_path, *server)
    )
