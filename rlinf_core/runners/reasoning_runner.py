"""The training loop of language models on problems with verifiable answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

from rlinf_core.channel.channel import Channel
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.runners import events
from rlinf_core.runners.evaluation import evaluation_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.runner import NEVER, Runner
from rlinf_core.runners.samples import write_samples
from rlinf_core.runners.standalone import RunConfig
from rlinf_core.runners.statistics import mean
from rlinf_core.worker.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.worker_group import WorkerGroup

_DATA_FILE: Final = "data.json"
_numbers = itertools.count()


class GroupFigures(Protocol):
    """Figures of the answers to one prompt. `parts` and `failures` are sums over the answers."""

    @property
    def slot(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def difficulty(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def rewards(self) -> tuple[float, ...]: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def truncated(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def parts(self) -> Mapping[str, float]: ...
    @property
    def skipped(self) -> bool: ...


class Generation(Protocol):
    """Figures of one worker's share of a generation: tokens drawn, and seconds that its engine worked."""

    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Scoring(Protocol):
    """Figures of the groups that one worker scored, and answers for people to read."""

    @property
    def groups(self) -> Sequence[GroupFigures]: ...
    @property
    def samples(self) -> Sequence[Any]: ...


class ActorGroup(Protocol):
    """Calls on the workers that train, all ranks at once. A worker class has these methods without the handles."""

    def init_worker(self, layout: Any, /) -> WorkerGroupHandle[None]: ...
    def sync_model_to_rollout(self) -> WorkerGroupHandle[int]: ...
    def recv_rollout_batch(self, step: int, assignment: tuple[tuple[int, ...], ...], /) -> WorkerGroupHandle[int]: ...
    def compute_advantages_and_returns(self, step: int, /) -> WorkerGroupHandle[Mapping[str, float]]: ...
    def run_training(self, step: int, /) -> WorkerGroupHandle[Mapping[str, float]]: ...
    def save_checkpoint(self, folder: str, /) -> WorkerGroupHandle[None]: ...
    def load_checkpoint(self, folder: str, /) -> WorkerGroupHandle[int]: ...
    def save_model(self, folder: str, /) -> WorkerGroupHandle[None]: ...


class AnswerGroup(Protocol):
    """Calls on the workers that answer prompts."""

    def init_worker(self, layout: Any, /) -> WorkerGroupHandle[None]: ...
    def problem_counts(self) -> WorkerGroupHandle[tuple[int, int]]: ...
    def sync_model_from_actor(self) -> WorkerGroupHandle[int]: ...
    def generate(
        self, step: int, start: int, slots: tuple[int, ...], shown: int, /
    ) -> WorkerGroupHandle[Generation]: ...
    def evaluate(
        self, samples: int, temperature: float, first: int, count: int, /
    ) -> WorkerGroupHandle[Generation]: ...


class RewardGroup(Protocol):
    """Calls on the workers that score answers."""

    def init_worker(self, layout: Any, /) -> WorkerGroupHandle[None]: ...
    def score(self, slots: tuple[int, ...], samples: int, train: bool, /) -> WorkerGroupHandle[Scoring]: ...


