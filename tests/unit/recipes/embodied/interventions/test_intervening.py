"""Who acted in each step, from the source to the replay buffer and to demonstrations."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.demonstrations import Demonstrations
from recipes.embodied.config.intervention_types import PersonOptions, ScriptedOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.checks import EnvContractError
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Transition
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.intervention import HandMotion, InterventionError, InterventionSource, Takeover
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.registry import BLOCK, ScriptedSource, open_source, takeover_steps
from recipes.embodied.learning.imitation import imitated_rows
from recipes.embodied.learning.trajectory import RolloutBuffer
from recipes.embodied.loop.protocols import EXECUTED, INTERVENTIONS
from recipes.embodied.models.base_policy import PolicyOutput
from recipes.embodied.off_policy.buffer import ReplayBuffer
from recipes.embodied.off_policy.off_policy_rollout import record_step
from recipes.embodied.off_policy.sources import add_steps, intervened, transition_spec, transition_steps
from recipes.embodied.using.collector import EpisodeCollector
from recipes.embodied.using.recording import features_of, to_columns
from rlinf_core.errors import ConfigError
from tests.known import known
from tests.unit.recipes.embodied.conftest import CountingEnv

OPTIONS = ScriptedOptions(probability=0.1, shortest=2, longest=6, seed=7)


def arm(num_envs: int = 3, *, task: str = "pick", **settings: Any) -> VectorEnv:
    return make_env("franka_kin", EnvSettings(num_envs=num_envs, task=task, max_episode_steps=30, **settings))


class Witness(ScriptedSource):
    """The scripted expert, with a note of what it did in each step."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env, OPTIONS)
        self.rows: list[np.ndarray] = []
        self.actions: list[np.ndarray | None] = []

    def read(self) -> Takeover | None:
        text = super().read()
        self.rows.append(np.zeros(self.env.num_envs, np.bool_) if text is None else text.rows.copy())
        self.actions.append(None if text is None else text.actions.copy())
        return text


class Script(InterventionSource):
    """Does what a test says, one entry for each step."""

    def __init__(self, env: VectorEnv, *steps: Takeover | None) -> None:
        super().__init__(env, None)
        self.steps = list(steps)

    def read(self) -> Takeover | None:
        return self.steps.pop(0) if self.steps else None


def takeover(*rows: int, envs: int = 2, value: float = 0.5, **verdicts: Any) -> Takeover:
    taken = np.isin(np.arange(envs), rows)
    return Takeover(taken, np.full((envs, 1), value, np.float32), {int(k[1:]): v for k, v in verdicts.items()})


def counted(*steps: Takeover | None, **settings: Any) -> CountingEnv:
    """Return two environments that have begun, in which somebody takes over as a script says."""
    env = CountingEnv(EnvSettings(num_envs=2, **settings))
    env.intervention = Script(env, *steps)
    env.reset(0)
    return env


def act(env: VectorEnv, value: float = 0.0, chunk: int = 1) -> Any:
    return env.step(np.full((env.num_envs, chunk, env.action_size), value, np.float32))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            Takeover(np.ones(2, np.bool_), np.ones(2, np.float32), {}),
            r"float32\[2\]; expected bool\[2\] and numbers\[2, 1",
        ),
        (Takeover(np.array([0]), np.ones((2, 1), np.float32), {}), r"`rows` int64\[1\]"),  # type: ignore[arg-type]
        (Takeover(np.ones(2, np.bool_), np.ones((1, 1), np.float32), {}), r"`actions` float32\[1, 1\]"),
        (replace(takeover(0), actions=[["1"], ["2"]]), r"`actions` <U1\[2, 1\]"),
        (takeover(0, r0="failed"), "the verdict on environment 0 is `failed`"),
        (takeover(0, r0=True), "the verdict on environment 0 is `True`"),
        (takeover(0, r2="success"), "the verdict on environment 2 is `success`; there are 2"),
        (replace(takeover(0), rewards={-1: 1.0}), "the reward of environment -1 is 1.0; there are 2"),
        (replace(takeover(0), rewards={0: float("nan")}), "the reward of environment 0 is nan"),
    ],
)
def test_takeovers_that_mean_other_rows_or_words_are_refused(wrong: Takeover, said: str) -> None:
    env = counted(wrong)
    with pytest.raises(InterventionError, match=said) as caught:
        act(env)
    assert "Script" in str(caught.value)


