"""The routes of environments to the workers that step them, act for them, and learn from them: a pure function of their
numbers.

Environments are numbered within training or evaluation. Numbers go to env workers in order, and within a worker to its
pipeline stages. Every rollout worker acts for a share of every stage, so that all have work in each stage; every actor
learns from equally many environments with consecutive numbers. Nothing depends on arrival order, so that a run can be
repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

from recipes.embodied.config import PolicyJob, group_size
from recipes.embodied.loop.protocols import Layout


class EnvRange(NamedTuple):
    """The environments `start` to `stop` (exclusive), which share a route."""

    env: int
    stage: int
    rollout: int
    actor: int
    start: int
    stop: int


class Share(NamedTuple):
    """Rows `start` to `stop` of a batch, exchanged with the worker of rank `peer`."""

    peer: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Rows `start` to `stop` of a rollout's batch, for the actor of rank `actor`.

    `first` is the number of the first of these environments.
    """

    actor: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Routes:
    """The routes between the workers of a job.

    Args:
        total: environments, a multiple of `envs` x `stages` and of `actors`.
        envs: env workers.
        stages: pipeline stages of each.
        rollouts: rollout workers.
        actors: actors.

    Raises:
        ValueError: the environments cannot be distributed evenly.
    """

    total: int
    envs: int
    stages: int = 1
    rollouts: int = 1
    actors: int = 1

    def __post_init__(self) -> None:
        for count, of in ((self.envs * self.stages, "env workers x stages"), (self.actors, "actors")):
            if self.total % count:
                raise ValueError(f"{self.total} environments cannot be split evenly over {count} {of}")

    @property
    def batch(self) -> int:
        """Environments of one stage of one env worker."""
        return self.total // (self.envs * self.stages)

    def first_env(self, env: int, stage: int) -> int:
        """Return the number of the first environment of a stage of an env worker."""
        return (env * self.stages + stage) * self.batch

    @cached_property
    def ranges(self) -> tuple[EnvRange, ...]:
        """All ranges, by number; every environment is in exactly one."""
        ranges: list[EnvRange] = []
        for stage in range(self.stages):
            for rollout, position, stop in self._shares(stage):
                while position < stop:
                    env, row = divmod(position, self.batch)
                    start = self.first_env(env, stage) + row
                    actor = start * self.actors // self.total
                    here = min(stop - position, self.batch - row, (actor + 1) * self.total // self.actors - start)
                    ranges.append(EnvRange(env, stage, rollout, actor, start, start + here))
                    position += here
        return tuple(sorted(ranges, key=lambda share: share.start))

    def _shares(self, stage: int) -> list[tuple[int, int, int]]:
        """Return the rollout ranks of a stage, each with its range of rows, counted over all env workers."""
        size = self.envs * self.batch
        # The rollout workers with one more row rotate over the stages, to balance the load.
        order = [(rank + stage) % self.rollouts for rank in range(self.rollouts)] if size % self.rollouts else None
        bounds = [rank * size // self.rollouts for rank in range(self.rollouts + 1)]
        return [(order[i] if order else i, bounds[i], bounds[i + 1]) for i in range(self.rollouts)]

    def of_env(self, env: int, stage: int) -> tuple[Share, ...]:
        """Return the rollouts that act for a stage of an env worker; rows are of the stage's batch."""
        first = self.first_env(env, stage)
        mine = [share for share in self.ranges if (share.env, share.stage) == (env, stage)]
        return _joined([Share(share.rollout, share.start - first, share.stop - first) for share in mine])

    def of_rollout(self, rollout: int, stage: int) -> tuple[Share, ...]:
        """Return the env workers that a rollout acts for in a stage; rows are those of the joined batch."""
        shares: list[Share] = []
        row = 0
        for share in self._of(rollout, stage):
            shares.append(Share(share.env, row, row + share.stop - share.start))
            row = shares[-1].stop
        return _joined(shares)

    def pieces(self, rollout: int, stage: int) -> tuple[Piece, ...]:
        """Return the actors for the trajectories of a rollout's batch."""
        pieces: list[Piece] = []
        row = 0
        for share in self._of(rollout, stage):
            pieces.append(Piece(share.actor, row, row + share.stop - share.start, share.start))
            row = pieces[-1].stop
        return tuple(pieces)

    def _of(self, rollout: int, stage: int) -> list[EnvRange]:
        return [share for share in self.ranges if (share.rollout, share.stage) == (rollout, stage)]


def _joined(shares: list[Share]) -> tuple[Share, ...]:
    """Merge adjacent rows of the same peer into one share."""
    joined: list[Share] = []
    for share in shares:
        if joined and joined[-1].peer == share.peer and joined[-1].stop == share.start:
            joined[-1] = joined[-1]._replace(stop=share.stop)
        else:
            joined.append(share)
    return tuple(joined)


def make_routes(layout: Layout, config: PolicyJob, *, training: bool) -> Routes:
    """Return the routes of the environments of `env.train` or `env.eval`; evaluations have no actors.

    If there are more actors than groups of environments, teams of actors get the same trajectories, and each member
    learns from a part of the samples (`actor_ranks`): the actors of these routes are teams.
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
    """Return the number of actor teams: the largest number over which whole groups of environments divide."""
    return gcd(config.env.train.total_num_envs // group_size(config, config.env.train), actors)


def actor_ranks(team: int, actors: int, teams: int) -> range:
    """Return the ranks of the actors of a team, which learn from the same trajectories."""
    return range(team, actors, teams)


def trajectory_key(actor: int, step: int, max_staleness: int, attempt: int = 0) -> str:
    """Return the key of the channel for an actor's share of a step, while at most `max_staleness` other steps are in
    flight.

    Each `attempt` at a step after a death has its own key.
    """
    key = f"{actor}:{step % (max_staleness + 1)}"
    return f"{key}:{attempt}" if attempt else key
