"""Export of checkpoints as folders of transformers, `recipes.language.using.model_exporting`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.loop.model_checkpoints import MODEL, require_state, save_parts
from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.using.model_exporting import export_checkpoint, model_of
from recipes.language.weights.written_model import expected_logprobs
from rlinf_core import CheckpointError, ConfigError, RLinfError
from tests.unit.recipes.sft_chat.chats import WORDS, actor_of, config_of


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
    pytest.importorskip("peft")
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


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be exported as `onnx`"):
        export_checkpoint(config_of(), tmp_path, tmp_path / "out", "onnx")


def test_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(RLinfError, match="the export folder already exists"):
        export_checkpoint(config_of(), tmp_path, tmp_path, "safetensors")


@pytest.mark.parametrize(("value", "state", "model"), [("dcp", 1, 0), ("huggingface", 0, 1), ("both", 1, 1)])
def test_save_format_decides_what_a_checkpoint_has(tmp_path: Path, value: str, state: int, model: int) -> None:
    written: list[str] = []

    class Group:
        def save_checkpoint(self, folder: str) -> Any:
            return self._call(Path(folder) / "actor")

        def save_model(self, folder: str) -> Any:
            return self._call(Path(folder))

        def _call(self, folder: Path) -> Any:
            written.append(folder.name)
            return self

        def wait(self) -> None:
            return None

    import recipes.language.loop.model_checkpoints as module

    patched = pytest.MonkeyPatch()
    patched.setattr(module, "wait_together", lambda *handles: None)
    try:
        save_parts(Group(), tmp_path, config_of(f"runner.save_format={value}").runner)
    finally:
        patched.undo()
    assert written == ["actor"] * state + [MODEL] * model


def test_checkpoint_of_a_model_alone_exports_and_does_not_resume(tmp_path: Path) -> None:
    actor, _ = trained(tmp_path)
    checkpoint = tmp_path / "alone"
    actor.save_model(str(checkpoint / MODEL))
    export_checkpoint(actor._config, checkpoint, tmp_path / "out", "safetensors")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        checkpoint / MODEL / "model.safetensors"
    ).read_bytes()
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
