"""Rules of `data`, `recipes.embodied.rules.data_rules`: what `rlinf validate` tells of demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.diagnostics import Diagnostic

# Of `franka_kin`, task `pick`.
STATES, ACTIONS, RATE = 21, 8, 20
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(
        name: str = "set", *, states: int = STATES, actions: int = ACTIONS, fps: int = RATE, **extra: Any
    ) -> str:
        features = {
            "observation.state": Feature("float32", (states,)),
            "action": Feature(extra.get("action_type", "float32"), (actions,)),
            **{
                f"observation.images.{camera}": Feature(extra.get("camera_type", "image"), shape)
                for camera, shape in extra.get("cameras", {}).items()
            },
        }
        with DatasetWriter(tmp_path / name, fps, features) as writer:
            kinds = {name: np.uint8 if feature.is_camera else feature.dtype for name, feature in features.items()}
            writer.add(
                {name: np.zeros((3, *feature.shape), kinds[name]) for name, feature in features.items()}, "do it"
            )
        return str(tmp_path / name)

    return written


def collected(paths: str, *overrides: str, config: str = "sft_laptop") -> list[Diagnostic]:
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
@pytest.mark.parametrize("config", ["sft_laptop", "laptop"])
def test_data_of_another_environment_are_an_error(write: Write, sizes: dict[str, Any], words: str, config: str) -> None:
    path = write(**sizes)
    severity, code, message = faults_of(
        collected(path, *(["algorithm.bc_weight=0.1"] if config == "laptop" else []), config=config)
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
    path = write(states=10, actions=3, cameras={"main": (32, 32, 3)}, camera_type="video")
    assert collected(path, config="franka_vision_sft") == []
    video = tmp_path / "set" / "videos" / "observation.images.main" / "chunk-000" / "file-000.mp4"
    content = bytearray(video.read_bytes())
    begin = content.index(b"mdat") + 4
    content[begin : begin + 40] = bytes(40)
    video.write_bytes(content)
    severity, code, message = faults_of(collected(path, config="franka_vision_sft"))
    assert (severity, code) == ("ERROR", "unusable-path")
    assert f"a video cannot be decoded: `{video}`" in message
    # The damaged ones may be left out.
    chosen = f"{{path: {path}, episodes: [0]}}"
    assert faults_of(collected(chosen, config="franka_vision_sft"))[0] == "WARNING"


def test_a_feature_that_is_not_there_is_named(write: Write) -> None:
    assert "has no `observation.joints`" in faults_of(collected(write(), "data.state_keys=[observation.joints]"))[2]


def test_weights_are_refused_for_a_replay_buffer(write: Write) -> None:
    one, other = write("one"), write("other")
    mixture = f"[{{path: {one}, weight: 1}}, {{path: {other}, weight: 2}}]"
    messages = [item.message for item in collected(mixture, config="franka_rlpd_sim")]
    assert [message for message in messages if "a replay buffer draws all steps alike" in message] == [
        "the data sets have a `weight`, and a replay buffer draws all steps alike"
    ]
    assert not any(
        "draws all steps" in item.message for item in collected(f"[{one}, {other}]", config="franka_rlpd_sim")
    )
    assert collected(mixture) == []


@pytest.mark.parametrize("flip", ["upside_down", "rotate90"])
def test_turns_that_there_are_not_are_refused(write: Write, flip: str) -> None:
    path = write()
    assert faults_of(collected(f"[{{path: {path}, flip: {flip}}}]"))[0] == "ERROR"
    assert faults_of(collected(path, f"data.flip={flip}"))[0] == "ERROR"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["next.success"], "1 of 1 episodes are not solved at their end, and no column says"),
        (["next.success", "next.done"], "1 of 1 episodes are done and not solved, and no `next.truncated` says"),
        (["next.success", "next.done", "next.truncated"], None),
        ([], "the demonstrations do not say how their episodes end"),
    ],
)
def test_what_is_assumed_of_ends_is_a_warning(flags: list[str], words: str | None, tmp_path: Path) -> None:
    sizes = {"observation.state": (STATES,), "action": (ACTIONS,), "next.reward": (1,)}
    features = {name: Feature("float32", shape) for name, shape in sizes.items()}
    features |= {name: Feature("bool", (1,)) for name in flags}
    with DatasetWriter(tmp_path / "set", RATE, features) as writer:
        columns = {name: np.zeros((3, *feature.shape), feature.dtype) for name, feature in features.items()}
        if "next.done" in columns:
            columns["next.done"][-1] = True
        writer.add(columns, "do it")
    about = [
        item
        for item in collected(str(tmp_path / "set"), "env.train.env_type=franka_kin", config="franka_rlpd_sim")
        if " end" in item.message
    ]
    if words is None:
        assert about == []
        return
    severity, code, message = faults_of(about)
    assert (severity, code) == ("WARNING" if flags else "ERROR", "dataset-mismatch")
    assert words in message