class Choosing(CountingEnv):
    """Takes one of three choices, which it rewards by their numbers."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=2, action_size=1, num_choices=3)


@pytest.mark.parametrize(
    ("value", "said"), [(2.0, None), (0.5, "none of the 3 choices"), (3.0, "none of the 3 choices")]
)
def test_a_takeover_chooses_what_exists(value: float, said: str | None) -> None:
    env = Choosing(EnvSettings(num_envs=2))
    env.intervention = Script(env, takeover(0, value=value))
    env.reset(0)
    with nullcontext() if said is None else pytest.raises(InterventionError, match=said):
        assert env.step(np.zeros((2, 1, 1), np.int64)).rewards.tolist() == [[2], [0]]


class Lame(CountingEnv):
    """Is steered by one number for all."""

    def steer(self, motion: HandMotion, row: int) -> Any:
        return np.float32(0.5)


class Hand(PersonSource):
    def poll(self) -> Controls:
        return Controls(engaged=True)


def test_what_steer_returns_is_an_action() -> None:
    env = Lame(EnvSettings(num_envs=1))
    env.reset(0)
    with pytest.raises(EnvContractError, match=r"`steer` returns \[\]; an action is \[1\]"):
        env.hold_actions(np.arange(1))
    env.intervention = Hand(env, PersonOptions(hz=1000))
    with pytest.raises(InterventionError, match=r"Hand: a takeover has .* `actions` float32\[1\]"):
        env.step(np.zeros((1, 1, 1), np.float32))


def test_recorded_flags_and_actions_are_the_truth_tick_by_tick() -> None:
    env, ticks = arm(), 200
    witness = env.intervention = Witness(env)
    random = np.random.default_rng(0)
    recorder = RolloutBuffer(ticks, 0)
    observations = env.reset(0)
    asked, numbers = [], []
    for tick in range(ticks):
        actions = random.uniform(-1, 1, (3, 1, 8)).astype(np.float32)
        asked.append(actions[:, 0].copy())
        progress = env.progress
        numbers.append((progress.reset, progress.episode.copy(), progress.steps.copy()))
        states = {"states": torch.from_numpy(observations["states"])}
        recorder.add_action(tick, states, PolicyOutput(torch.from_numpy(actions), torch.zeros(3, 1, 8), None))
        result = env.step(actions)
        outcome = {name: getattr(result, name) for name in ("rewards", "terminations", "truncations", "valid")}
        outcome |= {EXECUTED: known(result.executed), INTERVENTIONS: known(result.interventions)}
        observations = result.observations
        final = observations if result.final_observations is None else result.final_observations
        record_step(recorder, tick, outcome, {"states": torch.from_numpy(final["states"])})
    steps = transition_steps(recorder.finish(None))

    flags = steps[INTERVENTIONS]
    assert np.array_equal(flags, np.stack(witness.rows))
    # The moments are a function of the episode alone: a run that is continued is helped in the same steps.
    for tick, (reset, episodes, counts) in enumerate(numbers):
        for row in range(3):
            drawn = takeover_steps(OPTIONS, row, reset, int(episodes[row]), int(counts[row]) // BLOCK)
            assert flags[tick, row] == drawn[counts[row] % BLOCK], (tick, row)
    assert 0.1 < flags.mean() < 0.6
    for tick in range(ticks):
        theirs = witness.actions[tick]
        for row in range(3):
            wanted = asked[tick][row] if theirs is None or not flags[tick, row] else np.clip(theirs[row], -1, 1)
            assert np.array_equal(steps["actions"][tick, row], wanted), (tick, row)

    everything, helped = (ReplayBuffer(transition_spec(env.spec), 3, 3000) for _ in range(2))
    assert add_steps(everything, steps) == steps["valid"].sum()
    assert add_steps(helped, intervened(steps)) == (flags & steps["valid"]).sum()
    kept = helped.gather(helped.rows, 1, 0.9)
    assert sorted(map(tuple, kept.actions)) == sorted(map(tuple, steps["actions"][flags & steps["valid"]]))


def test_nothing_is_reported_where_nobody_can_intervene() -> None:
    env = arm()
    env.reset()
    result = env.step(np.zeros((3, 1, 8), np.float32))
    assert result.executed is None
    assert result.interventions is None
    steps = {"valid": np.ones((2, 3), np.bool_)}
    assert not intervened(steps)["valid"].any()


def test_a_takeover_in_the_middle_of_a_chunk_ends_the_rest_of_it() -> None:
    env = counted(None, takeover(1))
    result = act(env, 0.25, 4)
    assert result.executed[:, :, 0].tolist() == [[0.25] * 4, [0.25, 0.5, 0, 0]]
    assert result.interventions.tolist() == [[False] * 4, [False, True, False, False]]
    assert result.rewards.tolist() == [[0.25] * 4, [0.25, 0.5, 0, 0]]  # the action is the reward: it was carried out
    assert act(env, 0.25).rewards.tolist() == [[0.25], [0.25]]


class SevenNumbers(CountingEnv):
    """The hand's motion and a gripper that stays at the number that it is commanded; it notes what was carried out."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.carried_out: list[np.ndarray] = []

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=2, action_size=7)

    def _advance(self, actions: Any, rows: Any) -> Transition:
        self.carried_out.append(actions.copy())
        return super()._advance(actions, rows)


