"""Rules about `actor.checkpoint_load_path`, `recipes.embodied.rules.data_rules`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.rules.data_rules import check_given
from recipes.training.state.shard_files import shard_name
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import CheckpointError, load_job

MODEL = {"model_type": "mlp_policy", "num_action_chunks": 1, "hidden_dim": 128}
# Of `franka_kin`, task `pick`.
SIZES = {"state_size": 21, "action_size": 8}
AT = ("actor", "checkpoint_load_path")
SHARDS = [shard_name(number) for number in (1, 2)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_5"
    (folder / "actor").mkdir(parents=True)
    for name in SHARDS:
        (folder / "actor" / name).write_text("weights")
    describe(folder)
    files = {f"actor/{path.name}": 7 for path in (folder / "actor").iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"schema": "rlinf.checkpoint/1", "files": files}))
    return folder


def describe(folder: Path, *, statistics: str | None = None, sizes: dict[str, Any] | None = None, **model: Any) -> None:
    said = {"model": MODEL | model, "observations_and_actions": SIZES | (sizes or {}), "statistics": statistics}
    (folder / "policy.json").write_text(json.dumps(said))


def faults_of(folder: Path, *overrides: str, config: str = "laptop") -> list[tuple[str, str]]:
    named = f"actor.checkpoint_load_path={folder}"
    job = load_with_lint(config, [named, *overrides], environ={})
    return [(diagnostic.code, diagnostic.message) for diagnostic in job.diagnostics if diagnostic.path == AT]


@pytest.mark.parametrize("config", ["laptop", "sft_laptop"])
def test_a_checkpoint_that_fits_is_well(checkpoint: Path, config: str) -> None:
    assert faults_of(checkpoint, config=config) == []
    # One of an earlier version, or copied in part, may not say what it is.
    (checkpoint / "policy.json").unlink()
    (checkpoint / "manifest.json").unlink()
    assert faults_of(checkpoint, config=config) == []


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("content", [None, "", "half"])
def test_weights_that_are_not_whole_are_named(checkpoint: Path, name: str, content: str | None) -> None:
    file = checkpoint / "actor" / name
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    ((code, message),) = faults_of(checkpoint)
    assert code == "unusable-path"
    assert "is incomplete" in message
    assert f"actor/{name}" in message


def test_an_empty_folder_of_weights_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    for path in (checkpoint / "actor").iterdir():
        path.unlink()
    ((code, message),) = faults_of(checkpoint)
    assert (code, "lacks `actor/shard-*.safetensors`" in message) == ("unusable-path", True)
    (checkpoint / "actor").rmdir()
    ((code, message),) = faults_of(checkpoint)
    assert (code, "is not a checkpoint of this recipe" in message) == ("unusable-path", True)


def test_a_checkpoint_of_an_earlier_rlinf_names_the_command(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_text("weights")
    (checkpoint / "manifest.json").unlink()
    ((code, message),) = faults_of(checkpoint)
    assert (code, "was written by an earlier rlinf" in message) == ("unusable-path", True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "flow_policy"}, "has `model_type: flow_policy`, but `actor.model.model_type` is mlp_policy"),
        ({"hidden_dim": 64}, "has `hidden_dim: 64`, but `actor.model.hidden_dim` is 128"),
        ({"num_action_chunks": 5}, "has `num_action_chunks: 5`, but `actor.model.num_action_chunks` is 1"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused(checkpoint: Path, model: dict[str, Any], words: str) -> None:
    describe(checkpoint, **model)
    ((code, message),) = faults_of(checkpoint)
    assert code == "conflicting-settings"
    assert words in message
    assert str(checkpoint) in message


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"action_size": 4}, "has 4 numbers in an action; the environment has 8"),
        ({"state_size": 39}, "has 39 numbers in a state; the environment has 21"),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused(checkpoint: Path, sizes: dict[str, Any], words: str) -> None:
    describe(checkpoint, sizes=sizes)
    ((code, message),) = faults_of(checkpoint)
    assert (code, words in message) == ("conflicting-settings", True)


def test_statistics_that_the_policy_was_trained_with_are_missed(checkpoint: Path) -> None:
    describe(checkpoint, statistics="abc")
    ((code, message),) = faults_of(checkpoint)
    assert (code, "statistics are missing" in message) == ("unusable-path", True)
    (checkpoint / "normalization.json").write_text("{}")
    assert faults_of(checkpoint) == []


def test_checkpoint_argument_is_checked_before_anything_starts(checkpoint: Path) -> None:
    def refusal(*overrides: str) -> CheckpointError:
        config: Any = load_job("laptop", overrides).config
        with pytest.raises(CheckpointError) as caught:
            check_given(config, config.env.eval, checkpoint)
        return caught.value

    fitting: Any = load_job("laptop").config
    check_given(fitting, fitting.env.eval, checkpoint)
    assert "`hidden_dim: 128`" in refusal("actor.model.hidden_dim=64").message
    other = refusal("env.train.task=reach")
    assert "8 numbers in an action; the environment has 7" in other.message
    assert other.where == str(checkpoint)
    describe(checkpoint, statistics="normalization.json")
    assert "statistics are missing" in refusal().message
