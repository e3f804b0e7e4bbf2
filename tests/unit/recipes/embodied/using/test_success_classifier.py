"""The reward by a classifier of pictures, and by keys: what they learn from, what they see, what they reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.intervention_types import ClassifierOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation, Transition
from recipes.embodied.envs.franka.franka_kin import FrankaKinEnv, FrankaVisionEnv
from recipes.embodied.interventions import registry as sources
from recipes.embodied.interventions.intervention import (
    InterventionError,
    InterventionSource,
    SuccessJudge,
    Takeover,
    Verdict,
)
from recipes.embodied.interventions.registry import open_judge
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.models.registry import make_model
from recipes.embodied.using import success_classifier
from recipes.embodied.using.collector import CollectedEpisode, EpisodeCollector
from recipes.embodied.using.recording import features_of, to_columns
from recipes.embodied.using.success_classifier import ClassifierJudge
from recipes.embodied.using.trained_policy import TrainedPolicy
from rlinf_core import ConfigError
from tests.known import known

EPISODES = 32


class SeenArm(FrankaKinEnv):
    """The kinematic arm with two cameras of 32 x 32 pixels: its drawings from the side and from above."""

    @property
    def spec(self) -> EnvSpec:
        known = super().spec
        views = {"side": (32, 32, 3), "above": (32, 32, 3)}
        return replace(known, cameras=views)

    def _observe(self) -> Observation:
        drawn = self.picture(self.look(np.arange(self.num_envs)))
        small = drawn.reshape(self.num_envs, 32, 4, 64, 4, 3).mean(axis=(2, 4)).astype(np.uint8)
        return {**super()._observe(), "images.side": small[:, :, :32], "images.above": small[:, :, 32:]}


def arm(seed: int, episodes: int = EPISODES, **extra: Any) -> SeenArm:
    settings = EnvSettings(num_envs=episodes, task="pick", seed=seed, auto_reset=False, **extra)
    return SeenArm(settings)


def shown(env: VectorEnv) -> list[CollectedEpisode]:
    """Return episodes in which an expert picks the block up, and holds it."""
    collector = EpisodeCollector(env, 0, "pick", "everything")
    while not collector.over:
        actions = env.expert()
        collector.step(known(actions)[:, None])
    return collector.episodes()


def written(folder: Path, episodes: list[CollectedEpisode], spec: EnvSpec) -> DemonstrationsConfig:
    with DatasetWriter(folder, 20, features_of(spec)) as writer:
        for episode in episodes:
            writer.add(to_columns(episode, spec), episode.task)
    return DemonstrationsConfig.model_validate({"train_data_paths": str(folder)})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> TrainedPolicy:
    """A classifier that has learned from recorded demonstrations."""
    return learned(tmp_path_factory.mktemp("shown") / "set", arm(0, ignore_terminations=True))


def learned(folder: Path, env: VectorEnv, updates: int = 300) -> TrainedPolicy:
    """Return a classifier of what the expert of an environment shows, recorded in a folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = ImitationData(written(folder, shown(env), env.spec), None, 1, successes=True)
    model = EmbodiedModelConfig(model_type="cnn_policy", hidden_dim=32, add_value_head=False)
    policy = make_model(model, data.spec)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        data.loss(policy, 32).backward()
        optimizer.step()
    return TrainedPolicy(policy, data.spec)