def reach(*rows: int) -> Takeover:
    """A motion of the hand, with the gripper at 0.5."""
    return Takeover(np.isin(np.arange(2), rows), np.array([[0.25] * 6 + [0.5]] * 2, np.float32), {})


@pytest.mark.parametrize("collects", [False, True])
def test_what_a_person_held_stays_held_until_the_next_chunk(collects: bool) -> None:
    env = SevenNumbers(EnvSettings(num_envs=2, max_episode_steps=9, auto_reset=False))
    env.intervention = Script(env, None, reach(1))
    chunk = np.full((2, 4, 7), -0.75, np.float32)
    if collects:
        EpisodeCollector(env, 0, "do it", "everything").step(chunk)
    else:
        env.reset()
        env.step(chunk)
    assert [step[0, 6] for step in env.carried_out] == [-0.75] * 4
    assert [step[1].tolist() for step in env.carried_out[2:]] == [[0.0] * 6 + [0.5]] * 2


def test_a_continued_episode_remembers_the_gripper() -> None:
    env = SevenNumbers(EnvSettings(num_envs=2))
    env.intervention = Script(env)
    env.reset()
    env.step(np.full((2, 1, 7), 0.75, np.float32))
    state = env.save()
    fresh = SevenNumbers(EnvSettings(num_envs=2))
    assert fresh.load(known(state))
    assert fresh.hold_actions(np.array([1])).tolist() == [[0.0] * 6 + [0.75]]
    fresh.reset()
    assert fresh.hold_actions(np.array([1])).tolist() == [[0.0] * 6 + [-1.0]]


def test_joints_stand_still_until_the_next_chunk() -> None:
    env = arm(2, task="reach")
    env.intervention = Script(env, Takeover(np.array([True, False]), np.full((2, 7), 0.5, np.float32), {}))
    env.reset()
    assert act(env, 0.25, 3).executed[0, 1:].tolist() == [[0.0] * 7] * 2


def test_a_takeover_may_be_lists() -> None:
    env = counted(replace(takeover(1), rows=[False, True], actions=[[0.0], [0.5]]))
    assert act(env).executed[:, 0, 0].tolist() == [0, 0.5]


def test_an_intervention_is_clipped_and_must_be_finite() -> None:
    env = counted(takeover(0, value=3.0), takeover(1, value=np.nan), takeover(0, value=np.nan))
    assert act(env).rewards[:, 0].tolist() == [1, 0]
    with pytest.raises(InterventionError, match="not finite"):
        act(env)


class Free(CountingEnv):
    """Has no bound below."""

    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, low=(None,), high=(1.0,))


def test_an_intervention_without_bounds_is_executed_as_asked_for() -> None:
    env = Free(EnvSettings(num_envs=2))
    env.intervention = Script(env, takeover(0, value=-3.0))
    env.reset(0)
    assert known(env.step(np.zeros((2, 1, 1), np.float32)).executed).tolist() == [[[-3]], [[0]]]


def test_a_judgement_ends_the_episode() -> None:
    result = act(counted(takeover(r0="success", r1="failure"), options={"solved": 9}), 0.25)
    assert result.rewards[:, 0].tolist() == [1.25, 0.25]
    assert result.terminations[:, 0].tolist() == [True, True]
    assert result.episodes.success_at_end.tolist() == [True, False]
    assert not result.interventions.any()  # who judges does not act


def test_a_demonstration_tells_which_actions_were_whose() -> None:
    env = arm(auto_reset=False)
    witness = env.intervention = Witness(env)
    collector = EpisodeCollector(env, 0, "pick", "everything")
    while not collector.over:
        collector.step(np.zeros((3, 1, 8), np.float32))
    for row, episode in enumerate(collector.episodes()):
        flags = episode.columns["interventions"]
        assert flags.tolist() == [bool(rows[row]) for rows in witness.rows[: episode.length]]
        assert (np.abs(episode.columns["actions"]).sum(axis=1) > 0).tolist() == flags.tolist()
        assert set(to_columns(episode, env.spec)) == set(features_of(env.spec, interventions=True))


