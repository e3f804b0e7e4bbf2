"""What every environment keeps to: how episodes end and start again, what is told, and how breaches are found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes.embodied.config.env_config import RecordedEnvironmentConfig
from recipes.embodied.config.env_types import ENV_TYPES, is_robot
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.contract import check_env
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts, State, pack, unpack
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.registry import EnvContractError, MissingPackageError, make_env
from recipes.training.arrays import NonFiniteError
from rlinf_core import ConfigError
from tests.known import known

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


class Seen(Walk):
    """A walk with a camera and the task in words."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=1, action_size=1, cameras={"wrist": (2, 3, 3)}, has_instructions=True)

    def _observe(self) -> Observation:
        images = np.repeat((100 * self.place).astype(np.uint8), 18).reshape(-1, 2, 3, 3)
        words = np.array(["walk"] * self.num_envs)
        return {**super()._observe(), image_key("wrist"): images, "instructions": words}


def observed(change: Callable[[Any, Any], Any], of: type[Walk] = Walk) -> type[VectorEnv]:
    """Return a walk that observes what a function makes of it and of the right observation."""

    class Observed(of):
        def _observe(self) -> Observation:
            return change(self, super()._observe())

    return Observed


def rewarded(change: Callable[[FloatArray], Any]) -> type[VectorEnv]:
    """Return a walk whose rewards are what a function makes of the right ones."""

    class Rewarded(Walk):
        def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
            moved = super()._advance(actions, rows)
            return replace(moved, rewards=change(moved.rewards))

    return Rewarded


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


@pytest.mark.parametrize("sound", [Walk, rewarded(lambda rewards: rewards), Altering, Saved, Seen])
def test_a_sound_one_passes(sound: Callable[[EnvSettings], VectorEnv]) -> None:
    check_env(sound)


