"""Rules of the embodied recipe that need more than a file: data, checkpoints, cameras, policies to be steered."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.rules import robot_rules
from recipes.embodied.rules.data_rules import check_given
from recipes.training.weights.shard_files import shard_name
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import CheckpointError, load_job
from rlinf_core.config.diagnostics import Diagnostic
from tests.unit.recipes.embodied.cameras.fake_cameras import lacking

# Of `franka_kin`, task `pick`.
STATES, ACTIONS, RATE = 21, 8, 20
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a data set of one episode of three steps, whose flags are true in the last one if they say so."""

    def written(
        name: str = "set", *, states: int = STATES, actions: int = ACTIONS, fps: int = RATE, **extra: Any
    ) -> str:
        cameras, flags = extra.get("cameras", {}), extra.get("flags", {})
        features = {
            "observation.state": Feature("float32", (states,)),
            "action": Feature(extra.get("action_type", "float32"), (actions,)),
            **{f"observation.images.{name}": Feature(extra.get("video", "image"), cameras[name]) for name in cameras},
            **({"next.reward": Feature("float32", (1,))} if "flags" in extra else {}),
            **dict.fromkeys(flags, Feature("bool", (1,))),
        }
        kinds = {name: np.uint8 if feature.is_camera else feature.dtype for name, feature in features.items()}
        columns = {name: np.zeros((3, *feature.shape), kinds[name]) for name, feature in features.items()}
        for flag in flags:
            columns[flag][-1] = flag == "next.done"
        with DatasetWriter(tmp_path / name, fps, features) as writer:
            writer.add(columns, "do it")
        return str(tmp_path / name)

    return written


def collected(paths: str, *overrides: str, config: str = "sft/pick-laptop") -> list[Diagnostic]:
    job = load_with_lint(config, [f"data.train_data_paths={paths}", *overrides], environ={})
    return [diagnostic for diagnostic in job.diagnostics if diagnostic.code != "no-effect"]


def faults_of(collected: list[Diagnostic]) -> tuple[str, str, str]:
    assert len(collected) == 1, collected
    return collected[0].severity.name, collected[0].code, collected[0].message


def test_data_of_the_environment_are_well(write: Write) -> None:
    assert collected(write()) == []
    assert collected(f"[{write('one')},{write('two')}]") == []


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"actions": 4}, "the data set has 4 numbers in an action; the environment has 8"),
        ({"actions": 9}, "the data set has 9 numbers in an action; the environment has 8"),
        ({"states": 20}, "the data set has 20 numbers in a state; the environment has 21"),
        ({"action_type": "int64"}, "actions and the environment's are of different kinds"),
    ],
)
@pytest.mark.parametrize("config", ["sft/pick-laptop", "embodied/pick-laptop"])
def test_data_of_another_environment_are_an_error(write: Write, sizes: dict[str, Any], words: str, config: str) -> None:
    path = write(**sizes)
    severity, code, message = faults_of(
        collected(path, *(["algorithm.bc_weight=0.1"] if config == "embodied/pick-laptop" else []), config=config)
    )
    assert (severity, code) == ("ERROR", "dataset-mismatch")
    assert words in message
    assert path in message
    assert "`env_type: franka_kin`" in message


def test_pictures_of_another_size_are_an_error(write: Write) -> None:
    seen = ("env.train.env_type=franka_vision", "env.train.task=touch", "actor.model.model_type=cnn_policy")
    path = write(states=10, actions=3, cameras={"main": (48, 48, 3)})
    assert "48 x 48; the environment's are 32 x 32" in faults_of(collected(path, *seen))[2]
    assert collected(path, *seen, "env.train.options={image_size: 48}") == []


