"""Passes of an env worker: where they begin, what is sent, what a checkpoint keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.demonstrations.data_facts import StartFacts
from recipes.demonstrations.orientation import thumbnails
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import Observation
from recipes.embodied.envs.env_state import State
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.workers.env_worker import StagedEnvironments
from rlinf_core.errors import ConfigError
from rlinf_core.job.load import load_job
from tests.unit.recipes.embodied.conftest import CountingEnv

# Four environments: the task of the first ends with its second step, the other episodes are cut off after three.
COUNTING = (
    "env.train.env_type=tests.unit.recipes.embodied.conftest:CountingEnv",
    "env.train.task=null",
    "env.train.options={end: [2, 0, 0, 0]}",
    "env.train.total_num_envs=4",
    "env.train.max_episode_steps=3",
    "env.train.max_steps_per_rollout_epoch=4",
    "actor.global_batch_size=16",
)


def stages_of(*overrides: str, training: bool = True, of: tuple[str, ...] = COUNTING) -> StagedEnvironments:
    """Return the environments of the one env worker of a job."""
    job = load_job("laptop", (*of, *overrides), environ={})
    job.raise_if_bad()
    config = cast("EmbodiedConfig", job.config)
    worker: Any = SimpleNamespace(worker_info=SimpleNamespace(rank=0, hardware=(), address="EnvGroup:0"))
    environments = config.env.train if training else config.env.eval
    return StagedEnvironments(config, environments, worker, Layout(1, 1, 1, "trajectories"), training=training)


def asked(*overrides: str, training: bool = True) -> list[bool]:
    """Return after which of three steps a value is asked for the observations in which episodes ended."""
    stages = stages_of(*overrides, training=training)
    (batch,) = stages.batches
    stages.begin(0)
    messages = [stages.message(batch.step(np.zeros((4, 1, 1), np.float32))) for _ in range(3)]
    return ["final_observations" in message for message in messages]


def counts(observations: list[Observation]) -> list[float]:
    return observations[0]["states"][:, 0].tolist()


def steps(stages: StagedEnvironments, number: int) -> None:
    for _ in range(number):
        stages.batches[0].step(np.zeros((4, 1, 1), np.float32))


def test_an_evaluation_is_as_long_as_its_episodes() -> None:
    assert stages_of(training=True).chunks == 4
    assert stages_of(training=False).chunks == 3
    assert stages_of("env.eval.max_episode_steps=9", training=False).chunks == 9


SEEING = (
    "env.train={env_type: franka_vision, task: touch, total_num_envs: 4, max_episode_steps: 16,"
    " max_steps_per_rollout_epoch: 16}",
    "actor.model.model_type=cnn_policy",
    "actor.global_batch_size=64",
)


@pytest.mark.parametrize(("number", "resets"), [(5, [5]), (7, [5, 7])])
def test_a_pass_begins_at_its_own_reset(number: int, resets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stages, asked = stages_of(of=SEEING), list[int | None]()
    (batch,) = stages.batches
    reset = batch.reset
    monkeypatch.setattr(batch, "reset", lambda number=None: asked.append(number) or reset(number))
    shown = stages.first_pictures(5)
    (begun,) = stages.begin(number)
    assert asked == resets
    assert np.array_equal(begun["images.main"], stages_of(of=SEEING).begin(number)[0]["images.main"])
    assert np.array_equal(shown["main"], thumbnails(begun["images.main"])) == (number == 5)


def test_a_robot_is_not_moved_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = stages_of(of=SEEING)
    monkeypatch.setattr(stages.batches[0], "paces_itself", True)
    assert stages.first_pictures(0) == {}
    assert stages.facts(0) == StartFacts(stages.batches[0].control_hz, None)
    assert not stages.batches[0].started


def test_pictures_and_instructions_are_those_of_one_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, asked = stages_of(of=SEEING), list[int | None]()
    (batch,) = stages.batches
    reset = batch.reset
    monkeypatch.setattr(batch, "reset", lambda number=None: asked.append(number) or reset(number))
    stages.first_pictures(3)
    said = stages.facts(3).instructions
    assert said is not None
    assert set(said) == set(stages.begin(3)[0]["instructions"].tolist())
    assert asked == [3]


def test_a_pass_continues_the_episodes_of_the_pass_before() -> None:
    stages = stages_of("env.train.max_episode_steps=9")
    assert counts(stages.begin(1)) == [0, 0, 0, 0]
    steps(stages, 5)
    assert counts(stages.begin(2)) == [1, 5, 5, 5]


@pytest.mark.parametrize("override", ["env.train.reset_each_pass=true", "env.train.auto_reset=false"])
def test_a_pass_can_begin_with_new_episodes(override: str) -> None:
    stages = stages_of(override)
    first = stages.begin(1)[0]["states"]
    steps(stages, 2)
    second = stages.begin(2)[0]["states"]
    assert second[:, 0].tolist() == [0, 0, 0, 0]
    assert not np.array_equal(first, second)
    assert stages.save() == b""


def test_evaluation_repeats_its_episodes_to_the_longest() -> None:
    stages = stages_of("env.train.max_episode_steps=9", training=False)
    first = stages.begin(0)[0]["states"]
    steps(stages, 2)
    assert np.array_equal(stages.begin(0)[0]["states"], first)
    assert stages.first_message(stages.begin(0)[0])["chunks"].tolist() == [9] * 4


def test_episodes_are_saved_and_continued() -> None:
    stages, again = stages_of("env.train.max_episode_steps=9"), stages_of("env.train.max_episode_steps=9")
    assert stages.save() == b""
    stages.begin(1)
    steps(stages, 5)
    saved = stages.save()
    assert saved
    assert again.load([saved]) is None
    assert counts(again.begin(2)) == [1, 5, 5, 5]
    assert again.save() == saved


@pytest.mark.parametrize(
    ("override", "packs", "reason"),
    [
        ("env.train.seed=7", None, "`env.train` was changed"),
        ("env.train.seed=0", [], "holds no environment state"),
        ("env.train.seed=0", [b"damaged"], "cannot be loaded: "),
    ],
)
def test_episodes_that_cannot_be_continued_begin_anew(override: str, packs: list[bytes] | None, reason: str) -> None:
    stages = stages_of()
    stages.begin(1)
    steps(stages, 2)
    again = stages_of(override)
    assert reason in str(again.load([stages.save() or b""] if packs is None else packs))
    assert counts(again.begin(2)) == [0, 0, 0, 0]


def test_an_environment_without_a_state_is_told() -> None:
    stages = stages_of("env.train.env_type=tests.unit.recipes.embodied.workers.test_env_worker:Stateless")
    stages.begin(1)
    assert stages.save() is None


class Stateless(CountingEnv):
    def _save(self) -> State | None:
        return None


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("env.train.max_episode_steps=null",), "last up to 50 steps, and a pass 4"),
        (("env.train.env_type=tests.unit.recipes.embodied.workers.test_env_worker:Endless",), "have no limit"),
    ],
)
def test_an_episode_that_no_pass_could_end_is_refused(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        stages_of("env.train.reset_each_pass=true", "env.train.max_episode_steps=null", *overrides)
    assert "`max_episode_steps`" in str(caught.value.help)


class Endless(CountingEnv):
    default_max_episode_steps = None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), [False, False, True]),
        (
            ("algorithm.adv_type=reinforce_pp", "algorithm.loss_type=actor", "actor.model.add_value_head=false"),
            [False, False, False],
        ),
    ],
    ids=["values", "no values"],
)
def test_final_observations_travel_where_their_value_counts(overrides: tuple[str, ...], expected: list[bool]) -> None:
    assert asked(*overrides) == expected


def test_an_evaluation_asks_for_no_values() -> None:
    assert asked(training=False) == [False, False, False]