BROKEN: dict[str, tuple[Callable[[EnvSettings], VectorEnv], str]] = {
    "unseeded": (Unseeded, "two different histories"),
    "mixed": (observed(lambda env, seen: {"states": seen["states"] - env.place.mean(dtype=np.float32)}), "depends on"),
    "ungrouped": (Ungrouped, "of one group start differently"),
    "overwriting": (Overwriting, "changed after it was returned"),
    "restless": (Restless, "moved while it was inactive"),
    "wide": (
        observed(lambda env, _: {"states": env.place[:, None]}),
        r"`states` is float64\[4, 1\]; `spec` says float32",
    ),
    "blind": (observed(lambda env, _: {"positions": env.place[:, None]}), "which is not observed"),
    "flipped": (
        observed(lambda _, seen: seen | {"images.wrist": seen["images.wrist"].transpose(0, 2, 1, 3)}, Seen),
        r"`images.wrist` is uint8\[4, 3, 2, 3\]; `spec` says uint8\[4, 2, 3, 3\]",
    ),
    "wordless": (
        observed(lambda _, seen: seen | {"instructions": np.zeros(len(seen["states"]), np.int64)}, Seen),
        r"`instructions` is int64\[4\]; `spec` says text\[4\]",
    ),
    "talkative": (
        observed(lambda _, seen: seen | {"instructions": np.array(["walk"] * len(seen["states"]))}),
        "the observation `instructions` is not declared in `spec`",
    ),
    "endless": (
        observed(lambda _, seen: {"states": seen["states"] * np.float32("nan")}),
        "`observation states` is nan, not a finite number",
    ),
    "priceless": (rewarded(lambda rewards: rewards + np.float32("inf")), "`reward` is inf, not a finite number"),
    "one for all": (rewarded(lambda _: 1.0), r"`rewards` of a step is float; expected float32\[4\]"),
    "total": (rewarded(lambda _: np.float32(1)), r"`rewards` of a step is float32; expected"),
    "column": (
        rewarded(lambda rewards: rewards[:, None]),
        r"`rewards` of a step is float32\[4, 1\]; expected float32\[4\]",
    ),
    "double": (rewarded(lambda rewards: rewards.astype(np.float64)), r"`rewards` of a step is float64\[4\]; expected"),
    "compared": (rewarded(lambda rewards: rewards - rewards.mean()), "depends on others in the batch"),
    "dice": (
        rewarded(lambda rewards: rewards + np.random.default_rng().random(len(rewards), np.float32)),
        "two different histories",
    ),
    "ended": (Ended, r"`terminations` of a step is int64\[4\]; expected bool\[4\]"),
    "secretly": (Secretly, "`actions`, and the environment says that it alters none"),
    "flat": (Flat, r"`actions` of a step are float32\[4\]; expected float32\[4, 1\]"),
    "unknowing": (Unknowing, "`executed action` is nan, not a finite number"),
    "forgetful": (Forgetful, "does not lead back"),
    "hidden": (Hidden, "continues differently"),
    "other": (lambda settings: cast("Any", settings), "`EnvSettings` is no `VectorEnv`"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(name: str) -> None:
    broken, said = BROKEN[name]
    with pytest.raises(EnvContractError, match=said) as caught:
        check_env(broken)
    assert caught.value.help


LATER: dict[str, tuple[Callable[[Any], Any], type[Walk], str]] = {
    "one for all": (
        lambda moved: replace(moved, rewards=np.float32(1)),
        Walk,
        "`rewards` of a step is float32; expected",
    ),
    "ended": (
        lambda moved: replace(moved, terminations=[True, True]),
        Walk,
        "`terminations` of a step is list; expected",
    ),
    "solved": (
        lambda moved: replace(moved, successes=np.ones(1, np.bool_)),
        Walk,
        r"`successes` .* is bool\[1\]; expected",
    ),
    "flat": (
        lambda moved: replace(moved, actions=moved.actions[:, 0]),
        Altering,
        r"`actions` of a step are float32\[2\]",
    ),
    "nothing": (lambda moved: None, Walk, "a step returns NoneType"),
    "wide": (lambda seen: seen | {"states": seen["states"].astype(np.float64)}, Walk, "`states` is float64"),
    "long": (lambda seen: seen | {"states": seen["states"].repeat(2, axis=1)}, Walk, r"`states` is float32\[2, 2\]"),
    "blind": (lambda seen: {}, Walk, "`states`, which is not observed"),
    "empty": (lambda seen: None, Walk, "`_observe` returns NoneType"),
    "listed": (lambda seen: seen | {"instructions": ["walk", "walk"]}, Seen, r"`instructions` is list; .* text\[2\]"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_promise_that_is_broken_later_is_found(name: str) -> None:
    change, kind, said = LATER[name]

    class Later(kind):
        def changed(self, value: Any) -> Any:
            return change(value) if self._episodes.steps[0] + isinstance(value, Transition) == 3 else value

        def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
            moved = super()._advance(actions, rows)
            return self.changed(moved) if "seen" not in inspect.signature(change).parameters else moved

        def _observe(self) -> Observation:
            seen = super()._observe()
            return self.changed(seen) if "seen" in inspect.signature(change).parameters else seen

    env = Later(EnvSettings(num_envs=2))
    env.reset()
    for _ in range(2):
        env.step(np.zeros((2, 1, 1), np.float32))
    with pytest.raises(EnvContractError, match=said):
        env.step(np.zeros((2, 1, 1), np.float32))


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), "20", True, np.ones(2)])
def test_a_rate_is_a_number_of_actions(rate: Any) -> None:
    env = Walk(EnvSettings(num_envs=2))
    env.control_hz = rate
    with pytest.raises(EnvContractError, match="not a number of actions per second"):
        env.reset()
    env.control_hz = np.float32(20)  # type: ignore[assignment]
    env.reset()


@pytest.mark.parametrize("kind", [Unseeded, Ungrouped])
def test_members_that_start_differently_are_refused(kind: type[Walk]) -> None:
    with pytest.raises(EnvContractError, match="environments 4 and 5 of one group start differently") as caught:
        kind(EnvSettings(num_envs=2, first_env=4, group_size=2)).reset()
    assert "super().reset(seed=seed)" in (caught.value.help or "")
    assert "`group_size: 1`" in (caught.value.help or "")


def test_the_first_step_shows_that_observations_stay() -> None:
    env = Overwriting(EnvSettings(num_envs=2))
    env.reset()
    with pytest.raises(EnvContractError, match="changed after it was returned"):
        env.step(np.ones((2, 1, 1), np.float32))


def test_success_that_is_never_reported_is_not_known() -> None:
    env = Walk(EnvSettings(num_envs=2, max_episode_steps=1))
    env.reset()
    result = env.step(np.ones((2, 1, 1), np.float32))
    assert known(result.episodes).success_once is None


class Choosing(Walk):
    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=1, action_size=1, num_choices=3)


