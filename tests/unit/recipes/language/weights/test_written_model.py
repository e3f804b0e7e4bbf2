"""A model folder that was written is, to transformers, the policy that was trained."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import recipes.language.weights.written_model as written_model
from recipes.language.engines.engine_weights import ModelWeights
from recipes.language.models.load_model import load_model, make_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.language.weights.model_export import export
from recipes.language.weights.written_model import answer, check_written, expected_logprobs
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import with_lora
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import CheckpointError, ConfigError, RLinfError
from tests.unit.recipes.language.learning.test_initial_weights import saved
from tests.unit.recipes.language.tiny import job_config
from tests.unit.recipes.language.weights.written_cases import ARCHITECTURES, CASES, KINDS, TIES, Case, outcome, save
from tests.unit.recipes.two_processes import run_two

_answer_by_process = written_model._answer_of


def check_outcome(case: Case, result: dict[str, Any]) -> None:
    """Check that a case was written rightly, or refused where it has to be."""
    shared = case.ties == "tied" and case.kind == "head"
    # Layers of GPT-2 store their weights the other way round; its output layer does not.
    turned = case.architecture == "GPT2" and case.kind in ("all", "attention", "mlp")
    if shared or turned or case.kind in ("embeddings", "norm"):
        assert "LoRA cannot be added" in result["refused"]
        return
    if result.get("refused") == "no such layer":
        assert (case.architecture, case.kind) == ("Mixtral", "mlp"), "experts are no linear layers"
        return
    assert result["difference"] < 1e-4
    assert result["moved"] > 1e-4


FAST = [case for case in CASES if case.architecture in ("Qwen2", "GPT2") and case.kind in ("weights", "head")]
FAST += [Case("Mixtral", "unequal", "all"), Case("Phi3", "tied", "embeddings")]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.text, marks=() if case in FAST else pytest.mark.nightly) for case in CASES],
)
def test_one_rank_writes_what_it_trained(tmp_path: Path, case: Case) -> None:
    check_outcome(case, outcome(case, tmp_path))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_two("tests.unit.recipes.language.weights.written_cases", tmp_path_factory.mktemp("ranks"), 1500)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("case", [pytest.param(case, id=case.text) for case in CASES])
def test_two_ranks_write_what_one_writes(tmp_path: Path, case: Case, two_ranks: dict[str, Any]) -> None:
    result, alone = two_ranks[case.text], outcome(case, tmp_path)
    check_outcome(case, result)
    assert result.get("refused") == alone.get("refused")
    if "logprobs" in alone:
        assert result["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)


def test_there_are_twelve_families_in_each_way() -> None:
    assert len(CASES) == len(ARCHITECTURES) * len(TIES) * len(KINDS) == 12 * 3 * 7


def checked(folder: Path, policy: LanguagePolicy, fingerprints: dict[str, str] | None = None) -> Any:
    return check_written(folder, fingerprints or {}, expected_logprobs(policy, torch.float32))


def test_weights_that_differ_are_named(tmp_path: Path) -> None:
    save("Qwen2", "untied", tmp_path)
    policy = LanguagePolicy(load_model(str(tmp_path)))
    assert checked(tmp_path, policy).largest < 1e-5
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 2
    save_file(weights, file, {"format": "pt"})
    fingerprints = answer(str(tmp_path), [2, 3])["fingerprints"] | {"model.norm.weight": "0123"}
    with pytest.raises(RLinfError) as differs:
        checked(tmp_path, policy, fingerprints)
    assert "transformers loads other values of `model.norm.weight`" in str(differs.value.why)
    # Of weights that nobody has noted, the log-probabilities say it.
    with pytest.raises(RLinfError) as computed:
        checked(tmp_path, policy, {"lm_head.weight": answer(str(tmp_path), [2, 3])["fingerprints"]["lm_head.weight"]})
    assert "log-probabilities differ" in str(computed.value.why)


def test_a_folder_without_room_beside_it_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("Qwen2", "tied", tmp_path)
    policy = LanguagePolicy(load_model(str(tmp_path)))
    monkeypatch.setattr(written_model, "free_bytes", lambda: 1 << 29)
    monkeypatch.setattr(written_model, "_answer_of", lambda *_: pytest.fail("it was loaded"))
    result = checked(tmp_path, policy)
    assert result.largest is None
    assert "not loaded: that takes 1.0 GiB of memory, 0.5 are free" in result.note


def test_another_process_loads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_model, "_answer_of", _answer_by_process)
    save("Qwen2", "unequal", tmp_path)
    policy = LanguagePolicy(load_model(str(tmp_path)))
    assert checked(tmp_path, policy).largest < 1e-5
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "unheard_of"}))
    with pytest.raises(RLinfError, match="not the model that was trained") as refused:
        checked(tmp_path, policy)
    assert "transformers cannot load it" in str(refused.value.why)


def actor_of(folder: str, *overrides: str) -> Any:
    return job_config(f"actor.model.model_path={folder}", "actor.warm_start.steps=0", *overrides, sound=False).actor


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


def ends_of(folder: Path) -> list[int]:
    """Return the tokens at which `generate` ends."""
    named = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    return named if isinstance(named, list) else [] if named is None else [named]


MIXTRAL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
MIXTRAL.update({"num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 101})


@pytest.mark.parametrize(
    ("kind", "file_bytes"),
    [("Qwen2", None), ("Qwen2", 100_000), ("tied Qwen2", None), ("GPT2", None), ("Mixtral", None)],
)
def test_weights_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file_bytes: int | None
) -> None:
    """Also those of Mixtral, which transformers converts and writes, and those of a large model, in several files."""
    if file_bytes:
        monkeypatch.setattr("recipes.language.weights.model_export.FILE_BYTES", file_bytes)
    folder, out = saved(kind, tmp_path / "first", **(MIXTRAL if kind == "Mixtral" else {})), tmp_path / "out"
    policy = changed(load_model(folder))
    again = written(policy, actor_of(folder), out)
    expected = policy.causal.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == [type(policy.causal).__name__]
    assert settings["dtype"] == "float32"
    # `generate` ends where training ended answers: at the end of the tokenizer, here another one than the folder's.
    own, named = ends_of(Path(folder)), ends_of(out)
    assert named == [*dict.fromkeys((*own, 1))]
    assert (len(list(out.glob("model-*-of-*.safetensors"))) > 1) == bool(file_bytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_are_merged_as_engines_merge_them(tmp_path: Path, precision: str) -> None:
    folder, dtype = saved("tied Qwen2", tmp_path / "first"), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    actor = actor_of(folder, "actor.model.lora={rank: 2, alpha: 8}", f"actor.model.precision={precision}")
    policy = changed(with_lora(load_model(folder, dtype), actor.model.adapter()))
    again = written(policy, actor, tmp_path / "out")
    merged: Any = load_model(folder, dtype)
    before = merged.model.layers[0].mlp.up_proj.weight.clone()
    names = {name.removeprefix("model."): value for name, value in policy.state_dict().items() if ".lora_" in name}
    ModelWeights(merged, 4.0).load_adapter(names.items())
    assert all(torch.equal(again[name], value) for name, value in merged.state_dict().items())
    assert not torch.equal(again["model.layers.0.mlp.up_proj.weight"], before)


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


@pytest.mark.parametrize(
    ("architecture", "layers", "words"),
    [
        ("Qwen2", "q_proj lm_head", "`lm_head` shares its weights with another layer"),
        ("Qwen2", "embed_tokens", "`model.embed_tokens` is of kind `Embedding`"),
        ("Qwen2", "q_proj v_prj", "it has no layer `v_prj`"),
        ("Qwen2", "q_proj norm", "Target module Qwen2RMSNorm"),
        ("Qwen2", "self_attn", "Target module Qwen2Attention"),
        ("Qwen2", "layers", "Target module ModuleList"),
        ("GPT2", "", "is of kind `Conv1D`"),
    ],
)
def test_adapters_that_cannot_be_written_are_refused(
    tmp_path: Path, architecture: str, layers: str, words: str
) -> None:
    save(architecture, "tied", tmp_path)
    with pytest.raises(ConfigError) as caught:
        with_lora(load_model(str(tmp_path)), LoraSettings(rank=2, target_modules=tuple(layers.split())))
    assert words in f"{caught.value.message}: {caught.value.why}"


@pytest.mark.parametrize(
    ("architecture", "ties", "layers", "adapted"),
    [
        ("Qwen2", "tied", "q_proj mlp.up_proj", "q_proj up_proj"),
        ("Qwen2", "unequal", "q_proj lm_head", "q_proj lm_head"),
        ("Qwen2", "tied", "", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("Qwen2", "tied", "all-linear", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("Mixtral", "untied", "", "q_proj k_proj v_proj o_proj"),
    ],
)
def test_layers_that_can_be_written_are_adapted(
    tmp_path: Path, architecture: str, ties: str, layers: str, adapted: str
) -> None:
    save(architecture, ties, tmp_path)
    model = with_lora(load_model(str(tmp_path)), LoraSettings(rank=2, target_modules=tuple(layers.split())))
    weights = (name.partition(".lora_")[0] for name, _ in model.named_parameters() if "lora" in name)
    assert {name.rpartition(".")[2] for name in weights} == set(adapted.split())


def test_a_server_that_would_tie_unequal_weights_is_refused(tmp_path: Path) -> None:
    save("Qwen2", "unequal", tmp_path)
    settings = [f"actor.model.model_path={tmp_path}", "rollout.backend=server"]
    settings.append("rollout.server.urls=[http://127.0.0.1:1]")
    file, words = tmp_path / "config.json", "this engine would compute with the embeddings"
    for said in (True, False):
        file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": said}))
        job = load_with_lint("math/sums-laptop", settings, environ={})
        assert any(words in finding.message for finding in job.diagnostics) == said
