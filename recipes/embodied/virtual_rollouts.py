"""The loop of the recipe in virtual time: `EmbodiedRunner` and its three kinds of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from recipes.embodied.loop.routing import Routes
from rlinf_core.job.arrangements import Device, Simulated
from rlinf_core.job.flow import Process, Receive, Use, VirtualTime

# The seconds of a call, drawn at random if calls vary.
Draw: TypeAlias = Callable[[float], float]
# Steps before the steady state, and steps that are measured.
_WARM_UP, _MEASURED, _MEASURED_RANDOM = 3, 4, 40


class Exchange(NamedTuple):
    """The messages between env and rollout workers, by rank and stage.

    Attributes:
        rollouts: the rollout workers that act for a stage of each env worker.
        envs: the env workers that each rollout worker acts for.
        rows: the rows of each rollout worker's batch.
        batch: environments of one stage of one env worker.
    """

    rollouts: Sequence[Sequence[Sequence[int]]]
    envs: Sequence[Sequence[Sequence[int]]]
    rows: Sequence[Sequence[int]]
    batch: int

    @classmethod
    def of(cls, environments: int, envs: int, stages: int, rollouts: int) -> Exchange:
        """Return the exchange that the recipe's routes make."""
        routes = Routes(environments, envs, stages, rollouts, 1)
        every = range(stages)
        shares = [[routes.of_rollout(rank, stage) for stage in every] for rank in range(rollouts)]
        return cls(
            [[[share.peer for share in routes.of_env(rank, stage)] for stage in every] for rank in range(envs)],
            [[[share.peer for share in mine] for mine in by_stage] for by_stage in shares],
            [[sum(share.stop - share.start for share in mine) for mine in by_stage] for by_stage in shares],
            routes.batch,
        )

    @classmethod
    def pair(cls, batch: int, rows: int, stages: int) -> Exchange:
        """Return the exchange of one env worker with one rollout worker, which represents equal pairs."""
        one = [[[0]] * stages]
        return cls(one, one, [[rows] * stages], batch)


class Costs(NamedTuple):
    """Seconds of the parts of a step.

    Attributes:
        env, policy, values: one call, as a function of its rows.
        hop: a message between an env and a rollout worker.
        sync: the transfer of new weights.
        handover: everything else between two phases, including trajectories and advantages.
        training: the calls of one actor in a step, in order.
        move_rollout, move_actor: moving weights to or from an accelerator; 0 if they stay.
    """

    env: Draw
    policy: Draw
    values: Draw
    hop: float
    sync: float
    handover: float
    training: Sequence[float]
    move_rollout: float = 0.0
    move_actor: float = 0.0


class VirtualJob(NamedTuple):
    """The processes of a job and their accelerators.

    Attributes:
        env, rollout, actor: the accelerator of each process.
        exchange: the routes of messages.
        passes, chunks: the segments of a rollout, and the action chunks of a segment.
        staleness: the number of steps that rollouts run ahead.
        varies: whether durations are drawn.
    """

    env: Sequence[Device]
    rollout: Sequence[Device]
    actor: Sequence[Device]
    exchange: Exchange
    passes: int
    chunks: int
    staleness: int
    varies: bool = False


def simulate(job: VirtualJob, costs: Costs) -> Simulated:
    """Return a step of the job in its steady state."""
    clock = VirtualTime()
    for rank, device in enumerate(job.env):
        clock.start(_env_worker(clock, job, costs, rank, device))
    for rank, device in enumerate(job.rollout):
        clock.start(_rollout_worker(clock, job, costs, rank, device))
    for device in job.actor:
        clock.start(_actor(clock, costs, device))
    ends: list[float] = []
    first = _WARM_UP + 2 * job.staleness if job.staleness else 1
    # When rollouts run ahead, long and short steps may alternate.
    turns = job.staleness + 1
    last = first + turns * (_MEASURED_RANDOM // turns if job.varies else _MEASURED if job.staleness else 1)
    clock.start(_driver(clock, job, costs, ends, last))
    clock.run()
    seconds = (ends[last] - ends[first]) / (last - first)
    return Simulated(seconds, {device: work / clock.now for device, work in clock.busy.items()})  # type: ignore[misc]


_OBSERVED: Final = "observed"
_ACTED: Final = "acted"
_ASKED: Final = "asked"
_ROLLED: Final = "rolled"


def _env_worker(clock: VirtualTime, job: VirtualJob, costs: Costs, rank: int, device: Device) -> Process:
    shares = job.exchange.rollouts[rank]
    stages = range(len(shares))
    for step in count():
        yield Receive((_ASKED, "env", rank))
        for _ in range(job.passes):
            for stage in stages:
                for peer in shares[stage]:
                    clock.put((_OBSERVED, peer, stage), costs.hop)
            for _ in range(job.chunks):
                for stage in stages:
                    yield Receive((_ACTED, rank, stage), len(shares[stage]))
                    yield Use(device, costs.env(job.exchange.batch))
                    for peer in shares[stage]:
                        clock.put((_OBSERVED, peer, stage), costs.hop)
        clock.put((_ROLLED, step))


def _rollout_worker(clock: VirtualTime, job: VirtualJob, costs: Costs, rank: int, device: Device) -> Process:
    peers, rows = job.exchange.envs[rank], job.exchange.rows[rank]
    stages = [stage for stage in range(len(peers)) if peers[stage]]
    for step in count():
        yield Receive((_ASKED, "rollout", rank))
        if job.staleness and step:
            # New weights arrive between two rollouts.
            yield Use(None, costs.sync)
        if costs.move_rollout:
            yield Use(device, costs.move_rollout)
        for _ in range(job.passes):
            for chunk in range(job.chunks + 1):
                for stage in stages:
                    yield Receive((_OBSERVED, rank, stage), len(peers[stage]))
                    if chunk == job.chunks:
                        yield Use(device, costs.values(rows[stage]))
                        continue
                    yield Use(device, costs.policy(rows[stage]))
                    for peer in peers[stage]:
                        clock.put((_ACTED, peer, stage), costs.hop)
        if costs.move_rollout:
            yield Use(device, costs.move_rollout)
        clock.put((_ROLLED, step))


def _actor(clock: VirtualTime, costs: Costs, device: Device) -> Process:
    while True:
        yield Receive("train")
        if costs.move_actor:
            yield Use(device, costs.move_actor)
        for seconds in costs.training:
            yield Use(device, seconds)
        if costs.move_actor:
            yield Use(device, costs.move_actor)
        clock.put("trained")


def _driver(clock: VirtualTime, job: VirtualJob, costs: Costs, ends: list[float], last: int) -> Process:
    asked = -1
    for step in range(last + 1):
        if asked < step:
            yield Use(None, costs.sync)
        for _ in range(asked, step + job.staleness):
            for rank in range(len(job.env)):
                clock.put((_ASKED, "env", rank))
            for rank in range(len(job.rollout)):
                clock.put((_ASKED, "rollout", rank))
        asked = step + job.staleness
        yield Receive((_ROLLED, step), len(job.env) + len(job.rollout))
        yield Use(None, costs.handover)
        clock.put("train", count=len(job.actor))
        yield Receive("trained", len(job.actor))
        ends.append(clock.now)
    clock.stop()