@pytest.mark.parametrize(
    ("kind", "actions", "said"),
    [
        (Walk, np.zeros((2, 1), np.float32), r"float32 \[2, 1\]; the environments take float32 \[2, C, 1\]"),
        (Walk, np.zeros((2, 1, 2), np.float32), r"float32 \[2, 1, 2\]"),
        (Walk, np.zeros((3, 1, 1), np.float32), r"float32 \[3, 1, 1\]"),
        (Choosing, np.full((2, 1, 1), 0.9, np.float32), r"float32 \[2, 1, 1\]; the environments take int64"),
        (Choosing, np.full((2, 1, 1), 3), "actions go from 3 to 3; the environments take one of 3, from 0"),
        (Choosing, np.full((2, 1, 1), -1), "actions go from -1 to -1"),
    ],
)
def test_actions_that_do_not_exist_are_refused(kind: type[Walk], actions: NDArray[Any], said: str) -> None:
    env = kind(EnvSettings(num_envs=2))
    env.reset()
    with pytest.raises(ConfigError, match=said) as caught:
        env.step(actions)
    assert "to_env" in (caught.value.help or "")


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


Make = Callable[..., VectorEnv]


def act(env: VectorEnv, reward: float = 1.0, chunk: int = 1) -> Any:
    return env.step(np.full((env.num_envs, chunk, 1), reward, np.float32))


def test_an_episode_is_cut_off_at_its_limit(counting: Make) -> None:
    env = counting(2, max_episode_steps=3)
    env.reset()
    results = [act(env, reward) for reward in (1.0, 2.0, 4.0, 8.0)]
    assert [result.truncations.any() for result in results] == [False, False, True, False]
    assert not any(result.terminations.any() for result in results)
    end = results[2]
    assert end.final_observations["states"][:, 0].tolist() == [3, 3]
    assert end.observations["states"][:, 0].tolist() == [0, 0]
    assert end.episodes.returns.tolist() == [7, 7]
    assert end.episodes.lengths.tolist() == [3, 3]
    assert end.episodes.number.tolist() == [0, 0]
    assert results[3].observations["states"][:, 0].tolist() == [1, 1]
    assert results[3].episodes is None
    assert all(result.valid.all() for result in results)


def test_a_task_that_ends_starts_again_alone(counting: Make) -> None:
    env = counting(3, options={"end": [2, 0, 2]})
    first = env.reset()["states"].copy()
    act(env)
    result = act(env)
    assert result.terminations[:, 0].tolist() == [True, False, True]
    assert not result.truncations.any()
    assert result.dones[:, 0].tolist() == [True, False, True]
    assert result.episodes.env.tolist() == [0, 2]
    assert result.observations["states"][:, 0].tolist() == [0, 2, 0]
    assert result.final_observations["states"][:, 0].tolist() == [2, 2, 2]
    after = result.observations["states"][:, 1]
    assert after[1] == first[1, 1]
    assert after[0] != first[0, 1]


def test_an_end_and_a_limit_at_once_are_both_told(counting: Make) -> None:
    env = counting(1, options={"end": [1]}, max_episode_steps=1)
    env.reset()
    result = act(env)
    assert result.terminations.all()
    assert result.truncations.all()


def test_terminations_can_be_ignored(counting: Make) -> None:
    env = counting(1, options={"end": [1], "solved": 1}, max_episode_steps=2, ignore_terminations=True)
    env.reset()
    assert not act(env).dones.any()
    end = act(env)
    assert not end.terminations.any()
    assert end.truncations.all()
    assert end.episodes.success_once.tolist() == [True]
    assert end.episodes.success_at_end.tolist() == [False]


