"""Every environment of ours keeps the promises of `VectorEnv`; and what breaks one is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.config.env_types import ENV_TYPES, is_robot
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.contract import EnvContractError, check_env
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import State
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.registry import MissingPackageError, make_env
from recipes.embodied.envs.starts import Starts

OURS = [(name, task) for name, known in ENV_TYPES.items() if not is_robot(name) for task in known.tasks]
OTHERS = [("gymnasium", "CartPole-v1"), ("gymnasium", "Pendulum-v1"), ("panda_gym", "PandaReach-v3")]


@pytest.mark.parametrize(("kind", "task"), OURS + OTHERS)
def test_ours_keep_their_promises(kind: str, task: str) -> None:
    try:
        check_env(lambda settings: make_env(kind, settings), task=task)
    except MissingPackageError as error:
        pytest.skip(str(error.message))


class Walk(VectorEnv):
    """Keeps every promise; the sabotages below break one each."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.place = np.zeros(self.num_envs)
        self.starts = 0

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=1, action_size=1)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        self.place[rows] = starts.uniform(1)[:, 0]

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        self.place = self.place + np.where(self._episodes.resting, 0, actions[:, 0])
        return Transition(self.place.astype(np.float32), np.zeros(self.num_envs, np.bool_))

    def _observe(self) -> Observation:
        return {"states": self.place[:, None].astype(np.float32)}


class Unseeded(Walk):
    def _start(self, rows: IntArray, starts: Starts) -> None:
        self.place[rows] = np.random.default_rng().random(len(rows))


class Mixed(Walk):
    def _observe(self) -> Observation:
        return {"states": (self.place - self.place.mean())[:, None].astype(np.float32)}


class Ungrouped(Walk):
    def _start(self, rows: IntArray, starts: Starts) -> None:
        self.place[rows] = starts.uniform(1)[:, 0] + self.settings.first_env + rows


class Overwriting(Walk):
    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.buffer = np.zeros((self.num_envs, 1), np.float32)

    def _observe(self) -> Observation:
        self.buffer[:, 0] = self.place
        return {"states": self.buffer}


class Restless(Walk):
    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        self.place = self.place + actions[:, 0]
        return Transition(self.place.astype(np.float32), np.zeros(self.num_envs, np.bool_))


class Wide(Walk):
    def _observe(self) -> Observation:
        return {"states": self.place[:, None]}


class Blind(Walk):
    def _observe(self) -> Observation:
        return {"positions": self.place[:, None]}


class Seen(Walk):
    """A walk with a camera and the task in words."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=1, action_size=1, cameras={"wrist": (2, 3, 3)}, has_instructions=True)

    def _observe(self) -> Observation:
        images = np.repeat((100 * self.place).astype(np.uint8), 18).reshape(-1, 2, 3, 3)
        words = np.array(["walk"] * self.num_envs)
        return {**super()._observe(), image_key("wrist"): images, "instructions": words}


class Flipped(Seen):
    def _observe(self) -> Observation:
        result = super()._observe()
        return {**result, "images.wrist": result["images.wrist"].transpose(0, 2, 1, 3)}


class Wordless(Seen):
    def _observe(self) -> Observation:
        return {**super()._observe(), "instructions": np.zeros(self.num_envs, np.int64)}


class Talkative(Walk):
    def _observe(self) -> Observation:
        return {**super()._observe(), "instructions": np.array(["walk"] * self.num_envs)}


class Endless(Walk):
    def _observe(self) -> Observation:
        return {"states": np.full((self.num_envs, 1), np.nan, np.float32)}


class Priceless(Walk):
    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        return Transition(np.full(self.num_envs, np.inf, np.float32), np.zeros(self.num_envs, np.bool_))


class Rewarded(Walk):
    """A walk whose rewards are what `reward` makes of the right ones."""

    def reward(self, rewards: FloatArray) -> Any:
        return rewards

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        moved = super()._advance(actions, rows)
        return replace(moved, rewards=self.reward(moved.rewards))


class OneForAll(Rewarded):
    def reward(self, rewards: FloatArray) -> Any:
        return 1.0


class Total(Rewarded):
    def reward(self, rewards: FloatArray) -> Any:
        return np.float32(1)


class Column(Rewarded):
    def reward(self, rewards: FloatArray) -> Any:
        return rewards[:, None]


class Double(Rewarded):
    def reward(self, rewards: FloatArray) -> Any:
        return rewards.astype(np.float64)


class Compared(Rewarded):
    def reward(self, rewards: FloatArray) -> Any:
        return rewards - rewards.mean()


class Dice(Rewarded):
    def reward(self, rewards: FloatArray) -> Any:
        return rewards + np.random.default_rng().random(self.num_envs, np.float32)


class Ended(Walk):
    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        return replace(super()._advance(actions, rows), terminations=np.zeros(self.num_envs, np.int64))


class Altering(Walk):
    """A walk with half steps, which says so by what `altered` makes of them."""

    alters_actions = True

    def altered(self, actions: FloatArray) -> Any:
        return actions

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        half = (actions / 2).astype(np.float32)
        return replace(super()._advance(half, rows), actions=self.altered(half))


class Secretly(Altering):
    alters_actions = False


class Flat(Altering):
    def altered(self, actions: FloatArray) -> Any:
        return actions[:, 0]


class Unknowing(Altering):
    def altered(self, actions: FloatArray) -> Any:
        return actions * np.float32("nan")


class Saved(Walk):
    """Keeps the promise of `_save`, too."""

    def _save(self) -> State:
        return {"place": self.place}

    def _load(self, state: State) -> None:
        self.place = state["place"].copy()


class Forgetful(Saved):
    def _load(self, state: State) -> None:
        self.place = np.zeros(self.num_envs)


class Hidden(Saved):
    """Walks faster with every step, and forgets how fast."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.speed = np.ones(self.num_envs)

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        self.speed = np.where(self._episodes.resting, self.speed, self.speed + 1)
        return super()._advance(actions * self.speed[:, None], rows)