def test_another_rate_than_that_of_the_actions_is_a_warning(write: Write) -> None:
    severity, code, message = faults_of(collected(write(fps=10)))
    assert (severity, code) == ("WARNING", "dataset-mismatch")
    assert "10 rows per second" in message
    assert "20 actions per second" in message


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"actions": 8, "fps": 80}, "has 8 numbers in an action; the environment has 4"),
        ({"actions": 4, "fps": 20}, "takes 80 actions per second"),
        ({"actions": 4, "fps": 80, "states": 8}, "has 8 numbers in a state; the environment has 39"),
        ({"actions": 4, "fps": 80}, None),
    ],
)
def test_simulators_are_known_without_their_packages(write: Write, sizes: dict[str, Any], words: str | None) -> None:
    press = ("env.train={env_type: metaworld, task: reach-v3}", "env.eval={}")
    path = write(**{"states": 39, **sizes})
    messages = [item.message for item in collected(path, *press) if item.code == "dataset-mismatch"]
    assert (messages == []) if words is None else (words in messages[0])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"fps": 30}, "different rows per second (fps): 30"),
        ({"actions": 7}, "different numbers in an action: 7"),
        ({"states": 16}, "different numbers in a state: 16"),
        ({"cameras": {"main": (32, 32, 3)}}, "different cameras"),
    ],
)
def test_data_sets_that_differ_are_an_error(write: Write, other: dict[str, Any], words: str) -> None:
    first, second = write("one"), write("two", **other)
    diagnostics = collected(f"[{first},{second}]")
    severity, code, message = faults_of(diagnostics)
    assert (severity, code) == ("ERROR", "dataset-mismatch")
    assert words in message
    assert first in message
    assert second in message
    assert diagnostics[0].path == ("data", "train_data_paths", 1)


def test_without_environments_data_are_what_they_are(write: Write) -> None:
    place = "cluster.component_placement"
    alone = (f"~{place}.'actor,rollout,env'", f"{place}.actor={{node_group: node, placement: 0}}")
    assert collected(write(actions=4, fps=50), *alone) == []


def test_damaged_files_are_an_error_with_their_name(write: Write, tmp_path: Path) -> None:
    path = write()
    rows = tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet"
    rows.write_bytes(rows.read_bytes()[:-20])
    severity, code, message = faults_of(collected(path))
    assert (severity, code) == ("ERROR", "unusable-path")
    assert str(rows) in message
    rows.unlink()
    assert "it has no Parquet file for them" in faults_of(collected(path))[2]
    (tmp_path / "demo.hdf5").write_bytes(b"no such thing")
    assert "not an HDF5 file" in faults_of(collected(str(tmp_path / "demo.hdf5")))[2]


def test_a_video_that_is_damaged_within_is_an_error(write: Write, tmp_path: Path) -> None:
    path = write(states=10, actions=3, cameras={"main": (32, 32, 3)}, video="video")
    assert collected(path, config="sft/franka-vla-laptop") == []
    video = tmp_path / "set" / "videos" / "observation.images.main" / "chunk-000" / "file-000.mp4"
    content = bytearray(video.read_bytes())
    begin = content.index(b"mdat") + 4
    content[begin : begin + 40] = bytes(40)
    video.write_bytes(content)
    severity, code, message = faults_of(collected(path, config="sft/franka-vla-laptop"))
    assert (severity, code) == ("ERROR", "unusable-path")
    assert f"a video cannot be decoded: `{video}`" in message
    # The damaged ones may be left out.
    chosen = f"{{path: {path}, episodes: [0]}}"
    assert faults_of(collected(chosen, config="sft/franka-vla-laptop"))[0] == "WARNING"


def test_a_feature_that_is_not_there_is_named(write: Write) -> None:
    assert (
        "has no `observation.joints`" in faults_of(collected(write(), "data.columns={state: [observation.joints]}"))[2]
    )


def test_weights_are_refused_for_a_replay_buffer(write: Write) -> None:
    one, other = write("one"), write("other")
    mixture = f"[{{path: {one}, weight: 1}}, {{path: {other}, weight: 2}}]"
    messages = [item.message for item in collected(mixture, config="embodied/franka-rlpd-laptop")]
    assert [message for message in messages if "a replay buffer draws all steps alike" in message] == [
        "the data sets have a `weight`, and a replay buffer draws all steps alike"
    ]
    assert not any(
        "draws all steps" in item.message
        for item in collected(f"[{one}, {other}]", config="embodied/franka-rlpd-laptop")
    )
    assert collected(mixture) == []


@pytest.mark.parametrize("flip", ["upside_down", "rotate90"])
def test_turns_that_there_are_not_are_refused(write: Write, flip: str) -> None:
    assert faults_of(collected(f"[{{path: {write()}, flip: {flip}}}]"))[0] == "ERROR"


