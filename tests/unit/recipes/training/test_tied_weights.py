"""Which names are one weight is what the stored tensors say; names with adapters and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from recipes.language.engines.engine_weights import ModelFolder
from recipes.language.models.load_model import hollow_causal, load_model
from recipes.language.models.policy import LanguagePolicy, ValueModel
from recipes.language.rules.model_rules import fault_of_ties
from recipes.training.tied_weights import beneath_adapters, new_adapters
from recipes.training.weight_sources import fill_weights, stored_weights, within
from rlinf_core import ConfigError

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES.update({"num_attention_heads": 2, "num_key_value_heads": 2})


def write(folder: Path, change: Any = None, *, said: bool = True, kind: str = "Qwen2", **sizes: Any) -> str:
    """Write a model whose two tensors are `change` of them, and whose configuration says that they are one or not."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes}, tie_word_embeddings=False)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        stored = change(weights.pop(EMBEDDINGS), weights.pop(HEAD))
        save_file({**weights, **stored}, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": said}))
    return str(folder)


def unequal(embeddings: Any, head: Any) -> dict[str, Any]:
    return {EMBEDDINGS: embeddings, HEAD: head}


def equal(embeddings: Any, head: Any) -> dict[str, Any]:
    return {EMBEDDINGS: embeddings, HEAD: embeddings.clone()}


def other_name(embeddings: Any, head: Any) -> dict[str, Any]:
    return {HEAD: head}


def below_half_precision(embeddings: Any, head: Any) -> dict[str, Any]:
    """Two tensors that differ in float32, and not in bfloat16."""
    rounded = embeddings.bfloat16().float()
    return {EMBEDDINGS: rounded, HEAD: rounded * (1 + 2**-12)}


def is_tied(model: Any) -> bool:
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == model.config.tie_word_embeddings
    return shared


@pytest.mark.parametrize(
    ("change", "said", "expected"),
    [
        (unequal, True, False),
        (unequal, False, False),
        (equal, True, True),
        (equal, False, False),
        (other_name, True, True),
        (below_half_precision, True, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_and_hollow_models_share_the_same_weights(
    tmp_path: Path, change: Any, said: bool, expected: bool, dtype: torch.dtype
) -> None:
    folder = write(tmp_path, change, said=said)
    loaded, hollow = load_model(folder, dtype), hollow_causal(folder, dtype)
    assert is_tied(loaded) == is_tied(hollow) == expected
    stored = stored_weights(hollow, folder)
    assert stored is not None
    policy = LanguagePolicy(hollow)
    fill_weights(policy, within(policy, stored), torch.device("cpu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    for model in (hollow, loaded):
        assert all(torch.equal(weight, theirs[name]) for name, weight in model.state_dict().items())


def test_tensors_in_several_files_are_compared(tmp_path: Path) -> None:
    folder = write(tmp_path, unequal)
    load_model(folder).save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "parts" / "config.json").write_text(json.dumps(about))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert not is_tied(hollow_causal(str(tmp_path / "parts")))


def test_models_that_transformers_converts_are_told_apart_alike(tmp_path: Path) -> None:
    folder = write(tmp_path, kind="Mixtral", num_local_experts=2)
    assert not is_tied(hollow_causal(folder))
    assert not is_tied(load_model(folder))


def test_a_missing_output_layer_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, lambda embeddings, _: {EMBEDDINGS: embeddings}, said=False)
    assert stored_weights(hollow_causal(folder), folder) is None
    with pytest.raises(ConfigError, match="do not belong"):
        load_model(folder)


def test_critics_freeze_an_output_layer_of_its_own(tmp_path: Path) -> None:
    for change, trains in ((equal, True), (unequal, False)):
        folder = write(tmp_path / change.__name__, change)
        for model in (load_model(folder), hollow_causal(folder)):
            head: Any = ValueModel(model).causal.get_output_embeddings()
            assert head.weight.requires_grad == trains


def test_other_engines_take_the_weights_by_any_of_their_names(tmp_path: Path) -> None:
    folder = write(tmp_path, other_name)
    shapes = {name: tuple(weight.shape) for name, weight in load_model(folder).state_dict().items()}
    for left_out in (EMBEDDINGS, HEAD):
        ModelFolder(folder).check({name: shape for name, shape in shapes.items() if name != left_out})
    with pytest.raises(ValueError, match="has no value"):
        ModelFolder(folder).check({name: shape for name, shape in shapes.items() if name not in (EMBEDDINGS, HEAD)})


@pytest.mark.parametrize(("change", "refused"), [(unequal, True), (equal, False), (other_name, False)])
def test_engines_that_tie_by_the_configuration_are_refused(tmp_path: Path, change: Any, refused: bool) -> None:
    fault = fault_of_ties(write(tmp_path, change))
    assert (fault is not None) == refused
    if fault is not None:
        assert "the weights of the output layer differ from the embeddings" in fault.message
        assert "write `tie_word_embeddings: false`" in fault.help


OWN = [
    "critic.weight",
    "vlm.base_model.model.model.layers.0.q_proj.base_layer.weight",
    "vlm.base_model.model.model.layers.0.q_proj.lora_A.default.weight",
    "expert.base_model.model.0.state_proj.weight",
]
PLAIN = {"critic.weight", "vlm.model.layers.0.q_proj.weight", "expert.state_proj.weight"}


def test_plain_weights_are_found_beneath_adapters() -> None:
    result = beneath_adapters(OWN, PLAIN)
    assert set(result.values()) == PLAIN
    assert result["expert.base_model.model.0.state_proj.weight"] == "expert.state_proj.weight"
    assert new_adapters(OWN, PLAIN) == {OWN[2]}


def test_weights_with_adapters_keep_their_names() -> None:
    assert beneath_adapters(OWN, set(OWN)) == {name: name for name in OWN}
    assert new_adapters(OWN, OWN) == set()
    # They are not taken for plain ones where one is missing.
    assert OWN[1] not in beneath_adapters(OWN, {*OWN[2:], "vlm.model.layers.0.q_proj.weight"})
