"""The figures of an evaluation, and the starts that it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import EvalEnvironmentConfig
from recipes.embodied.episodes.collector import CollectedEpisode
from recipes.embodied.using.evaluation import _collect, digest, figures, locate_weights, shared_starts, summary
from rlinf_core import ConfigError
from rlinf_core.statistics import wilson_interval


def episode(env: int, task: str, once: bool | None, at_end: bool | None) -> CollectedEpisode:
    return CollectedEpisode(env, 0, task, 10 * (env + 1), float(env), once, at_end)


def test_figures_are_by_task_and_in_all() -> None:
    episodes = [episode(0, "a", True, True), episode(1, "a", True, False), episode(2, "b", False, False)]
    result = summary(episodes)
    assert result["total"]["success_at_end"] == pytest.approx(1 / 3)
    assert result["total"]["success_once"] == pytest.approx(2 / 3)
    assert result["total"]["success_at_end_interval"] == list(wilson_interval(1, 3))
    assert (result["total"]["return"], result["total"]["episode_len"]) == (1.0, 20.0)
    assert {task: item["success_at_end"] for task, item in result["tasks"].items()} == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize(("lost", "left_out"), [((), 0), (((2, 0),), 1), (((3, 1),), 0), (((0, 0), (1, 1)), 2)])
def test_nothing_takes_the_place_of_an_episode_left_out(lost: tuple[tuple[int, int], ...], left_out: int) -> None:
    def batches(*_: Any, **__: Any) -> Iterator[list[CollectedEpisode]]:
        for reset in itertools.count():
            every = [CollectedEpisode(env, reset, "pick", 5, 1.0, True, True) for env in range(4)]
            yield [episode for episode in every if (episode.env, episode.reset) not in lost]

    lines: list[str] = []
    collection: Any = SimpleNamespace(num_envs=4, episodes=batches)
    collected, _ = _collect(collection, 6, EvalEnvironmentConfig(), False, lines.append, required=False)
    # The four environments of the first reset, and two of the second.
    assert len(collected) == 6 - left_out
    assert {(episode.env, episode.reset) for episode in collected} <= {*((n, 0) for n in range(4)), (0, 1), (1, 1)}
    assert lines[-1].startswith("6 of 6 episodes")
    assert (f"{left_out} left out" in lines[-1]) == bool(left_out)


def test_success_may_be_unknown() -> None:
    result = figures([episode(0, "a", None, None)])
    assert (result["success_once"], result["success_once_interval"]) == (None, None)


def test_weights_are_those_given_or_those_that_the_file_names() -> None:
    config, inputs = config_of(), Path("global_step_7")
    assert locate_weights(config, inputs) == (inputs, inputs)
    with pytest.raises(ConfigError, match="no weights are named"):
        locate_weights(config, None)
    assert locate_weights(config_of({"model": {"model_path": "model"}}), None) == (None, Path("model").absolute())
    loaded = config_of({"checkpoint_load_path": "global_step_3", "model": {"model_path": "model"}})
    assert locate_weights(loaded, None) == (Path("global_step_3").absolute(), Path("global_step_3").absolute())


def config_of(actor: Any = None, **env: Any) -> EmbodiedConfig:
    place = {"actor,rollout,env": {"node_group": "node", "placement": 0}}
    cluster = {"num_nodes": 1, "component_placement": place}
    return EmbodiedConfig.model_validate({"recipe": "embodied", "cluster": cluster, "env": env, "actor": actor or {}})


def test_starts_of_training_are_refused() -> None:
    refused = shared_starts(config_of(train={"seed": 7}, eval={"seed": 7}))
    assert refused is not None
    assert "start from training starts" in refused.message
    assert shared_starts(config_of(train={"seed": 7})) is None


@pytest.mark.parametrize(
    ("env_type", "train", "test", "shared"),
    [
        ("libero", {}, {}, True),
        ("libero", {"initial_states": [0, 39]}, {"initial_states": [40, 49]}, False),
        ("libero", {"initial_states": [0, 40]}, {"initial_states": [40, 49]}, True),
        ("metaworld", {}, {}, True),
        ("metaworld", {}, {"goal_seed": 1}, False),
        ("robosuite", {}, {}, False),
    ],
)
def test_fixed_starts_of_training_are_refused(env_type: str, train: Any, test: Any, shared: bool) -> None:
    refused = shared_starts(config_of(train={"env_type": env_type, "options": train}, eval={"options": test}))
    assert (refused is not None) == shared


def test_ways_of_ending_are_counted() -> None:
    episodes = [
        CollectedEpisode(number, 0, "a", 1, 0.0, solved, solved, outcome)
        for number, (solved, outcome) in enumerate([(True, "success"), (False, "dropped"), (False, "dropped")])
    ]
    assert figures(episodes)["outcomes"] == {"dropped": 2, "success": 1}


def test_a_digest_tells_weights_apart(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    assert digest([file], tmp_path) is None
    file.write_bytes(b"one")
    first = digest([file], tmp_path)
    assert first == digest([file], tmp_path)
    file.write_bytes(b"two")
    assert digest([file], tmp_path) != first
