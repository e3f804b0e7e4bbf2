"""Exports, written a tensor at a time, are what transformers loads."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from torch import Tensor

from recipes.language.engines.own.merged_adapter import MergedAdapter
from recipes.language.models.load_model import load_model, make_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.language.weights.model_export import export
from recipes.training.huggingface import with_lora
from rlinf_core import CheckpointError, RLinfError, load_job
from tests.unit.recipes.language.learning.test_initial_weights import saved


def actor_of(folder: str, *overrides: str) -> Any:
    job = load_job("math_laptop", (f"actor.model.model_path={folder}", "actor.warm_start.steps=0", *overrides))
    return cast("Any", job.config).actor


def changed(model: Any) -> LanguagePolicy:
    """Return a policy of which every trained weight is another one than in the file."""
    policy = LanguagePolicy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return policy


def written(policy: LanguagePolicy, actor: Any, folder: Path) -> dict[str, Tensor]:
    tokenizer = make_tokenizer(actor.model_copy(update={"model": type(actor.model)()}))
    export(iter(policy.state_dict().items()), actor, tokenizer, folder, lambda *_: None)
    return load_model(str(folder), next(policy.causal.parameters()).dtype).state_dict()


@pytest.mark.parametrize("kind", ["Qwen2", "tied Qwen2", "GPT2"])
def test_weights_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    folder = saved(kind, tmp_path / "first")
    policy = changed(load_model(folder))
    again = written(policy, actor_of(folder), tmp_path / "out")
    expected = policy.causal.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["architectures"] == [type(policy.causal).__name__]
    assert settings["dtype"] == "float32"


def test_models_that_transformers_converts_are_written_by_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    folder = saved("Mixtral", tmp_path / "first", **sizes, num_key_value_heads=2, num_local_experts=2, vocab_size=101)
    policy = changed(load_model(folder))
    again = written(policy, actor_of(folder), tmp_path / "out")
    assert all(torch.equal(again[name], value) for name, value in policy.causal.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_are_merged_as_engines_merge_them(tmp_path: Path, precision: str) -> None:
    folder, dtype = saved("tied Qwen2", tmp_path / "first"), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    actor = actor_of(folder, "actor.model.lora={rank: 2, alpha: 8}", f"actor.model.precision={precision}")
    policy = changed(with_lora(load_model(folder, dtype), actor.model.adapter()))
    again = written(policy, actor, tmp_path / "out")
    merged = load_model(folder, dtype)
    names = {name.removeprefix("model."): value for name, value in policy.state_dict().items() if ".lora_" in name}
    MergedAdapter(merged, 4.0).load(names.items())
    expected = merged.state_dict()
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    assert not torch.equal(
        expected["model.layers.0.mlp.up_proj.weight"], load_model(folder, dtype).model.layers[0].mlp.up_proj.weight
    )


def test_large_models_have_several_files_and_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.language.weights.model_export.FILE_BYTES", 100_000)
    folder = saved("Qwen2", tmp_path / "first")
    policy = changed(load_model(folder))
    again = written(policy, actor_of(folder), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert all(torch.equal(again[name], value) for name, value in policy.causal.state_dict().items())


def test_a_folder_that_does_not_pass_is_not_kept(tmp_path: Path) -> None:
    policy = changed(load_model(saved("tied Qwen2", tmp_path / "first")))
    actor, out = actor_of(str(tmp_path / "first")), tmp_path / "out"
    before = written(policy, actor, out)

    def refuse(aside: Path, fingerprints: Any) -> None:
        assert list(fingerprints) == [name for name in before if name != "lm_head.weight"]
        raise RLinfError("no")

    with pytest.raises(RLinfError):
        export(iter(policy.state_dict().items()), actor, make_tokenizer(actor), out, refuse)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "out"]
    assert load_model(str(out)).state_dict().keys() == before.keys()


def test_a_model_on_a_full_disk_says_so_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = changed(load_model(saved("tied Qwen2", tmp_path / "first")))
    actor = actor_of(str(tmp_path / "first"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("recipes.language.weights.model_export.ModelWriter.write", full)
    with pytest.raises(CheckpointError, match="the model cannot be written") as caught:
        export(iter(policy.state_dict().items()), actor, make_tokenizer(actor), tmp_path / "out", lambda *_: None)
    assert str(caught.value.why).startswith("No space left on device: the disk has ")
    assert [file.name for file in tmp_path.iterdir()] == ["first"]