def test_only_human_actions_are_imitated_on_request() -> None:
    zeros, flags = np.zeros((4, 1), np.float32), np.array([False, True, True, False])
    whole = Demonstrations("set", 20, np.array([0, 4]), zeros, zeros, {}, ("do it",), np.zeros(4, np.int64))
    with pytest.raises(DatasetError, match="do not mark interventions"):
        imitated_rows(whole, only_interventions=True)
    mixed = replace(whole, interventions=flags)
    assert imitated_rows(mixed, only_interventions=False).tolist() == [0, 1, 2, 3]
    assert imitated_rows(mixed, only_interventions=True).tolist() == [1, 2]
    with pytest.raises(DatasetError, match="contain no interventions"):
        imitated_rows(replace(whole, interventions=flags & False), only_interventions=True)


@pytest.mark.parametrize("task", ["reach", "pick"])
def test_a_motion_moves_the_hand_where_the_person_wants_it(task: str) -> None:
    env: Any = arm(1, task=task)
    for axis in range(3):
        env.reset(axis)
        before = env._hand[:, 0].copy()
        linear = [0.0, 0.0, 0.0]
        linear[axis] = 1.0
        for _ in range(5):
            env.step(env.steer(HandMotion(tuple(linear), (0, 0, 0), gripper_closed=True), 0)[None, None])  # type: ignore[arg-type]
        moved = env._hand[:, 0] - before
        assert moved[axis] > 0.02
        assert moved[axis] > 0.9 * np.linalg.norm(moved)
    if task == "pick":
        assert env._closed[0]
    twist = env.steer(HandMotion((0, 0, 0), (0, 0, 1), gripper_closed=False), 0)
    assert np.abs(twist[6]) > 2 * np.abs(twist[:6]).max()  # the hand points down: its last joint turns it


def test_actions_of_another_kind_begin_with_the_axes() -> None:
    env = CountingEnv(EnvSettings(num_envs=1))
    assert env.steer(HandMotion((0.5, 0.25, 0), (0, 0, 0), gripper_closed=True), 0).tolist() == [0.5]
    vision = make_env("franka_vision", EnvSettings(num_envs=1))
    assert vision.steer(HandMotion((0.5, 0.25, -1), (1, 1, 1), gripper_closed=True), 0).tolist() == [0.5, 0.25, -1]


def test_a_source_that_cannot_be_opened_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    env = CountingEnv(EnvSettings(num_envs=1))
    env.intervention = open_source("scripted", env, {"probability": 1})
    env.reset()
    with pytest.raises(ConfigError, match="this task has none"):
        act(env)
    monkeypatch.setattr("recipes.embodied.interventions.registry.missing_modules", list)
    for source, options, words in (
        ("gamepad", {}, "needs the package `evdev`"),
        ("joystick", {}, "unknown intervention source `joystick`"),
        ("scripted", {"probability": 2}, "probability"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_source(source, env, options)


def test_discarded_episode_ends_and_does_not_count() -> None:
    env = counted(None, takeover(0, p0="discard"))
    act(env)
    result = act(env)
    assert result.failed.tolist() == [True, False]
    assert result.dones[:, 0].tolist() == [True, False]
    assert result.valid[:, 0].tolist() == [False, True]
    assert len(result.episodes.env) == 0
    assert env.progress.episode.tolist() == [1, 0]  # the next one has begun
    assert not env.discarded.any()


def test_discarded_episode_is_not_collected_and_no_fault() -> None:
    env = CountingEnv(EnvSettings(num_envs=1, auto_reset=False, max_episode_steps=5))
    for verdict, kept in (("discard", 0), ("failure", 1)):
        env.intervention = Script(env, takeover(0, envs=1, p0=verdict))
        collector = EpisodeCollector(env, 0, "task", "everything")
        collector.step(np.zeros((1, 1, 1), np.float32))
        assert collector.over
        assert len(collector.episodes()) == kept


def test_reward_key_adds_to_the_step_and_the_episode_goes_on() -> None:
    env = counted(replace(takeover(), rewards={1: 1.0}))
    result = act(env, 0.25)
    assert result.rewards[:, 0].tolist() == [0.25, 1.25]
    assert not result.dones.any()
    assert act(env, 0.25).rewards[:, 0].tolist() == [0.25, 0.25]
