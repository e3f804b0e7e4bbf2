"""The flow of a job of recipe `math` or `agent`: legal counts, needed records, bounds and simulations."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from recipes.language.config.language_config import OPTIONAL_COMPONENTS, LanguageConfig
from recipes.language.virtual_answers import AnswerJob, measured, simulate
from rlinf_core import RLinfError
from rlinf_core.job.arrangements import Arrangement, DeviceGroup, DeviceSpan, Flow, Simulated
from rlinf_core.job.flow import TRIAL, CallRow, Duration, Durations, Recorded, Sizes, halves

ROLLOUT, ACTOR, REWARD, DRIVER = "rollout", "actor", "reward", "driver"
STEP, UPDATE, SCORE, ANSWER = "engine/step", "training/update", "reward/score", "answer"
SYNC, HANDOVER, TURNS, PAUSE = "driver/sync", "driver/handover", "driver/turns", "driver/pause"
# The time between two steps of an engine.
LAG: Final = "driver/lag"
# Rollouts that run ahead may gain up to this share of a step within the measured steps.
_WINDOW: Final = 0.02
# An engine may take this many times fewer steps than the longest answer has tokens.
_MOST_OFF: Final = 2.0
# With at most this many accelerators of a kind, every count is tried.
_EVERY_COUNT: Final = 16


def flow_of(config: LanguageConfig) -> LanguageFlow:
    """Return the flow of a job, see `Recipe.flow`.

    Raises:
        RLinfError: the job has components that the flow does not model.
    """
    further = [name for name in OPTIONAL_COMPONENTS if name in config.cluster.component_placement]
    if further:
        why = "the model has actors, rollout and reward workers"
        help = "compare runs of a few steps of each placement: `time/step` in their metrics"
        raise RLinfError(f"no advice on jobs with component `{further[0]}`", why=why, help=help)
    return LanguageFlow(config)


class LanguageFlow:
    """The flow of a job; see `JobFlow`."""

    components = (ROLLOUT, ACTOR)
    phases: Mapping[str, tuple[str, ...]] = {ROLLOUT: (STEP,), ACTOR: (UPDATE,)}
    stages = (1,)
    stages_now = 1

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self.prompts, self.answers = config.data.rollout_batch_size, config.algorithm.group_size
        self.updates, self._epochs = config.minibatches, config.algorithm.update_epoch
        self.drains = not config.runner.partial_rollout
        reward = config.cluster.component_placement.get(REWARD)
        parts = () if reward is None else reward.placement.parts
        self.rewards = max(1, sum(len(part.processes) for part in parts if part.processes is not None))

    def counts(self, component: str, kind: DeviceGroup) -> Sequence[int]:
        """Return the process counts of a component that are worth trying on a kind of accelerator, ascending."""
        most = min(kind.units, self.prompts if component == ROLLOUT else self.prompts * self.answers)
        every = range(1, most + 1)
        if kind.units <= _EVERY_COUNT:
            return every
        return [count for count in every if count % kind.per_node == 0 or kind.per_node % count == 0]

    def legal(self, arrangement: Arrangement) -> bool:
        """See `JobFlow`: engines that never stop cannot leave their memory to others."""
        ahead = arrangement.staleness > 0 and arrangement.of(ROLLOUT).overlaps(arrangement.of(ACTOR))
        return not (ahead and self._config.rollout.enable_offload)

    def training(self, actors: int, tokens: float) -> list[tuple[float, int]]:
        """Return the calls of an actor in a step, as tokens per call and the number of such calls."""
        return [(tokens / actors / self.updates, self.updates * self._epochs)]

    def calls(self, run: Recorded) -> list[CallRow]:
        """See `JobFlow`: the tokens of an update are scaled to the tokens that engines drew.

        An update skips answers without a learning signal and includes the text of tools between turns, but a placement
        is simulated from drawn tokens alone.
        """
        drawn = sum(tokens * number for tokens, number in run.sizes.get(ANSWER, ())) * self._epochs
        trained = sum(row.rows * row.calls for row in run.rows if row.phase == UPDATE)
        if not (drawn and trained):
            return list(run.rows)
        share = trained / drawn
        return [row._replace(rows=row.rows / share) if row.phase == UPDATE else row for row in run.rows]

    def constants(self, run: Recorded, durations: Durations) -> list[CallRow]:
        """See `JobFlow`: weight transfer, the time between phases and between engine steps, and waits for tools."""
        phases = run.phases
        if run.arrangement.staleness:
            return []
        sync = phases.get("time/sync_weights", 0.0)
        known = phases["time/generate_rollouts"] + phases["time/actor_training"] + sync
        constants = {SYNC: sync, HANDOVER: max(0.0, phases["time/step"] - known)}
        turns = max(1, round(phases.get("agent/turns", 1.0)))
        if turns > 1:
            # The recorded seconds of tools, spread over the pauses between turns.
            tools = sum(seconds for name, seconds in phases.items() if name.startswith("agent/tool_seconds/"))
            constants |= {TURNS: float(turns), PAUSE: tools / (turns - 1)}
        if run.sizes.get(ANSWER):
            constants[LAG] = self._lag(run, durations, constants)
        return [CallRow(DRIVER, phase, 0, "", 1, seconds) for phase, seconds in constants.items()]

    def _lag(self, run: Recorded, durations: Durations, constants: Mapping[str, float]) -> float:
        """Return the seconds between two engine steps that explain why a rollout takes longer than its calls."""
        calls = {name: fits for name, fits in durations.phases.items() if name != UPDATE}
        calls |= {name: {"": Duration(constants[name])} for name in (TURNS, PAUSE) if name in constants}

        def seconds(lag: float) -> float:
            flow = self.flow(Durations({**calls, LAG: {"": Duration(lag)}}), run.models, run.sizes)
            return flow.simulate(run.arrangement).seconds

        silent = seconds(0.0)
        lack = run.phases["time/generate_rollouts"] - silent
        if lack <= 0.0:
            return 0.0
        # A rollout has about as many engine steps as the longest answer has tokens. Simulating a guessed lag shows the
        # actual number, unless slow scoring hides it.
        guess = lack / max(tokens for tokens, _ in run.sizes[ANSWER])
        shown = seconds(guess) - silent
        return guess * min(_MOST_OFF, lack / shown) if shown > 0.0 else 0.0

    def rows(self, arrangement: Arrangement) -> Mapping[str, float]:
        """See `JobFlow`: the largest number of answers that an engine generates at once."""
        return {STEP: self.answers * -(-self.prompts // arrangement.of(ROLLOUT).size)}

    def changes(self, arrangement: Arrangement) -> Mapping[str, Any]:
        """See `JobFlow`."""
        ahead = arrangement.staleness
        return {} if ahead == self._config.runner.staleness else {"runner.max_staleness": ahead}

    def trial_sizes(self, now: Arrangement) -> Sequence[int]:
        """See `JobFlow`: prompts.

        Raises:
            RLinfError: answers come from an external server, which would receive the weights of a trial.
        """
        if self._config.rollout.backend == "server":
            why = "trials would send their weights to the server of `rollout.engine_options`"
            raise RLinfError("`rollout` cannot be measured alone", why=why, help="give a run: `--advise RUN`")
        return halves(min(self.prompts, 2 * -(-self.prompts // now.of(ROLLOUT).size)))

    def trial_size(self, component: str, rows: int, now: Arrangement) -> int:
        """See `JobFlow`: an engine generates all answers of a trial at once."""
        return max(1, rows // self.answers) if component == ROLLOUT else 0

    def trial(self, size: int, now: Arrangement) -> Mapping[str, Any]:
        """See `JobFlow`."""
        values: dict[str, Any] = {"data.rollout_batch_size": size}
        batch = self._config.actor.global_batch_size
        if batch is not None:
            values["actor.global_batch_size"] = max(1, size * self.answers // self.updates)
        return {**TRIAL, **values}

    def rehearsal(self) -> Sequence[str]:
        """See `JobFlow`: rehearsals replace engine, model, scorer and agent by stand-ins."""
        return ["runner.sample_interval=-1", "runner.save_format=dcp", 'rollout.check_logprobs="off"']

    def flow(self, durations: Durations, models: Mapping[str, str], sizes: Sizes) -> Flow:
        """See `JobFlow`.

        Raises:
            RLinfError: no run recorded answer lengths.
        """
        if not sizes.get(ANSWER):
            raise RLinfError("the runs recorded no lengths of answers", help="give runs of a newer version")
        return TimedLanguageFlow(self, durations, models, sizes[ANSWER])


class TimedLanguageFlow:
    """The flow of a job with known durations.

    Args:
        job: the job.
        durations: the durations of the job's phases.
        models: the accelerator model of each kind.
        lengths: answer lengths in tokens, each with the number of answers of about that length.
    """

    def __init__(
        self,
        job: LanguageFlow,
        durations: Durations,
        models: Mapping[str, str],
        lengths: Sequence[tuple[float, int]],
    ) -> None:
        self._job, self._durations, self._models, self._drawn = job, durations, models, lengths
        self.lengths = lru_cache(maxsize=None)(self._lengths)
        self._sync, self._handover, turns, self._pause, self._lag = (
            self._of(name, None).at(0) for name in (SYNC, HANDOVER, TURNS, PAUSE, LAG)
        )
        self._turns = max(1, round(turns))

    def _of(self, phase: str, kind: str | None) -> Duration:
        return self._durations.of_phase(phase, "" if kind is None else self._models[kind]) or Duration(0.0)

    def _lengths(self, step: int) -> list[list[int]]:
        """Return the answer lengths in tokens for each prompt of a step; equal for every arrangement."""
        tokens, numbers = zip(*self._drawn, strict=True)
        drawn = random.Random(step).choices(tokens, numbers, k=self._job.prompts * self._job.answers)
        whole = [max(1, round(length)) for length in drawn]
        return [whole[start : start + self._job.answers] for start in range(0, len(whole), self._job.answers)]

    def _trained(self, actor: DeviceSpan, tokens: float) -> list[float]:
        duration = self._of(UPDATE, actor.kind)
        calls = self._job.training(actor.size, tokens)
        return [duration.mean(rows) for rows, number in calls for _ in range(number)]

    def counts(self, component: str, kind: DeviceGroup) -> Sequence[int]:
        """See `Shapes`."""
        return self._job.counts(component, kind)

    def most_useful(self, component: str, kind: DeviceGroup, units: int) -> int:
        """See `Shapes`."""
        counts = [count for count in self.counts(component, kind) if count <= units]
        return min(counts, key=lambda count: sum(self._trained(DeviceSpan(kind.label, 0, count), 1e5)), default=0)

    def bound(self, arrangement: Arrangement) -> float:
        """See `Flow`."""
        rollout, actor, ahead = arrangement.of(ROLLOUT), arrangement.of(ACTOR), arrangement.staleness
        first, last = measured(ahead)
        step, score = self._of(STEP, rollout.kind), self._of(SCORE, None).mean(self._job.answers)
        score += self._pause * (self._turns - 1)
        line = step.mean(0), step.mean(1) - step.mean(0)
        token = sum(line) + self._lag
        answered = trained = load = 0.0
        for number in range(first + 1, last + 1):
            groups = self.lengths(number)
            tokens = sum(map(sum, groups))
            trained += sum(self._trained(actor, tokens))
            longest = max(map(max, groups))
            if ahead:
                most = self._job.prompts * self._job.answers * (ahead + 1)
                load += tokens * line[1] / rollout.size + line[0] * max(longest, tokens / most) / (ahead + 1)
                answered += longest * token + score
            else:
                mine = [groups[rank :: rollout.size] for rank in range(min(rollout.size, len(groups)))]
                if self._turns > 1:
                    # Either the engine is always busy, or the longest conversation decides.
                    busy = max(line[1] * sum(map(sum, part)) for part in mine)
                    answered += max(busy, longest * token + score)
                    continue
                fix = line[0] + self._lag
                answered += score + max(fix * max(map(max, part)) + line[1] * sum(map(sum, part)) for part in mine)
        whole, steps = self._handover * (last - first) + trained, last - first
        if not ahead:
            return self._sync + (answered + whole) / steps
        loads = [whole, load, (answered + whole) / (ahead + 1)]
        return max(loads) / steps * (1 - _WINDOW)

    def simulate(self, arrangement: Arrangement) -> Simulated:
        """See `Flow`."""
        rollout, actor = arrangement.of(ROLLOUT), arrangement.of(ACTOR)
        return simulate(
            AnswerJob(
                rollout.devices,
                actor.devices,
                self._job.rewards,
                arrangement.staleness,
                self.lengths,
                self._of(STEP, rollout.kind),
                self._of(SCORE, None),
                self._sync,
                self._handover,
                partial(self._trained, actor),
                self._turns,
                self._pause,
                self._lag,
                drains=self._job.drains,
            )
        )
