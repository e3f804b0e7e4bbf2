"""The flow of an embodied job: legal counts, what must be recorded, bounds and simulations of arrangements."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from math import gcd, inf
from types import MappingProxyType
from typing import Any, Final

from recipes.embodied.config import EmbodiedConfig, group_size, resets_each_pass
from recipes.embodied.config.algorithm_config import DEFAULT_BATCH, is_off_policy, off_policy_of, policy_gradient_of
from recipes.embodied.config.embodied_config import batch_sizes, evaluates, samples_of_a_step, samples_of_an_actor
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.intervention_types import ENVIRONMENT, NONE
from recipes.embodied.virtual_rollouts import Costs, Draw, Exchange, VirtualJob, simulate
from recipes.sections.checks import divisors
from rlinf_core import RLinfError
from rlinf_core.job.arrangements import Arrangement, Device, DeviceGroup, DeviceSpan, Flow, Simulated, share_one
from rlinf_core.job.flow import TRIAL, CallRow, Duration, Durations, Recorded, Sizes, halves

ENV, ROLLOUT, ACTOR, DRIVER = "env", "rollout", "actor", "driver"
STEP, POLICY, VALUES = "env/step", "rollout/policy", "rollout/values"
UPDATE = "training/update"
SYNC, HANDOVER, HOP = "driver/sync", "driver/handover", "driver/hop"
MOVE_ROLLOUT, MOVE_ACTOR = "rollout/move", "actor/move"
# The most processes that are simulated one by one; of more, one of several equal blocks is simulated.
_MOST_PROCESSES: Final = 64
# The most accelerators of a kind for which every count is tried.
_EVERY_COUNT: Final = 16
# The share of a step that rollouts running ahead may gain within the measured steps.
_WINDOW: Final = 0.003
# In a trial: the fewest actions of a rollout segment, and the updates of an off-policy step.
_TRIAL_CHUNKS: Final = 8
_TRIAL_UPDATES: Final = 20
# More steps than any rehearsal has.
_ALWAYS: Final = 10**9
_STAND_INS: Final = "recipes.embodied.stand_ins"


def flow_of(config: EmbodiedConfig) -> EmbodiedFlow:
    """Return the flow of a job, see `Recipe.flow`."""
    return EmbodiedFlow(config)


class EmbodiedFlow:
    """The flow of a job; see `JobFlow`."""

    components = (ENV, ROLLOUT, ACTOR)
    stages = (1, 2)

    def __init__(self, config: EmbodiedConfig) -> None:
        self._config = config
        train = config.env.train
        self.environments, self._group = train.total_num_envs, group_size(config, train)
        self.passes = train.rollout_epoch
        self.chunks = -(-train.max_steps_per_rollout_epoch // config.actor.model.num_action_chunks)
        self.samples = samples_of_a_step(config)
        self.stages_now = config.rollout.pipeline_stage_num
        # Counts of groups of environments, which env workers and stages must divide.
        sections = [train, *([config.env.eval] if evaluates(config) else [])]
        self._divided = [section.total_num_envs / group_size(config, section) for section in sections]
        self._takes_actors = cache(self._actors_divide)
        self.off_policy = is_off_policy(config.algorithm.loss_type)
        self.phases: Mapping[str, tuple[str, ...]] = {
            ENV: (STEP,),
            ROLLOUT: (POLICY,),
            ACTOR: (UPDATE,),
        }

    def counts(self, component: str, kind: DeviceGroup) -> Sequence[int]:
        """Return the process counts of a component that are worth trying on a kind of accelerator, ascending."""
        every = range(1, kind.units + 1)
        if component == ENV:
            counts = [count for count in every if self.environments % (count * self._group) == 0]
        elif component == ROLLOUT:
            # Of counts with the same largest batch, the smallest suffices.
            smallest: dict[int, int] = {}
            for count in every if kind.units <= _EVERY_COUNT else _whole_nodes(kind):
                smallest.setdefault(-(-self.environments // count), count)
            counts = sorted(smallest.values()) if kind.units > _EVERY_COUNT else list(every)
        else:
            counts = [count for count in every if self._takes_actors(count)]
        if kind.units <= _EVERY_COUNT:
            return counts
        whole = set(_whole_nodes(kind))
        return [count for count in counts if count in whole]

    def _actors_divide(self, actors: int) -> bool:
        total, micro = self._config.actor.global_batch_size, self._config.actor.micro_batch_size
        if total is None:
            return True
        return total % ((micro or 1) * actors) == 0 and (self.off_policy or self.samples % total == 0)

    def legal(self, arrangement: Arrangement) -> bool:
        """See `JobFlow`."""
        shares = arrangement.of(ENV).size * arrangement.stages
        return all(total % shares == 0 for total in self._divided) and self._takes_actors(arrangement.of(ACTOR).size)

    def training(self, actors: int) -> list[tuple[str, float, int]]:
        """Return the calls of one actor in a step: phase, rows of a call, number of calls."""
        if self.off_policy:
            settings = off_policy_of(self._config.algorithm)
            share = max(1, (self._config.actor.global_batch_size or DEFAULT_BATCH) // actors)
            steps = self._config.env.train.max_steps_per_rollout_epoch * self.environments * self.passes
            return [(UPDATE, share, max(1, round(settings.update_to_data * steps)))]
        share, _ = batch_sizes(self._config, actors)
        mine = samples_of_an_actor(self.samples, actors)
        epochs = policy_gradient_of(self._config.algorithm).update_epoch
        calls = [(UPDATE, share, epochs * (mine // share)), (UPDATE, mine % share, epochs if mine % share else 0)]
        return [call for call in calls if call[2]]

    def calls(self, run: Recorded) -> Sequence[CallRow]:
        """See `JobFlow`: as recorded."""
        return run.rows

    def constants(self, run: Recorded, durations: Durations) -> list[CallRow]:
        """See `JobFlow`: weight transfer, time between phases, and a message, by the unexplained time of a rollout."""
        phases, where = run.phases, run.arrangement
        if where.staleness:
            return []
        acted, trained = phases["time/generate_rollouts"], phases["time/actor_training"]
        sync = phases.get("time/sync_weights", 0.0)
        constants = {SYNC: sync, HANDOVER: max(0.0, phases["time/step"] - acted - trained - sync)}
        if where.stages == 1:
            calls = Durations({name: fits for name, fits in durations.phases.items() if name != UPDATE})
            silent = self.flow(calls, run.models).simulate(where).seconds
            constants[HOP] = max(0.0, acted - silent) / (self.passes * (2 * self.chunks + 1))
        return [CallRow(DRIVER, phase, 0, "", 1, seconds) for phase, seconds in constants.items()]

    def rows(self, arrangement: Arrangement) -> Mapping[str, float]:
        """See `JobFlow`."""
        envs, rollouts = arrangement.of(ENV).size, arrangement.of(ROLLOUT).size
        per_stage = self.environments // arrangement.stages
        trained = {phase: rows for phase, rows, _ in reversed(self.training(arrangement.of(ACTOR).size))}
        return {STEP: per_stage / envs, POLICY: -(-per_stage // rollouts), **trained}

    def changes(self, arrangement: Arrangement) -> Mapping[str, Any]:
        """See `JobFlow`."""
        changed: dict[str, Any] = {}
        if arrangement.stages != self._config.rollout.pipeline_stage_num:
            changed["rollout.pipeline_stage_num"] = arrangement.stages
        if arrangement.staleness != self._config.runner.staleness:
            changed["runner.max_staleness"] = arrangement.staleness
        return changed

    def trial_sizes(self, now: Arrangement) -> Sequence[int]:
        """See `JobFlow`: a size is a number of environments.

        Raises:
            RLinfError: the environments are robots.
        """
        if is_robot(self._config.env.train.env_type):
            why = "it moves robots, and no one has asked for that"
            raise RLinfError("`env` cannot be measured alone", why=why, help="give a run: `--advise RUN`")
        rows = self.rows(now)
        return halves(min(self.environments, 2 * int(max(rows[STEP], rows[POLICY]))), self._group)

    def trial_size(self, component: str, rows: int, now: Arrangement) -> int:
        """See `JobFlow`: a call of env and rollout workers has all environments of a trial."""
        size = rows if component in (ENV, ROLLOUT) else rows // self._trial_chunks(now) if component == ACTOR else 0
        return max(self._group, size // self._group * self._group) if size else 0

    def _trial_chunks(self, now: Arrangement) -> int:
        """Return the action chunks of a trial's rollout segment: few, but enough for an update as large as now."""
        share = int(self.rows(now)[UPDATE])
        return min(self.chunks, max(_TRIAL_CHUNKS, -(-share // self.trial_sizes(now)[-1])))

    def trial(self, size: int, now: Arrangement) -> Mapping[str, Any]:
        """See `JobFlow`."""
        config, chunks = self._config, self._trial_chunks(now)
        train, steps = config.env.train, chunks * config.actor.model.num_action_chunks
        values: dict[str, Any] = {"env.train.total_num_envs": size, "env.train.rollout_epoch": 1}
        if steps < train.max_steps_per_rollout_epoch:
            values["env.train.max_steps_per_rollout_epoch"] = steps
            if resets_each_pass(config):
                values["env.train.max_episode_steps"] = min(steps, train.max_episode_steps or steps)
        if self.stages_now != 1:
            values["rollout.pipeline_stage_num"] = 1
        share = int(self.rows(now)[UPDATE])
        if self.off_policy:
            values["actor.global_batch_size"] = max(1, share * size // self.trial_sizes(now)[-1])
            values |= {"algorithm.learning_starts": 1, "algorithm.update_to_data": _TRIAL_UPDATES / (steps * size)}
            # Later runs would train on a recording. Files in `replay.storage` are unnamed, and end with the trial.
            values["algorithm.replay.recording_path"] = None
        else:
            unit = config.actor.micro_batch_size or 1
            batches = [batch for batch in divisors(size * chunks) if batch % unit == 0]
            values["actor.global_batch_size"] = batches[-1] if batches else None
        return {**TRIAL, **values}

    def rehearsal(self) -> Sequence[str]:
        """See `JobFlow`: environments and policy are those of `stand_ins`; off-policy the small networks stay but do
        not choose actions.
        """
        from recipes.embodied.embodied_memory import environment_spec, policy_sizes
        from recipes.embodied.learning.policy_precision import acting_type

        actor, train = self._config.actor, self._config.env.train
        spec, _ = environment_spec(train)
        words = [
            *(["~env.train.options"] if train.options else []),
            *(["env.train.task="] if train.task is not None else []),
            f"env.train.env_type={_STAND_INS}:StandInEnv",
            f"env.train.options={json.dumps({'spec': asdict(spec)})}",
            f"env.train.max_episode_steps={train.max_episode_steps or train.max_steps_per_rollout_epoch}",
            # Nobody watches or takes over, so that no device is opened.
            *(["~env.train.intervention"] if train.intervention.source != NONE else []),
            *(["~env.train.judge"] if train.judge.source != ENVIRONMENT else []),
        ]
        if self.off_policy:
            # A rehearsal has few steps, in each of which it learns; actions are drawn at random, not computed.
            starts = ["algorithm.learning_starts=1", f"algorithm.random_steps={_ALWAYS}"]
            words += ["algorithm.replay.recording_path=null", *starts]
        else:
            numbers = policy_sizes(actor, spec).acting // acting_type(actor).itemsize
            words += [
                *(["~actor.model.options"] if actor.model.options else []),
                *(["actor.model.model_path="] if actor.model.model_path is not None else []),
                *(["actor.checkpoint_load_path="] if actor.checkpoint_load_path is not None else []),
                f"actor.model.model_type={_STAND_INS}:StandInPolicy",
                f"actor.model.options={json.dumps({'numbers': numbers})}",
            ]
        return words

    def flow(self, durations: Durations, models: Mapping[str, str], sizes: Sizes = MappingProxyType({})) -> Flow:
        """See `JobFlow`."""
        return TimedFlow(self, durations, models)

    @property
    def offloads(self) -> tuple[bool, bool]:
        """Whether rollout workers, and actors, offload to free their accelerators for others."""
        return self._config.rollout.enable_offload, self._config.actor.enable_offload


class TimedFlow:
    """The flow of a job with durations.

    Args:
        job: the job.
        durations: the durations of its phases.
        models: the model name of the accelerators of each kind.
    """

    def __init__(self, job: EmbodiedFlow, durations: Durations, models: Mapping[str, str]) -> None:
        self._job, self._durations, self._models = job, durations, models
        self._offloads = job.offloads
        self._exchange = lru_cache(maxsize=None)(Exchange.of)
        self._trained = lru_cache(maxsize=None)(self._training)
        self._stepping = lru_cache(maxsize=None)(self._step)
        self._acting = lru_cache(maxsize=None)(self._act)
        self._counts = lru_cache(maxsize=None)(job.counts)
        self._fastest = lru_cache(maxsize=None)(self._fastest_up_to)
        self._sync, self._handover, self._hop = (self._constant(name) for name in (SYNC, HANDOVER, HOP))

    def _constant(self, phase: str) -> float:
        duration = self._durations.of_phase(phase, "")
        return 0.0 if duration is None else duration.at(0)

    def _duration(self, phase: str, seats: DeviceSpan) -> Duration:
        model = "" if seats.kind is None else self._models[seats.kind]
        return self._durations.of_phase(phase, model) or _NOTHING

    def _training(self, kind: str | None, actors: int) -> tuple[list[float], float]:
        """Return the seconds of the calls of an actor in a step, and their sum."""
        calls: list[float] = []
        for phase, rows, count in self._job.training(actors):
            seconds = self._duration(phase, DeviceSpan(kind, 0, actors)).mean(rows)
            if seconds:
                # Few events suffice: only a rollout worker on the same accelerator can come between them.
                parts = min(count, _MOST_PROCESSES)
                calls += [seconds * count / parts] * parts
        return calls, sum(calls)

    def counts(self, component: str, kind: DeviceGroup) -> Sequence[int]:
        """See `Shapes`."""
        return self._counts(component, kind)

    def most_useful(self, component: str, kind: DeviceGroup, units: int) -> int:
        """See `Shapes`: a growing all-reduce may make fewer actors the fastest."""
        best = self._fastest(component, kind)
        at = bisect_right(best, units)
        return best[at - 1] if at else 0

    def _fastest_up_to(self, component: str, kind: DeviceGroup) -> list[int]:
        """Return the process counts, ascending, that are faster than every smaller count."""
        best: list[int] = []
        least = inf
        for size in self._counts(component, kind):
            seconds = self._trained(kind.label, size)[1]
            if seconds < least:
                least = seconds
                best.append(size)
        return best

    def bound(self, arrangement: Arrangement) -> float:
        """See `Flow`."""
        # In the order of `EmbodiedFlow.components`, without a look-up: this runs for hundreds of thousands of
        # arrangements.
        (_, env), (_, rollout), (_, actor) = arrangement.seats
        job, stages, ahead = self._job, arrangement.stages, arrangement.staleness
        size = job.environments // stages
        moved = 2 * self._move(MOVE_ROLLOUT, 0, arrangement)
        steps = self._stepping(env.kind, size // env.size)
        chain = self._acting(rollout.kind, -(-size // rollout.size)) + job.chunks * (steps + 2 * self._hop)
        least = size // rollout.size
        env_load = job.passes * job.chunks * stages * steps
        rollout_load = job.passes * stages * (self._acting(rollout.kind, least) if least else 0.0) + moved
        both = env_load + rollout_load if env.overlaps(rollout) else max(env_load, rollout_load)
        rolled = max(job.passes * chain + moved, both)
        trained = self._trained(actor.kind, actor.size)[1] + 2 * self._move(MOVE_ACTOR, 1, arrangement)
        if not ahead:
            return self._sync + rolled + self._handover + trained
        loads = [rolled, trained + self._handover, (rolled + self._handover + trained) / (ahead + 1)]
        loads += [trained + load for seats, load in ((env, env_load), (rollout, rollout_load)) if actor.overlaps(seats)]
        if share_one(env, rollout, actor):
            loads.append(trained + env_load + rollout_load)
        return max(loads) * (1 - _WINDOW)

    def _step(self, kind: str | None, rows: int) -> float:
        return self._duration(STEP, DeviceSpan(kind, 0, 1)).mean(rows)

    def _act(self, kind: str | None, rows: int) -> float:
        """Return the seconds of a rollout worker per call for one stage."""
        seats = DeviceSpan(kind, 0, 1)
        return self._job.chunks * self._duration(POLICY, seats).mean(rows) + self._duration(VALUES, seats).mean(rows)

    def simulate(self, arrangement: Arrangement) -> Simulated:
        """See `Flow`."""
        env, rollout, actor = (arrangement.of(name) for name in (ENV, ROLLOUT, ACTOR))
        exchange, devices = self._reduced(arrangement, env, rollout, actor)
        rng = random.Random(0)
        draws = [
            _drawn(self._duration(phase, seats), rng)
            for phase, seats in ((STEP, env), (POLICY, rollout), (VALUES, rollout))
        ]
        varies = any(self._duration(phase, seats).spread for phase, seats in ((STEP, env), (POLICY, rollout)))
        costs = Costs(
            *draws,
            hop=self._hop,
            sync=self._sync,
            handover=self._handover,
            training=self._trained(actor.kind, actor.size)[0],
            move_rollout=self._move(MOVE_ROLLOUT, 0, arrangement),
            move_actor=self._move(MOVE_ACTOR, 1, arrangement),
        )
        job = VirtualJob(*devices, exchange, self._job.passes, self._job.chunks, arrangement.staleness, varies=varies)
        return simulate(job, costs)

    def _reduced(
        self, arrangement: Arrangement, env: DeviceSpan, rollout: DeviceSpan, actor: DeviceSpan
    ) -> tuple[Exchange, tuple[Sequence[Device], Sequence[Device], Sequence[Device]]]:
        """Return the processes to simulate: all, or one of several equal blocks if there are many."""
        total, stages = self._job.environments, arrangement.stages
        if env.size + rollout.size + actor.size <= _MOST_PROCESSES:
            exchange = self._exchange(total, env.size, stages, rollout.size)
            return exchange, (env.devices, rollout.devices, actor.devices)
        blocks = gcd(env.size, rollout.size)
        envs, rollouts = env.size // blocks, rollout.size // blocks
        # Actors on accelerators of their own are alike; other actors share accelerators with the block.
        block = set(env.devices[:envs]) | set(rollout.devices[:rollouts])
        actors = [device for device in actor.devices if device is not None and device in block]
        actors = actors or list(actor.devices[-1:])
        if envs + rollouts <= _MOST_PROCESSES and total % blocks == 0:
            exchange = self._exchange(total // blocks, envs, stages, rollouts)
            return exchange, (env.devices[:envs], rollout.devices[:rollouts], actors)
        size = total // stages
        exchange = Exchange.pair(size // env.size, -(-size // rollout.size), stages)
        return exchange, (env.devices[:1], rollout.devices[:1], actors[:1])

    def _move(self, phase: str, which: int, arrangement: Arrangement) -> float:
        if not self._offloads[which]:
            return 0.0
        return self._duration(phase, arrangement.of((ROLLOUT, ACTOR)[which])).mean(0)


_NOTHING: Final = Duration(0.0)


def _drawn(duration: Duration, rng: random.Random) -> Draw:
    if not duration.spread:
        return duration.at
    return lambda rows: duration.at(rows) * rng.choice(duration.spread)


def _whole_nodes(kind: DeviceGroup) -> list[int]:
    """Return the counts that fill a part of a node, or whole nodes."""
    parts = [count for count in range(1, kind.per_node + 1) if kind.per_node % count == 0]
    return parts + list(range(2 * kind.per_node, kind.units + 1, kind.per_node))