def judge_of(env: VectorEnv, trained: TrainedPolicy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> SuccessJudge:
    monkeypatch.setattr(success_classifier, "load_policy", lambda path: trained)
    return open_judge("classifier", env, {"path": "runs/classifier", **options})


@pytest.mark.nightly
def test_success_classifier_generalises_to_unseen_starts(
    classifier: TrainedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = arm(7, ignore_terminations=True)
    judge = judge_of(env, classifier, monkeypatch)
    assert isinstance(judge, ClassifierJudge)
    right, truth = judged_right(env, judge)
    assert right[truth].mean() > 0.8
    assert right[~truth].mean() > 0.8


def judged_right(env: VectorEnv, judge: ClassifierJudge) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return, for each step of an expert's episodes, whether the judge is right, and whether it is a success."""
    env.reset(0)
    likely: list[NDArray[np.float64]] = []
    solved: list[NDArray[np.bool_]] = []
    for _ in range(50):
        actions = env.expert()
        result = env.step(known(actions)[:, None])
        likely.append(judge.probabilities(result.observations))
        solved.append(env.solved)
    truth = np.concatenate(solved)
    return (np.concatenate(likely) > 0.5) == truth, truth


@pytest.mark.nightly
def test_places_where_success_was_never_seen_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty episodes show success in twenty places: it has to be known in others, too."""

    def touching(seed: int) -> FrankaVisionEnv:
        options = {"points": 1}
        settings = EnvSettings(
            num_envs=20, seed=seed, auto_reset=False, ignore_terminations=True, max_episode_steps=50, options=options
        )
        return FrankaVisionEnv(settings)

    env = touching(7)
    judge = judge_of(env, learned(tmp_path / "set", touching(0), updates=800), monkeypatch)
    assert isinstance(judge, ClassifierJudge)
    right, truth = judged_right(env, judge)
    assert right[truth].mean() > 0.9
    assert right[~truth].mean() > 0.9


@pytest.mark.nightly
def test_the_verdict_is_all_the_reward_there_is(classifier: TrainedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    env = arm(7)
    env.judge = judge_of(env, classifier, monkeypatch, in_a_row=2)
    env.reset(0)
    rewards = np.zeros(EPISODES)
    while not env._episodes.resting.all():
        actions = env.expert()
        result = env.step(known(actions)[:, None])
        rewards += result.rewards[:, 0]
        assert ((result.rewards == 1) == result.terminations).all()
    assert set(rewards.tolist()) <= {0.0, 1.0}
    assert rewards.mean() > 0.8


def test_images_in_a_row_are_of_one_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    env = FrankaVisionEnv(EnvSettings(num_envs=1, max_episode_steps=3))
    judge: Any = object.__new__(ClassifierJudge)
    judge.env, judge.options, judge._in_a_row = env, SimpleNamespace(threshold=0.5, in_a_row=2), np.zeros(1, np.int64)
    likely = iter((0, 0, 1, 1, 1, 0))
    monkeypatch.setattr(judge, "probabilities", lambda seen: np.array([float(next(likely))]))
    env.judge = judge
    env.reset(0)
    ended = [bool(env.step(np.zeros((1, 1, env.action_size), np.float32)).terminations.any()) for _ in range(5)]
    assert ended == [False, False, False, False, True]


def test_a_judge_of_ones_own_may_tell_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saying, "said", {0: "failure"})
    env = FrankaKinEnv(EnvSettings(num_envs=2, task="reach", auto_reset=False))
    env.judge = open_judge(f"{__name__}:Saying", env, {})
    env.reset(0)
    result = env.step(np.ones((2, 1, 7), np.float32))
    assert result.terminations[:, 0].tolist() == [True, False]
    assert result.rewards.tolist() == [[0], [0]]
    assert env.outcomes(np.array([0]), np.array([False])) == ["failed"]


class Saying(SuccessJudge):
    """Says what a test gives it."""

    said: Any = None

    def judge(self, observations: Mapping[str, NDArray[Any]]) -> Any:
        return self.said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "Saying: the verdicts are NoneType"),
        (np.zeros(2, np.bool_), "Saying: the verdicts are ndarray"),
        ({0: True}, "Saying: the verdict on environment 0 is `True`"),
    ],
)
def test_a_judge_that_says_no_verdict_is_refused(said: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saying, "said", said)
    env = FrankaKinEnv(EnvSettings(num_envs=2, task="reach"))
    env.judge = open_judge(f"{__name__}:Saying", env, {})
    env.reset(0)
    with pytest.raises(InterventionError, match=message):
        env.step(np.ones((2, 1, 7), np.float32))


class Slope(FrankaKinEnv):
    """The arm falls down in the first environment, and solves its task in the second one."""

    def _advance(self, actions: NDArray[np.float32], rows: NDArray[np.int64] | None) -> Transition:
        solved = np.array([False, True])
        return Transition(np.array([-100, 1], np.float32), np.array([True, True]), successes=solved)


def test_a_fall_ends_an_episode_that_somebody_else_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's own success ends nothing, as a judge says what a success is; its failures are no judgement."""
    monkeypatch.setattr(Saying, "said", {})
    env = Slope(EnvSettings(num_envs=2, task="reach", auto_reset=False))
    env.judge = open_judge(f"{__name__}:Saying", env, {})
    env.reset(0)
    result = env.step(np.ones((2, 1, 7), np.float32))
    assert result.terminations[:, 0].tolist() == [True, False]
    assert result.rewards.tolist() == [[0], [0]]
    assert not env.solved.any()


class Device(InterventionSource):
    """A device whose key for success is pressed before the second step, while the stick is moved."""

    opened = 0

    def __init__(self, env: Any, options: Any) -> None:
        super().__init__(env, options)
        Device.opened += 1
        self.looks = 0

    def read(self) -> Takeover | None:
        self.looks += 1
        pressed: dict[int, Verdict] = {0: "success"} if self.looks == 2 else {}
        return Takeover(np.array([True]), np.ones((1, 7), np.float32), pressed)


def test_keys_judge_without_moving_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "open_source", lambda name, env, options: Device(env, options))
    Device.opened = 0
    env = FrankaKinEnv(EnvSettings(num_envs=1, task="reach", auto_reset=False))
    env.judge = open_judge("keys", env, {"device": "gamepad"})
    start = env.reset(0)["states"]
    first = env.step(np.zeros((1, 1, 7), np.float32))
    assert np.allclose(first.observations["states"], start)
    assert (first.rewards[0, 0], first.terminations[0, 0]) == (0, False)
    second = env.step(np.zeros((1, 1, 7), np.float32))
    assert (second.rewards[0, 0], second.terminations[0, 0]) == (1, True)
    assert Device.opened == 1


def test_the_keys_of_who_takes_over_are_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "open_source", lambda name, env, options: pytest.fail("a second device was opened"))
    env = FrankaKinEnv(EnvSettings(num_envs=1, task="reach", auto_reset=False))
    env.intervention, env.judge = Device(env, None), open_judge("keys", env, {})
    env.reset(0)
    rewards = [float(env.step(np.zeros((1, 1, 7), np.float32)).rewards[0, 0]) for _ in range(2)]
    assert rewards == [0, 1]