def test_only_a_state_has_several_columns(write: Write) -> None:
    assert "`reward` is one column" in faults_of(collected(write(), "data.columns={reward: [a, b]}"))[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["next.success"], "1 of 1 episodes are not solved at their end, and no column says"),
        (["next.success", "next.done"], "1 of 1 episodes are done and not solved, and no `next.truncated` says"),
        (["next.success", "next.done", "next.truncated"], None),
        ([], "the demonstrations do not say how their episodes end"),
    ],
)
def test_what_is_assumed_of_ends_is_a_warning(flags: list[str], words: str | None, write: Write) -> None:
    path = write(flags=flags)
    reported = collected(path, "env.train.env_type=franka_kin", config="embodied/franka-rlpd-laptop")
    about = [item for item in reported if " end" in item.message]
    if words is None:
        assert about == []
        return
    severity, code, message = faults_of(about)
    assert (severity, code) == ("WARNING" if flags else "ERROR", "dataset-mismatch")
    assert words in message


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


def faults_at(folder: Path, *overrides: str, config: str = "embodied/pick-laptop") -> list[tuple[str, str]]:
    named = f"actor.checkpoint_load_path={folder}"
    job = load_with_lint(config, [named, *overrides], environ={})
    return [(diagnostic.code, diagnostic.message) for diagnostic in job.diagnostics if diagnostic.path == AT]


@pytest.mark.parametrize("config", ["embodied/pick-laptop", "sft/pick-laptop"])
def test_a_checkpoint_that_fits_is_well(checkpoint: Path, config: str) -> None:
    assert faults_at(checkpoint, config=config) == []
    # One of an earlier version, or copied in part, may not say what it is.
    (checkpoint / "policy.json").unlink()
    (checkpoint / "manifest.json").unlink()
    assert faults_at(checkpoint, config=config) == []


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("content", [None, "", "half"])
def test_weights_that_are_not_whole_are_named(checkpoint: Path, name: str, content: str | None) -> None:
    file = checkpoint / "actor" / name
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    ((code, message),) = faults_at(checkpoint)
    assert code == "unusable-path"
    assert "is incomplete" in message
    assert f"actor/{name}" in message


def test_an_empty_folder_of_weights_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    for path in (checkpoint / "actor").iterdir():
        path.unlink()
    ((code, message),) = faults_at(checkpoint)
    assert (code, "lacks `actor/shard-*.safetensors`" in message) == ("unusable-path", True)
    (checkpoint / "actor").rmdir()
    ((code, message),) = faults_at(checkpoint)
    assert (code, "is not a checkpoint of this recipe" in message) == ("unusable-path", True)