@pytest.mark.parametrize("sound", [Walk, Rewarded, Altering, Saved, Seen])
def test_a_sound_one_passes(sound: Callable[[EnvSettings], VectorEnv]) -> None:
    check_env(sound)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Unseeded, "two different histories"),
        (Mixed, "depends on others in the batch"),
        (Ungrouped, "start differently"),
        (Overwriting, "changed after it was returned"),
        (Restless, "moved while it was inactive"),
        (Wide, r"`states` is float64\[4, 1\]; `spec` says float32\[4, 1\]"),
        (Blind, "which is not observed"),
        (Flipped, r"`images.wrist` is uint8\[4, 3, 2, 3\]; `spec` says uint8\[4, 2, 3, 3\]"),
        (Wordless, r"`instructions` is int64\[4\]; `spec` says text\[4\]"),
        (Talkative, "the observation `instructions` is not declared in `spec`"),
        (Endless, "`observation states` is nan, not a finite number"),
        (Priceless, "`reward` is inf, not a finite number"),
        (OneForAll, r"`rewards` of a step is float; expected float32\[4\]"),
        (Total, r"`rewards` of a step is float32; expected"),
        (Column, r"`rewards` of a step is float32\[4, 1\]; expected float32\[4\]"),
        (Double, r"`rewards` of a step is float64\[4\]; expected"),
        (Compared, "depends on others in the batch"),
        (Dice, "two different histories"),
        (Ended, r"`terminations` of a step is int64\[4\]; expected bool\[4\]"),
        (Secretly, "`actions`, and the environment says that it alters none"),
        (Flat, r"`actions` of a step are float32\[4\]; expected float32\[4, 1\]"),
        (Unknowing, "`executed action` is nan, not a finite number"),
        (Forgetful, "does not lead back"),
        (Hidden, "continues differently"),
    ],
)
def test_a_broken_promise_is_found(broken: Callable[[EnvSettings], VectorEnv], said: str) -> None:
    with pytest.raises(EnvContractError, match=said) as caught:
        check_env(broken)
    assert caught.value.help


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8, 2), (8, 8, 4), (3, 8, 8), (8, 8)])
def test_a_camera_has_three_colours(shape: tuple[int, ...]) -> None:
    class Seeing(Walk):
        @property
        def spec(self) -> EnvSpec:
            return EnvSpec(state_size=1, action_size=1, cameras={"depth": shape})  # type: ignore[dict-item]

        def _observe(self) -> Observation:
            return {**super()._observe(), image_key("depth"): np.zeros((self.num_envs, *shape), np.uint8)}

    with pytest.raises(EnvContractError, match=r"images of `depth` are .*; those of a camera are RGB") as caught:
        Seeing(EnvSettings(num_envs=2)).reset()
    assert "repeat a grey channel three times" in str(caught.value.help)
