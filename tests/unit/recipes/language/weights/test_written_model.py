"""A model folder that was written is, to transformers, the policy that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from safetensors.torch import load_file, save_file

import recipes.language.weights.written_model as written_model
from recipes.language.models.load_model import load_model
from recipes.language.models.policy import LanguagePolicy
from recipes.language.weights.loaded_model import answer
from recipes.language.weights.written_model import check_written, expected_logprobs
from rlinf_core import RLinfError
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