def test_a_checkpoint_of_an_earlier_rlinf_names_the_command(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_text("weights")
    (checkpoint / "manifest.json").unlink()
    ((code, message),) = faults_at(checkpoint)
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
    ((code, message),) = faults_at(checkpoint)
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
    ((code, message),) = faults_at(checkpoint)
    assert (code, words in message) == ("conflicting-settings", True)


def test_statistics_that_the_policy_was_trained_with_are_missed(checkpoint: Path) -> None:
    describe(checkpoint, statistics="abc")
    ((code, message),) = faults_at(checkpoint)
    assert (code, "statistics are missing" in message) == ("unusable-path", True)
    (checkpoint / "normalization.json").write_text("{}")
    assert faults_at(checkpoint) == []


def test_checkpoint_argument_is_checked_before_anything_starts(checkpoint: Path) -> None:
    def refusal(*overrides: str) -> CheckpointError:
        config: Any = load_job("embodied/pick-laptop", overrides).config
        with pytest.raises(CheckpointError) as caught:
            check_given(config, config.env.eval, checkpoint)
        return caught.value

    fitting: Any = load_job("embodied/pick-laptop").config
    check_given(fitting, fitting.env.eval, checkpoint)
    assert "`hidden_dim: 128`" in refusal("actor.model.hidden_dim=64").message
    other = refusal("env.train.task=reach")
    assert "8 numbers in an action; the environment has 7" in other.message
    assert other.where == str(checkpoint)
    describe(checkpoint, statistics="normalization.json")
    assert "statistics are missing" in refusal().message


JOB = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement: {"actor,rollout": {node_group: node, placement: 0}, env: {node_group: arms, placement: 0}}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1, ROBOT}]}
actor: {global_batch_size: 50, model: {model_type: cnn_policy}}
env: {train: {env_type: franka_robot, total_num_envs: 1, options: {cameras: CAMERAS}}}
"""
NONE, TWO = "disable_validate: true", 'camera_serials: ["1", "2"]'
SAC = ("actor.model.model_type=squashed_policy", "algorithm.loss_type=sac", "env.train.total_num_envs=1")
BROWSER = "env.train.intervention={source: browser, options: {token_file: /tmp/token}}"
DSRL = ("actor.model.model_type=steered_policy", "algorithm.loss_type=dsrl")


def job(cameras: str, robot: str = NONE) -> str:
    return JOB.replace("ROBOT", robot).replace("CAMERAS", cameras)


def messages(*overrides: str, file: str = "embodied/pick-laptop") -> list[str]:
    return [finding.message for finding in load_with_lint(file, overrides, environ={}).diagnostics]


@pytest.mark.parametrize(
    ("cameras", "robot", "words"),
    [
        ("{front: {}, wrist: {width: 64}}", TWO, None),
        ("{front: {source: v4l2}, view: {source: scene, view: drawing}, wrist: {}}", TWO, None),
        ('{front: {serial: "7"}}', NONE, None),
        ("{front: {}}", NONE, "`front` has no serial number"),
        ("{front: {}}", TWO, "takes the serial number 2"),
        ("{front: {}}", TWO + ", camera_type: zed", "no driver for cameras of `camera_type: zed`"),
    ],
)
def test_cameras_of_libraries(
    findings: Any, monkeypatch: pytest.MonkeyPatch, cameras: str, robot: str, words: str | None
) -> None:
    monkeypatch.setattr(robot_rules, "missing_modules", lacking())
    reported = findings(job(cameras, robot), messages=True)
    assert (reported == []) == (words is None)
    if words is not None:
        assert "conflicting-settings" in [item[0] for item in reported]
        assert words in " ".join(str(text) for item in reported for text in item[1:])


def test_missing_packages_are_named(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robot_rules, "missing_modules", lacking("cv2"))
    (reported,) = findings(job("{front: {source: v4l2, path: /dev/video0}}"), messages=True)
    assert reported[0] == "missing-extra"
    assert "rlinf-cli[cameras]" in str(reported)
    monkeypatch.setattr("recipes.embodied.rules.robot_rules.missing_modules", list)
    (finding,) = load_with_lint(
        "embodied/pick-laptop", (*SAC, "env.train.intervention.source=spacemouse"), environ={}
    ).diagnostics
    assert (finding.code, "`hidapi`" in finding.message) == ("missing-extra", True)


def test_checking_cameras_imports_nothing_heavy(findings: Any) -> None:
    before = set(sys.modules)
    assert findings(job("{front: {source: scene}}")) == []
    assert not {"mujoco", "cv2", "pyrealsense2", "torch"} & (set(sys.modules) - before)


def test_a_person_takes_over_in_training_and_not_in_evaluations() -> None:
    config = load_with_lint("embodied/pick-laptop", (*SAC, BROWSER), environ={}).config
    assert isinstance(config, EmbodiedConfig)
    assert config.env.train.intervention.source == "browser"
    assert "intervention" not in type(config.env.eval).model_fields


def steered(folder: Path, *overrides: str, kind: str | None = None) -> list[str]:
    """Return what is said of a job that steers the policy of a folder, in which one of some kind is saved."""
    if kind is not None:
        (folder / "policy.json").write_text(json.dumps({"model": {"model_type": kind}}))
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return messages(*DSRL, f"actor.model.model_path={folder}", *overrides)


def test_dsrl_takes_policies_that_begin_with_noise(tmp_path: Path) -> None:
    (said,) = steered(tmp_path / "missing")
    assert "which is not on this machine" in said
    (said,) = steered(tmp_path)
    assert "it has no `policy.json`, which `steered_policy` needs" in said
    assert steered(tmp_path, "algorithm.options.noise_aliasing=true", kind="flow_policy") == []
    source = "env.train.intervention={source: scripted, options: {probability: 0.1, shortest: 2, longest: 5}}"
    assert any("not known of interventions" in message for message in steered(tmp_path, source))
    (said,) = steered(tmp_path, kind="mlp_policy")
    assert "needs a policy that begins with noise, and the `mlp_policy` in" in said


def test_a_sampler_that_draws_more_noise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"type": "diffusion", "noise_scheduler_type": "DDPM"}))
    drawn = [message for message in steered(tmp_path, kind="lerobot") if "cannot be steered" in message]
    assert ["draws more noise at each step" in message for message in drawn] == [True]
    sampler = "actor.model.options={policy: {options: {config: {noise_scheduler_type: DDIM}}}}"
    assert not [message for message in steered(tmp_path, sampler) if "cannot be steered" in message]


def test_demonstrations_train_no_steered_policy() -> None:
    reported = messages("actor.model.model_type=steered_policy", "actor.model.model_path=.", file="sft/pick-laptop")
    assert any("demonstrations train no `steered_policy`" in message for message in reported)
