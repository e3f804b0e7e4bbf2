"""The training loop of language models on problems with verifiable answers."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlinf_core.channel.channel import Channel
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.runners import events
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.samples import write_samples
from rlinf_core.runners.statistics import mean, pass_at_k, wilson_interval
from rlinf_core.worker.handle import wait_together
from rlinf_core.worker.worker_group import WorkerGroup

NEVER = -1
_DATA_FILE = "data.json"
_numbers = itertools.count()


class GroupFigures(Protocol):
    """What the loop reads of the answers to one prompt."""

    slot: int
    tokens: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int
    failures: dict[str, int]
    parts: dict[str, float]
    oldest: int
    skipped: bool


class Refill(NamedTuple):
    """Groups of one round of generation."""

    first: int
    slots: tuple[int, ...]


class ReasoningRunner:
    """Answer, score, learn: every step a batch of prompts, each answered several times.

    The runner knows numbers of problems and figures of groups; tokens go from worker to worker.

    Args:
        cfg: the configuration of the job.
        actor: the workers that learn.
        rollout: the workers that answer.
        reward: the workers that score.
        record: keeps what happens; training begins after its step.
        layout: makes the value that all workers are given at their start, from the sizes of the groups and the names
            of the channels.
    """

    def __init__(
        self,
        cfg: Any,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[Any],
        reward: WorkerGroup[Any],
        record: RunRecord,
        layout: Any,
    ) -> None:
        self.cfg = cfg
        self.config = cfg.runner
        self.actor = actor
        self.rollout = rollout
        self.reward = reward
        self.record = record
        self._layout = layout
        self._times: dict[str, float] = {}
        self._version = 0
        self._synced: int | None = None
        # Problems that training has taken so far.
        self._taken = 0

    @property
    def world_sizes(self) -> dict[str, int]:
        """Processes of each component."""
        groups = {"actor": self.actor, "rollout": self.rollout, "reward": self.reward}
        return {name: group.world_size for name, group in groups.items()}

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None: it has no end."""
        limits: list[int] = [] if self.config.max_steps == NEVER else [self.config.max_steps]
        if self.config.max_epochs != NEVER:
            batch = self.cfg.data.rollout_batch_size
            limits.append(max(1, self.config.max_epochs * self._problems // batch))
        return min(limits, default=None)

    def init_workers(self) -> None:
        """Load models and data, and the checkpoint that the run continues from."""
        number = next(_numbers)
        names = [f"{self.actor.worker_group_name}-{each}-{number}" for each in ("answers", "scored")]
        self._channels = [Channel.create(name) for name in names]
        sizes = self.world_sizes
        layout = self._layout(sizes["actor"], sizes["rollout"], sizes["reward"], *names)
        wait_together(self.actor.init_worker(layout), self.rollout.init_worker(layout), self.reward.init_worker(layout))
        self._problems, self._val_problems = self.rollout.problem_counts().wait()[0]
        source = self.record.source
        if source is not None:
            self._version = self.actor.load_checkpoint(str(source.path)).wait()[0]
            self._taken = _read_taken(source.path)

    def run(self) -> None:
        """Train to the end, or evaluate once with `only_eval`."""
        record, last = self.record, self.last_step
        record.started(record.step if self.config.only_eval else last, self.world_sizes)
        if self.config.only_eval:
            self.evaluate(record.step)
            return
        for step in itertools.count(record.step + 1):
            if last is not None and step > last:
                break
            self.train(step)
            if self._is_due(self.config.val_check_interval, step):
                self.evaluate(step)
            if self._is_due(self.config.save_interval, step):
                self.save_checkpoint(step)
            record.collect_trace(self.actor, self.rollout, self.reward, last=step == last)
        if self.config.save_format != "dcp":
            self.save_model()

    def _is_due(self, interval: int, step: int) -> bool:
        return interval != NEVER and (step % interval == 0 or step == self.last_step)

    def train(self, step: int) -> None:
        """Take one training step."""
        self._times = {}
        began = time.perf_counter()
        self.update_rollout_weights(step)
        metrics = self.generate_rollouts(step)
        with self._phase(step, events.ADVANTAGES):
            metrics |= _means(self.actor.compute_advantages_and_returns(step).wait())
        with self._phase(step, events.ACTOR_TRAINING):
            metrics |= _means(self.actor.run_training(step).wait())
        self._version += 1
        self._times["time/step"] = time.perf_counter() - began
        self.record.step_finished(step, {**metrics, **self._times})

    def update_rollout_weights(self, step: int) -> None:
        """Give the rollout workers the weights of the actor, unless they have them."""
        if self._synced == self._version:
            return
        with self._phase(step, events.SYNC_WEIGHTS):
            wait_together(self.rollout.sync_model_from_actor(), self.actor.sync_model_to_rollout())
        self._synced = self._version

    def generate_rollouts(self, step: int) -> dict[str, float]:
        """Answer and score a batch of prompts, and hand them to the actors so that tokens are shared out evenly.

        Groups that are dropped (`algorithm.filter_groups`) are replaced by those of further prompts, up to
        `max_refills` times.
        """
        algorithm, wanted = self.cfg.algorithm, self.cfg.data.rollout_batch_size
        kept: list[GroupFigures] = []
        every: list[GroupFigures] = []
        tokens, busy = 0, 0.0
        with self._phase(step, events.GENERATE_ROLLOUTS):
            for _ in range(1 + (algorithm.max_refills if algorithm.filter_groups else 0)):
                missing = wanted - len(kept)
                slots = tuple(range(len(every), len(every) + missing))
                samples = self._samples_due(step) if not every else 0
                generated, scored = wait_together(
                    self.rollout.generate(step, self._taken, slots, samples), self.reward.score(slots, samples, True)
                )
                self._taken += missing
                found = sorted(group for report in scored for group in report.groups)
                every += found
                kept += [each for each in found if not each.skipped and not self._is_dropped(each)]
                tokens += sum(each.tokens for each in generated)
                busy += max(each.seconds for each in generated)
                if samples:
                    self._write_samples(step, [each for report in scored for each in report.samples])
                if len(kept) >= wanted:
                    break
            if not kept:
                raise RunError(
                    f"step {step} has nothing to learn from",
                    why=_why_nothing(every),
                    help="give other problems, a larger `algorithm.group_size`, or `filter_groups: false`",
                )
            assignment = _assignment(kept, self.actor.world_size)
            staleness = self.actor.recv_rollout_batch(step, assignment).wait()
        metrics = group_metrics(every)
        metrics["rollout/groups_kept"] = len(kept) / len(every)
        metrics["rollout/tokens_per_second"] = tokens / busy if busy else 0.0
        metrics["rollout/staleness_max"] = float(max(staleness))
        return metrics

    def _is_dropped(self, group: GroupFigures) -> bool:
        return self.cfg.algorithm.filter_groups and len(set(group.rewards)) == 1

    def _samples_due(self, step: int) -> int:
        return self.config.max_samples if self._is_due(self.config.sample_interval, step) or step == 1 else 0

    def evaluate(self, step: int) -> None:
        """Answer the problems of evaluation and record how many were right."""
        self.update_rollout_weights(step)
        self.record.tell(events.PhaseStarted(step, events.EVALUATE))
        began = time.perf_counter()
        data = self.cfg.data
        samples, groups = data.val_samples, list[GroupFigures]()
        temperature = 0.0 if samples == 1 else self.cfg.rollout.sampling_params.temperature
        for first in range(0, self._val_problems, data.val_rollout_batch_size):
            count = min(data.val_rollout_batch_size, self._val_problems - first)
            _, scored = wait_together(
                self.rollout.evaluate(samples, temperature, first, count),
                self.reward.score(tuple(range(count)), 0, False),
            )
            groups += [group for report in scored for group in report.groups]
        right = self.cfg.reward.correct_reward
        metrics = evaluation_metrics(groups, samples, right)
        self.record.evaluated(step, {**metrics, "time/evaluate": time.perf_counter() - began})

    def save_checkpoint(self, step: int) -> None:
        """Keep everything that training after `step` depends on."""

        def write(path: Path) -> None:
            self.actor.save_checkpoint(str(path)).wait()
            (path / _DATA_FILE).write_text(json.dumps({"problems_taken": self._taken}))

        self.record.save(step, write, weight_version=self._version, world_sizes=self.world_sizes)

    def save_model(self) -> None:
        """Write the trained model as a folder that other programs load: `model` in the run folder."""
        self.actor.save_model(str(self.record.folder.path / "model")).wait()

    def _write_samples(self, step: int, samples: Sequence[Any]) -> None:
        write_samples(self.record.folder.path, step, (each._asdict() for each in samples))

    @contextmanager
    def _phase(self, step: int, name: str) -> Generator[None, None, None]:
        self.record.tell(events.PhaseStarted(step, name))
        began = time.perf_counter()
        yield
        key = f"time/{name}"
        self._times[key] = self._times.get(key, 0.0) + time.perf_counter() - began

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same."""
        for group in (self.actor, self.rollout, self.reward):
            group.shutdown()
        for channel in self._channels:
            channel.close()


def group_metrics(groups: Sequence[GroupFigures]) -> dict[str, float]:
    """Return figures of all answers of a step."""
    rewards = [reward for each in groups for reward in each.rewards]
    lengths = [length for each in groups for length in each.lengths]
    count = max(1, len(rewards))
    average = mean(rewards)
    metrics = {
        "rollout/reward": average,
        "rollout/reward_std": mean([(reward - average) ** 2 for reward in rewards]) ** 0.5,
        "rollout/response_length": mean(lengths),
        "rollout/truncated": sum(each.truncated for each in groups) / count,
        "rollout/prompts_skipped": float(sum(each.skipped for each in groups)),
    }
    whole = sum(each.tokens for each in groups)
    if rewards:
        metrics["rollout/prompt_length"] = (whole - sum(lengths)) / count
    for each in groups:
        for kind, number in each.failures.items():
            key = f"reward/failed_{kind}"
            metrics[key] = metrics.get(key, 0.0) + number
        for name, total in each.parts.items():
            key = f"reward/{name}"
            metrics[key] = metrics.get(key, 0.0) + total / count
    return metrics


def evaluation_metrics(groups: Sequence[GroupFigures], samples: int, correct: float) -> dict[str, float]:
    """Return how often answers were right, with 95 % intervals."""
    right = [sum(reward >= correct for reward in each.rewards) for each in groups]
    asked = [len(each.rewards) for each in groups]
    total, count = sum(right), sum(asked)
    low, high = wilson_interval(total, count)
    metrics = {"eval/pass@1": total / max(1, count), "eval/pass@1_low": low, "eval/pass@1_high": high}
    metrics["eval/length"] = mean([length for each in groups for length in each.lengths])
    if samples > 1:
        metrics[f"eval/pass@{samples}"] = mean(
            [pass_at_k(n, c, samples) for n, c in zip(asked, right, strict=True) if n]
        )
        metrics[f"eval/mean@{samples}"] = metrics["eval/pass@1"]
    return metrics


def _assignment(groups: Sequence[GroupFigures], actors: int) -> tuple[tuple[int, ...], ...]:
    """Return the slots of each actor, so that their tokens are alike: largest first, to the one with the least."""
    loads = [0] * actors
    dealt: list[list[int]] = [[] for _ in range(actors)]
    for group in sorted(groups, key=lambda each: (-each.tokens, each.slot)):
        rank = loads.index(min(loads))
        loads[rank] += group.tokens
        dealt[rank].append(group.slot)
    return tuple(tuple(sorted(each)) for each in dealt)


def _why_nothing(groups: Sequence[GroupFigures]) -> str:
    skipped = sum(each.skipped for each in groups)
    if skipped == len(groups):
        return f"all {skipped} prompts are longer than `data.max_prompt_length`"
    return f"the answers to each of {len(groups) - skipped} prompts have equal rewards"


def _read_taken(checkpoint: Path) -> int:
    try:
        return int(json.loads((checkpoint / _DATA_FILE).read_text())["problems_taken"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            "the checkpoint does not say which problems were taken",
            where=str(checkpoint / _DATA_FILE),
            why=str(error),
            help="continue from another checkpoint",
        ) from None


def _means(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return figures of ranks as their mean over those that have them."""
    names = dict.fromkeys(name for each in by_rank for name in each)
    return {name: mean([each[name] for each in by_rank if name in each]) for name in names}
