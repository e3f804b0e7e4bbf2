"""Every environment goes one way, whatever the sizes of a job, and so do keys and messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.loop.protocols import sliced, stacked
from recipes.embodied.loop.routing import EnvRange, Piece, Routes, Share, actor_ranks, trajectory_key


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


def test_one_worker_of_each_kind_sends_everything_in_one_message() -> None:
    ways = Routes(64, 1)
    assert ways.of_env(0, 0) == (Share(0, 0, 64),)
    assert ways.of_rollout(0, 0) == (Share(0, 0, 64),)
    assert ways.pieces(0, 0) == (Piece(0, 0, 64, 0),)


def test_two_rollouts_act_for_both_stages() -> None:
    ways = Routes(8, 1, stages=2, rollouts=2)
    assert [ways.of_env(0, stage) for stage in range(2)] == [(Share(0, 0, 2), Share(1, 2, 4))] * 2


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
