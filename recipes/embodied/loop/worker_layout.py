"""Distribution of environments and of weights over the workers of a job."""

from __future__ import annotations

from math import gcd

from recipes.embodied.config import PolicyJob, group_size
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.loop.routing import Routes


def make_routes(layout: Layout, config: PolicyJob, *, training: bool) -> Routes:
    """Return the routes of the environments of `env.train` or `env.eval`; evaluations have no actors.

    Where there are more actors than whole groups of environments, several actors get the same trajectories, and each
    learns from a part of their samples (`actor_ranks`): the actors of these routes are such teams.
    """
    environments = config.env.train if training else config.env.eval
    return Routes(
        environments.total_num_envs,
        layout.envs,
        config.rollout.pipeline_stage_num,
        layout.rollouts,
        count_teams(layout.actors, config) if training else 1,
    )


def count_teams(actors: int, config: PolicyJob) -> int:
    """Return the number of actor teams: the most over which whole groups of environments divide."""
    return gcd(config.env.train.total_num_envs // group_size(config, config.env.train), actors)


def actor_ranks(team: int, actors: int, teams: int) -> range:
    """Return the ranks of the actors of a team, which learn from the same trajectories."""
    return range(team, actors, teams)


def trajectory_key(actor: int, step: int, max_staleness: int, attempt: int = 0) -> str:
    """Return the key of the channel for an actor's share of a step, while at most k other steps are on their way.

    Of a step whose rollout is done again after a death, each `attempt` has its own key.
    """
    key = f"{actor}:{step % (max_staleness + 1)}"
    return f"{key}:{attempt}" if attempt else key