@pytest.mark.parametrize("chunk", [1, 4])
def test_only_the_first_success_is_rewarded(counting: Make, chunk: int) -> None:
    settings = {"reward_coef": 5.0, "success_reward": True, "ignore_terminations": True}
    env = counting(2, options={"solved": 2}, max_episode_steps=4, **settings)
    env.reset()
    results = [act(env, 9.0, chunk) for _ in range(4 // chunk)]
    assert np.concatenate([result.rewards for result in results], axis=1).tolist() == [[0, 5, 0, 0]] * 2
    ended = results[-1].episodes
    assert ended.lengths.tolist() == [4, 4]
    assert ended.success_once.all()


def test_rewards_are_scaled(counting: Make) -> None:
    env = counting(2, reward_coef=0.5)
    env.reset()
    assert act(env, 3.0).rewards.tolist() == [[1.5], [1.5]]


def test_without_auto_reset_an_environment_rests(counting: Make) -> None:
    env = counting(2, options={"end": [1, 0]}, max_episode_steps=3, auto_reset=False)
    env.reset()
    results = [act(env) for _ in range(4)]
    assert [result.valid[:, 0].tolist() for result in results] == [[True, True]] + 2 * [[False, True]] + [[False] * 2]
    assert [result.rewards[0, 0] for result in results] == [1, 0, 0, 0]
    assert [result.dones[:, 0].tolist() for result in results] == [
        [True, False],
        [False, False],
        [False, True],
        [False, False],
    ]
    assert results[3].observations["states"][:, 0].tolist() == [1, 3]
    assert [None if r.episodes is None else r.episodes.env.tolist() for r in results] == [[0], None, [1], None]
    assert env.reset()["states"][:, 0].tolist() == [0, 0]
    assert act(env).valid.all()


def test_the_rest_of_a_chunk_is_dropped_when_an_episode_ends(counting: Make) -> None:
    env = counting(2, options={"end": [2, 0]}, max_episode_steps=7)
    env.reset()
    result = act(env, chunk=4)
    assert result.valid.tolist() == [[True, True, False, False], [True] * 4]
    assert result.rewards.tolist() == [[1, 1, 0, 0], [1] * 4]
    assert result.terminations.tolist() == [[False, True, False, False], [False] * 4]
    assert result.observations["states"][:, 0].tolist() == [0, 4]
    assert result.episodes.lengths.tolist() == [2]


@given(st.integers(0, 1000), st.lists(st.integers(1, 6), min_size=4, max_size=4), st.booleans(), st.integers(1, 9))
def test_returns_and_lengths_are_those_of_what_was_carried_out(
    counting: Make, seed: int, ends: list[int], auto_reset: bool, limit: int
) -> None:
    """The same actions in chunks: episodes add up to exactly the valid rewards."""
    random = np.random.default_rng(seed)
    env = counting(4, options={"end": ends}, auto_reset=auto_reset, max_episode_steps=limit)
    env.reset()
    running, length = np.zeros(4), np.zeros(4, np.int64)
    for _ in range(10):
        result = env.step(random.integers(0, 9, size=(4, 3, 1)).astype(np.float32))
        running += result.rewards.sum(axis=1)
        length += result.valid.sum(axis=1)
        assert not result.rewards[~result.valid].any()
        assert not result.dones[~result.valid].any()
        assert (result.dones.sum(axis=1) <= 1).all()
        if result.episodes is None:
            assert not result.dones.any()
            continue
        rows = result.episodes.env
        assert rows.tolist() == np.flatnonzero(result.dones.any(axis=1)).tolist()
        assert result.episodes.returns.tolist() == running[rows].tolist()
        assert result.episodes.lengths.tolist() == length[rows].tolist()
        assert (length[rows] == np.minimum(np.array(ends), limit)[rows]).all()
        running[rows], length[rows] = 0, 0


def test_groups_begin_equal_in_every_episode(counting: Make) -> None:
    env = counting(6, group_size=3, max_episode_steps=1)
    draws = [env.reset()["states"][:, 1], act(env).observations["states"][:, 1], env.reset()["states"][:, 1]]
    for draw in draws:
        assert len(set(draw[:3])) == len(set(draw[3:])) == 1
        assert draw[0] != draw[3]
    assert len({draw[0] for draw in draws}) == 3


def test_the_number_of_a_reset_tells_its_starts(counting: Make) -> None:
    env, later = counting(seed=1), counting(seed=1)
    starts = [env.reset()["states"][:, 1].tolist() for _ in range(3)]
    assert later.reset(2)["states"][:, 1].tolist() == starts[2]
    assert later.reset(0)["states"][:, 1].tolist() == starts[0]
    assert later.reset()["states"][:, 1].tolist() == starts[1]
    assert counting(seed=2).reset()["states"][:, 1].tolist() != starts[0]


def test_the_limit_of_the_environment_holds_where_none_is_given(counting: Make) -> None:
    assert counting(1).max_episode_steps == 50
    assert counting(1, max_episode_steps=7).max_episode_steps == 7


@pytest.mark.parametrize(("breaks", "tensor"), [("reward", "reward"), ("observation", "observation states")])
def test_what_is_not_finite_is_told_at_once(counting: Make, breaks: str, tensor: str) -> None:
    env = counting(3, first_env=6, options={"broken": [0, 2, 2], "breaks": breaks})
    env.reset()
    act(env)
    with pytest.raises(NonFiniteError, match=f"`{tensor}` is nan, not a finite number") as caught:
        act(env)
    steps = 1 if breaks == "reward" else 2
    assert caught.value.where == f"environment 7, after {steps} steps of its episode 1"
    assert "division by zero" in str(caught.value.help)
    assert "a number beyond 3.4e38" in str(caught.value.help)


def test_nonfinite_action_is_reported_before_it_runs(counting: Make) -> None:
    env = counting(2, on_nonfinite="skip")
    env.reset()
    with pytest.raises(NonFiniteError, match="`action` is inf") as caught:
        env.step(np.array([[[0.0]], [[np.inf]]], np.float32))
    assert "the policy" in str(caught.value.help)
    assert env.observe()["states"][:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("breaks", ["reward", "observation"])
def test_a_step_that_is_not_finite_can_be_left_out(counting: Make, breaks: str) -> None:
    env = counting(2, options={"broken": [0, 2], "breaks": breaks}, on_nonfinite="skip")
    env.reset()
    result = act(env, chunk=2)
    assert result.valid.tolist() == [[True, True], [True, False]]
    assert result.truncations.tolist() == [[False, False], [False, True]]
    assert np.isfinite(result.rewards).all()
    assert np.isfinite(result.final_observations["states"]).all()
    assert result.episodes.env.tolist() == [1]
    # It goes on with a new episode.
    assert result.observations["states"][:, 0].tolist() == [2, 0]
    assert act(env).valid.all()


def test_a_state_continues_elsewhere_in_other_batches(counting: Make) -> None:
    """Two batches of two, one of which is at its second reset's third episode, go on as one batch of four."""
    options = {"max_episode_steps": 3, "seed": 4, "group_size": 2}
    halves = [counting(2, first_env=first, **options) for first in (0, 2)]
    for half in halves:
        half.reset(1)
        for reward in range(7):
            act(half, reward)
    states = [half.save() for half in halves]
    packs = [pack([state], "setup") for state in states if state is not None]
    whole = counting(4, **options)
    unpacked = unpack(reversed(packs), "setup", whole.numbers)
    assert whole.load(known(unpacked))
    assert whole.started
    for reward in (3, 1, 4, 1, 5):
        expected = [act(half, reward) for half in halves]
        result = act(whole, reward)
        assert np.array_equal(
            result.observations["states"], np.concatenate([item.observations["states"] for item in expected])
        )
        assert (result.episodes is None) == (expected[0].episodes is None)
        if result.episodes is not None:
            returns = [item.episodes.returns for item in expected if item.episodes is not None]
            assert np.array_equal(result.episodes.returns, np.concatenate(returns))


def test_settings_are_those_of_the_section() -> None:
    config = RecordedEnvironmentConfig.model_validate(
        {"task": "reach", "max_episode_steps": 7, "auto_reset": False, "ignore_terminations": True, "seed": 3}
    )
    settings = EnvSettings.of(config, num_envs=8, first_env=16, group_size=4)
    assert settings == EnvSettings(
        num_envs=8,
        first_env=16,
        total_envs=64,
        task="reach",
        max_episode_steps=7,
        auto_reset=False,
        ignore_terminations=True,
        group_size=4,
        seed=3,
        options={},
        repeats=True,
    )