def test_what_differs_little_from_a_bright_image_is_learned() -> None:
    """A dark block in the left or in the right half: by each seed, as what all images share gives no ReLU its sign."""
    random, side = np.random.default_rng(0), np.arange(64) % 2
    images = np.full((64, 32, 32, 3), 255, np.uint8)
    for image, half in zip(images, side, strict=True):
        row, column = random.integers(0, 29), random.integers(0, 13) + 16 * half
        image[row : row + 3, column : column + 3] = 0
    model = EmbodiedModelConfig(model_type="cnn_policy", hidden_dim=32, add_value_head=False)
    for seed in range(3):
        torch.manual_seed(seed)
        policy = make_model(model, EnvSpec(0, 1, num_choices=2, cameras={"main": (32, 32, 3)}))
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        inputs, labels = policy.prepare({"images.main": images}), torch.from_numpy(side)[:, None, None]
        for _ in range(40):
            optimizer.zero_grad()
            loss = -policy(inputs, labels).logprobs.mean()
            loss.backward()
            optimizer.step()
        assert float(loss.detach()) < 0.03, seed


def test_what_shows_no_success_teaches_none(tmp_path: Path) -> None:
    env = arm(0, episodes=2)
    config = written(tmp_path / "set", shown(env), env.spec)  # every episode ends with its success
    with pytest.raises(DatasetError, match="no picture of the demonstrations shows the task solved") as caught:
        ImitationData(config, None, 1, successes=True)
    assert "ignore_terminations=true" in (caught.value.help or "")


def test_a_classifier_of_other_cameras_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = learned(tmp_path / "set", arm(0, episodes=2, ignore_terminations=True), updates=1)
    blind = FrankaKinEnv(EnvSettings(num_envs=1, task="reach"))
    with pytest.raises(ConfigError, match="no cameras"):
        judge_of(blind, classifier, monkeypatch)


def test_a_policy_is_no_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EnvSpec(21, 8)
    acting = TrainedPolicy(make_model(EmbodiedModelConfig(hidden_dim=8), spec), spec)
    monkeypatch.setattr(success_classifier, "load_policy", lambda path: acting)
    with pytest.raises(ConfigError, match="not a success classifier"):
        ClassifierJudge(arm(0), ClassifierOptions(path="runs/policy"))