class ReasoningRunner(Runner):
    """Runs actor, rollout and reward workers until the run is over: answer, score, learn.

    Every step takes a batch of prompts and answers each several times. The runner knows numbers of problems and figures
    of groups; tokens go from worker to worker.

    Args:
        cfg: the configuration of the job.
        actor: the workers that train, with the methods of `ActorGroup`.
        rollout: the workers that answer, with those of `AnswerGroup`.
        reward: the workers that score, with those of `RewardGroup`.
        layout: makes the value that all workers are given at their start, from the numbers of actor, rollout and reward
            workers and the names of the channels to the reward workers and to the actors.
        record: see `Runner`.
    """

    def __init__(
        self,
        cfg: RunConfig,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[Any],
        reward: WorkerGroup[Any],
        layout: Callable[[int, int, int, str, str], Any],
        record: RunRecord | None = None,
    ) -> None:
        super().__init__(cfg, {"actor": actor, "rollout": rollout, "reward": reward}, record)
        self.actor = cast("ActorGroup", actor)
        self.rollout = cast("AnswerGroup", rollout)
        self.reward = cast("RewardGroup", reward)
        self._cfg: Any = cfg
        self._settings: Any = cfg.runner
        self._layout = layout
        # The version of the weights that the rollout has.
        self._synced: int | None = None
        # Problems that training has taken so far.
        self._taken = 0
        self._problems = self._val_problems = 0

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None: it has no end. An epoch is a pass over the problems."""
        limits: list[int] = [] if self._settings.max_steps == NEVER else [self._settings.max_steps]
        if self._settings.max_epochs != NEVER and self._problems:
            whole = self._settings.max_epochs * self._problems
            limits.append(max(1, whole // self._cfg.data.rollout_batch_size))
        return min(limits, default=None)

    def start_workers(self) -> None:
        """Load models and data."""
        number = next(_numbers)
        name = self.groups["actor"].worker_group_name
        answers, scored = f"{name}-answers-{number}", f"{name}-scored-{number}"
        self._channels = [Channel.create(answers), Channel.create(scored)]
        sizes = self.world_sizes
        layout = self._layout(sizes["actor"], sizes["rollout"], sizes["reward"], answers, scored)
        wait_together(self.actor.init_worker(layout), self.rollout.init_worker(layout), self.reward.init_worker(layout))
        self._problems, self._val_problems = self.rollout.problem_counts().wait()[0]

    def train_step(self, step: int) -> dict[str, float]:
        """Carry out the four phases of a step."""
        self.update_rollout_weights(step)
        metrics = self.generate_rollouts(step)
        with self.phase(step, events.ADVANTAGES):
            metrics |= _means(self.actor.compute_advantages_and_returns(step).wait())
        with self.phase(step, events.ACTOR_TRAINING):
            metrics |= _means(self.actor.run_training(step).wait())
        self.weight_version += 1
        return metrics

    def update_rollout_weights(self, step: int | None = None) -> None:
        """Give the rollout workers the weights of the actor, unless they have them."""
        if self._synced == self.weight_version:
            return
        step = self.next_step if step is None else step
        with self.phase(step, events.SYNC_WEIGHTS):
            wait_together(self.rollout.sync_model_from_actor(), self.actor.sync_model_to_rollout())
        self._synced = self.weight_version

    def generate_rollouts(self, step: int | None = None) -> dict[str, float]:
        """Answer and score a batch of prompts, and hand them to the actors so that tokens are shared out evenly.

        Groups that are dropped (`algorithm.filter_groups`) are replaced by those of further prompts, up to
        `max_refills` times.

        Returns:
            Metrics of all answers, by their full names.
        """
        step = self.next_step if step is None else step
        algorithm, wanted = self._cfg.algorithm, self._cfg.data.rollout_batch_size
        kept: list[GroupFigures] = []
        every: list[GroupFigures] = []
        tokens, busy = 0, 0.0
        with self.phase(step, events.GENERATE_ROLLOUTS):
            for _ in range(1 + (algorithm.max_refills if algorithm.filter_groups else 0)):
                missing = wanted - len(kept)
                slots = tuple(range(len(every), len(every) + missing))
                samples = self._samples_due(step) if not every else 0
                generated, scored = wait_together(
                    self.rollout.generate(step, self._taken, slots, samples), self.reward.score(slots, samples, True)
                )
                self._taken += missing
                found = sorted((group for report in scored for group in report.groups), key=lambda each: each.slot)
                every += found
                kept += [each for each in found if not each.skipped and not self._is_dropped(each)]
                tokens += sum(each.tokens for each in generated)
                busy += max(each.seconds for each in generated)
                if samples:
                    shown = [each._asdict() for report in scored for each in report.samples]
                    write_samples(self.record.folder.path, step, shown)
                if len(kept) >= wanted:
                    break
            if not kept:
                raise RunError(
                    f"step {step} has nothing to learn from",
                    why=_why_nothing(every),
                    help="give other problems, a larger `algorithm.group_size`, or `filter_groups: false`",
                )
            staleness = self.actor.recv_rollout_batch(step, _assignment(kept, self.world_sizes["actor"])).wait()
        metrics = group_metrics(every)
        metrics["rollout/groups_kept"] = len(kept) / len(every)
        metrics["rollout/tokens_per_second"] = tokens / busy if busy else 0.0
        metrics["rollout/staleness_max"] = float(max(staleness))
        return metrics

    def _is_dropped(self, group: GroupFigures) -> bool:
        return self._cfg.algorithm.filter_groups and len(set(group.rewards)) == 1

    def _samples_due(self, step: int) -> int:
        due = self._is_due(self._settings.sample_interval, step) or step == 1
        return self._settings.max_samples if due and self._settings.sample_interval != NEVER else 0

    def evaluate_policy(self, step: int) -> dict[str, float]:
        """Answer the problems of evaluation, and return how many were right."""
        self.update_rollout_weights(step)
        self.record.tell(events.PhaseStarted(step, events.EVALUATE))
        data = self._cfg.data
        samples, groups = data.val_samples, list[GroupFigures]()
        temperature = 0.0 if samples == 1 else self._cfg.rollout.sampling_params.temperature
        for first in range(0, self._val_problems, data.val_rollout_batch_size):
            count = min(data.val_rollout_batch_size, self._val_problems - first)
            _, scored = wait_together(
                self.rollout.evaluate(samples, temperature, first, count),
                self.reward.score(tuple(range(count)), 0, False),
            )
            groups += [group for report in scored for group in report.groups]
        return evaluation_metrics(groups, samples, self._cfg.reward.correct_reward)

    def write_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer, and how many problems were taken."""
        self.actor.save_checkpoint(str(folder)).wait()
        (folder / _DATA_FILE).write_text(json.dumps({"problems_taken": self._taken}))

    def read_checkpoint(self, folder: Path) -> None:
        """Read what `write_checkpoint` wrote."""
        self.weight_version = self.actor.load_checkpoint(str(folder)).wait()[0]
        self._taken = _read_taken(folder)

    def finish(self) -> None:
        """Write the trained model as a folder that other programs load: `model` in the run folder."""
        if self._settings.save_format != "dcp" and not self._settings.only_eval:
            self.actor.save_model(str(self.record.folder.path / "model")).wait()

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same."""
        super().shutdown()
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
