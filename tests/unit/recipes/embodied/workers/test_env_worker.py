"""Workers of rollouts: passes of environments, what is sent where, what a checkpoint keeps, and means of chunks."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.demonstrations.first_comparison import StartFacts, thumbnails
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.env_state import State
from recipes.embodied.loop.protocols import Layout, sliced, stacked
from recipes.embodied.loop.routing import EnvRange, Routes, actor_ranks, trajectory_key
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.env_worker import StagedEnvironments
from recipes.embodied.workers.rollout_worker import TemporalEnsemble, greedy_actions
from rlinf_core.errors import ConfigError
from rlinf_core.job.load import load_job
from tests.known import known
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
    job = load_job("embodied/pick-laptop", (*of, *overrides), environ={})
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
    assert set(known(said)) == set(stages.begin(3)[0]["instructions"].tolist())
    assert asked == [3]


def test_a_pass_continues_the_episodes_of_the_pass_before() -> None:
    stages = stages_of("env.train.max_episode_steps=9")
    assert counts(stages.begin(1)) == [0, 0, 0, 0]
    steps(stages, 5)
    assert counts(stages.begin(2)) == [1, 5, 5, 5]


def test_a_pass_can_begin_with_new_episodes() -> None:
    stages = stages_of("env.train.auto_reset=false")
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
    stages = stages_of(f"env.train.env_type={__name__}:Stateless")
    stages.begin(1)
    assert stages.save() is None


class Stateless(CountingEnv):
    def _save(self) -> State | None:
        return None


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("env.train.max_episode_steps=null",), "last up to 50 steps, and a pass 4"),
        ((f"env.train.env_type={__name__}:Endless",), "have no limit"),
    ],
)
def test_an_episode_that_no_pass_could_end_is_refused(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        stages_of("env.train.auto_reset=false", "env.train.max_episode_steps=null", *overrides)
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


@st.composite
def routes(draw: st.DrawFn) -> Routes:
    envs, stages, actors = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    smallest = envs * stages * actors
    return Routes(smallest * draw(st.integers(1, 4)), envs, stages, draw(st.integers(1, 5)), actors)


@given(routes())
def test_every_environment_is_in_exactly_one_segment(ways: Routes) -> None:
    numbers = [number for item in ways.ranges for number in range(item.start, item.stop)]
    assert numbers == list(range(ways.total))


@given(routes())
def test_both_ends_of_a_message_agree_on_its_rows(ways: Routes) -> None:
    sent: list[tuple[int, int, int, int]] = []
    received: list[tuple[int, int, int, int]] = []
    for stage in range(ways.stages):
        for env in range(ways.envs):
            sent += [(env, stage, share.peer, share.stop - share.start) for share in ways.of_env(env, stage)]
            covered = [row for share in ways.of_env(env, stage) for row in range(share.start, share.stop)]
            assert covered == list(range(ways.batch))
        for rollout in range(ways.rollouts):
            mine = ways.of_rollout(rollout, stage)
            received += [(share.peer, stage, rollout, share.stop - share.start) for share in mine]
    assert sorted(sent) == sorted(received)
    # One message a stage and step between a pair: each pair has one share of a stage.
    assert len({row[:3] for row in sent}) == len(sent)


@given(routes())
def test_actors_get_equal_and_neighbouring_shares(ways: Routes) -> None:
    for actor in range(ways.actors):
        mine = [item for item in ways.ranges if item.actor == actor]
        assert mine[0].start == actor * ways.total // ways.actors
        assert sum(item.stop - item.start for item in mine) == ways.total // ways.actors
        assert all(one.stop == other.start for one, other in itertools.pairwise(mine))


@given(routes())
def test_pieces_say_which_environments_their_rows_are(ways: Routes) -> None:
    result: list[EnvRange] = []
    for stage in range(ways.stages):
        for rollout in range(ways.rollouts):
            row = 0
            for piece in ways.pieces(rollout, stage):
                assert piece.start == row
                row = piece.stop
                env = piece.first // (ways.stages * ways.batch)
                stop = piece.first + piece.stop - piece.start
                result.append(EnvRange(env, stage, rollout, piece.actor, piece.first, stop))
    assert sorted(result, key=lambda item: item.start) == list(ways.ranges)


@given(routes())
def test_rollouts_share_every_stage_evenly(ways: Routes) -> None:
    for stage in range(ways.stages):
        loads = [sum(share.stop - share.start for share in ways.of_rollout(r, stage)) for r in range(ways.rollouts)]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(("total", "envs", "stages", "actors"), [(6, 4, 1, 1), (6, 1, 4, 1), (6, 1, 1, 4)])
def test_environments_that_cannot_be_dealt_evenly_are_refused(total: int, envs: int, stages: int, actors: int) -> None:
    with pytest.raises(ValueError, match=f"{total} environments cannot be split evenly over 4"):
        Routes(total, envs, stages, actors=actors)


def test_rollouts_on_their_way_have_keys_of_their_own() -> None:
    keys = [trajectory_key(0, step, 2) for step in range(1, 4)]
    assert len(set(keys)) == 3
    assert trajectory_key(0, 4, 2) == keys[0]
    assert trajectory_key(1, 1, 2) != keys[0]


def test_every_actor_is_in_one_team() -> None:
    teams = [list(actor_ranks(team, 12, 4)) for team in range(4)]
    assert teams[0] == [0, 4, 8]
    assert sorted(rank for team in teams for rank in team) == list(range(12))


def test_messages_are_taken_apart_and_put_together() -> None:
    message = {"observations": {"states": np.arange(8).reshape(4, 2)}, "rewards": np.arange(4)}
    parts = [sliced(message, 0, 3, 4), sliced(message, 3, 4, 4)]
    again = stacked(parts)
    assert (again["observations"]["states"] == message["observations"]["states"]).all()
    assert again["rewards"].tolist() == [0, 1, 2, 3]
    assert sliced(message, 0, 4, 4) is message


N, HORIZON, LOOKS = 2, 7, 9


@pytest.mark.parametrize(("executed", "coefficient"), [(1, 0.01), (1, -0.5), (3, 0.3), (7, 0.3)])
def test_actions_are_weighted_means_of_all_predictions(executed: int, coefficient: float) -> None:
    """The second environment begins a new episode at the fifth look: earlier chunks are not of it."""
    chunks = torch.randn(LOOKS, N, HORIZON, 3, generator=torch.Generator().manual_seed(0))
    ensemble = TemporalEnsemble(executed, coefficient)
    for look, chunk in enumerate(chunks):
        mean = ensemble.add(chunk, None if look == 0 else np.array([False, look == 4]))
        for env in range(N):
            first = 4 if env == 1 and look >= 4 else 0
            for ahead in range(executed):
                # (look - of) chunks later the step is so many actions further in the chunk of look `of`.
                places = [(of, ahead + executed * (look - of)) for of in range(first, look + 1)]
                said = [chunks[of, env, place] for of, place in places if place < HORIZON]
                weights = [math.exp(-coefficient * index) for index in range(len(said))]
                expected = sum(weight * action for weight, action in zip(weights, said, strict=True)) / sum(weights)
                torch.testing.assert_close(mean[env, ahead], expected, atol=1e-5, rtol=1e-5)


def test_a_flow_policy_acts_by_its_chunks_mean() -> None:
    model = {"model_type": "flow_policy", "hidden_dim": 16, "num_action_chunks": 4, "options": {"action_horizon": 9}}
    policy: Any = make_model(policy_model(model), EnvSpec(5, 2))
    executed, generator = 4, np.random.default_rng(0)
    ensemble = TemporalEnsemble(executed)
    seen = [policy.prepare({"states": generator.normal(size=(3, 5)).astype(np.float32)}) for _ in range(2)]
    np.testing.assert_array_equal(
        greedy_actions(policy, seen[0], executed), policy.to_env(policy.act(seen[0], greedy=True).actions)
    )
    first, second = (policy.predicted(item) for item in seen)
    np.testing.assert_allclose(greedy_actions(policy, seen[0], executed, ensemble), policy.to_env(first), atol=1e-6)
    newer = math.exp(-0.01)
    expected = (first[:, executed : 2 * executed] + newer * second[:, :executed]) / (1 + newer)
    np.testing.assert_allclose(greedy_actions(policy, seen[1], executed, ensemble), policy.to_env(expected), atol=1e-6)
