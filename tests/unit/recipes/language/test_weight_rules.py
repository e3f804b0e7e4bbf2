"""Adapters that could not be written, and engines that would compute another model, are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.nn import Module

pytest.importorskip("transformers")
pytest.importorskip("peft")

from recipes.language.models.load_model import load_model
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import with_lora
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigError
from tests.unit.recipes.language.weights.written_cases import save


def findings(recipe: str, folder: Path, *settings: str) -> list[tuple[str, str]]:
    job = load_with_lint(recipe, [f"actor.model.model_path={folder}", *settings], environ={})
    return [(finding.code, finding.message) for finding in job.diagnostics if finding.severity.name == "ERROR"]


def layers_with_lora(model: Module) -> set[str]:
    return {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora" in name}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("q_proj lm_head", "`lm_head` shares its weights with another layer"),
        ("embed_tokens", "`model.embed_tokens` is of kind `Embedding`"),
        ("q_proj v_prj", "it has no layer `v_prj`"),
        ("q_proj norm", "Target module Qwen2RMSNorm"),
        ("self_attn", "Target module Qwen2Attention"),
        ("layers", "Target module ModuleList"),
    ],
)
def test_adapters_that_cannot_be_written_are_refused(tmp_path: Path, layers: str, words: str) -> None:
    save("Qwen2", "tied", tmp_path)
    with pytest.raises(ConfigError) as caught:
        with_lora(load_model(str(tmp_path)), LoraSettings(rank=2, target_modules=tuple(layers.split())))
    assert words in f"{caught.value.message}: {caught.value.why}"


@pytest.mark.parametrize(
    ("kind", "layers", "adapted"),
    [
        ("tied", "q_proj mlp.up_proj", "q_proj up_proj"),
        ("unequal", "q_proj lm_head", "q_proj lm_head"),
        ("tied", "", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    ],
)
def test_layers_that_can_be_written_are_adapted(tmp_path: Path, kind: str, layers: str, adapted: str) -> None:
    save("Qwen2", kind, tmp_path)
    model = with_lora(load_model(str(tmp_path)), LoraSettings(rank=2, target_modules=tuple(layers.split())))
    assert layers_with_lora(model) == set(adapted.split())


def test_lora_of_a_family_without_linear_layers_is_refused(tmp_path: Path) -> None:
    save("GPT2", "tied", tmp_path)
    with pytest.raises(ConfigError) as caught:
        with_lora(load_model(str(tmp_path)), LoraSettings(rank=2))
    assert "is of kind `Conv1D`" in f"{caught.value.message}: {caught.value.why}"


def test_lora_of_a_mixture_adapts_what_is_linear(tmp_path: Path) -> None:
    save("Mixtral", "untied", tmp_path)
    adapted = with_lora(load_model(str(tmp_path)), LoraSettings(rank=2))
    assert layers_with_lora(adapted) == {"q_proj", "k_proj", "v_proj", "o_proj"}


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
