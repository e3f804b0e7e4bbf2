"""Keys of the channel from rollout to actor, and teams of actors."""

from __future__ import annotations

from recipes.embodied.loop.routing import actor_ranks, trajectory_key


def test_rollouts_on_their_way_have_keys_of_their_own() -> None:
    keys = [trajectory_key(0, step, 2) for step in range(1, 4)]
    assert len(set(keys)) == 3
    assert trajectory_key(0, 4, 2) == keys[0]
    assert trajectory_key(1, 1, 2) != keys[0]


def test_every_actor_is_in_one_team() -> None:
    teams = [list(actor_ranks(team, 12, 4)) for team in range(4)]
    assert teams[0] == [0, 4, 8]
    assert sorted(rank for team in teams for rank in team) == list(range(12))
