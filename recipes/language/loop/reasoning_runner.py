"""The training loop of language models on problems with verifiable answers.

This module only orders a run: start, the phases of a step, evaluation, checkpoints, end. Other modules decide and
compute: the plan of prompts, generation services, accounts of arrivals, prompt checkpoints, recovery, metrics.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from recipes.language.answers.prompt_messages import (
    PROGRESS,
    GroupReport,
    Inbox,
    Prompt,
    assign,
    judge_key,
    staleness,
    unlearned_prompts,
)
from recipes.language.config.language_config import OPTIONAL_COMPONENTS
from recipes.language.config.problem_config import EVALUATED_AT_ONCE
from recipes.language.loop.answer_recovery import AnswerRecovery, SuspectedPrompts
from recipes.language.loop.generation import AsyncRollouts, PromptService, SyncRollouts, wait_for
from recipes.language.loop.group_accounts import (
    Arrivals,
    evaluation_metrics,
    group_metrics,
    nothing_to_learn,
    rank_figures,
    scoring_progress,
)
from recipes.language.loop.model_checkpoints import PromptCheckpoints, require_state, save_parts
from recipes.language.loop.prompt_plan import PromptPlan, make_curriculum
from recipes.language.loop.worker_groups import (
    AnsweringGroup,
    CriticGroup,
    EngineGroup,
    GenerationGroup,
    JudgeGroup,
    LanguageActorGroup,
    LanguageLayout,
    ReferenceGroup,
    RewardGroup,
)
from recipes.training.comparing_worker import comparisons_of
from rlinf_core import Channel, WorkerGroup, WorkerGroupHandle
from rlinf_core.runners import events
from rlinf_core.runners.events import ItemFates
from rlinf_core.runners.record import RunConfig, RunRecord
from rlinf_core.runners.runner import NEVER, RolloutRunner
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.worker.handle import wait_together
from rlinf_core.worker.timer import add_call

LOGGER = logging.getLogger("rlinf")
# The phase of answer lengths in `profile.json`.
ANSWER = "answer"
_numbers = itertools.count()

# The maximum answers of a sample file.
_SAMPLES: Final = 64


class ReasoningRunner(RolloutRunner):
    """A runner that has actor, rollout and reward workers answer, score and learn until the run is over.

    Every step learns from a batch of prompts, each answered several times. The runner handles only numbers of problems
    and metrics of groups (`PromptPlan` decides, a `PromptService` acts); workers exchange tokens directly.

    With `runner.max_staleness: 0`, a step runs sync, generation, advantages and training in sequence. With k, the
    prompts of the next k steps are answered at the same time, and generation never stops: engines load new weights
    between two tokens, and no token trains weights more than k versions newer than those that drew it.

    Args:
        cfg: the configuration of the job.
        groups: the workers by component: `actor` trains, `rollout` holds engines and answers unless other workers do,
            `reward` scores; if placed, `critic`, `reference` and `teacher` evaluate tokens, and `judge` judges answers.
        record: see `Runner`.
    """

    # The component whose workers answer prompts.
    answering: ClassVar[str] = "rollout"

    def __init__(self, cfg: RunConfig, groups: Mapping[str, WorkerGroup[Any]], record: RunRecord | None = None) -> None:
        super().__init__(cfg, groups, record)
        self.actor = cast("LanguageActorGroup", groups["actor"])
        self.rollout = cast("EngineGroup", groups["rollout"])
        self.answers = cast("AnsweringGroup", groups[self.answering])
        self.reward = cast("RewardGroup", groups["reward"])

        def placed(*names: str) -> list[Any]:
            return [groups[name] for name in names if name in groups]

        self._critics: list[CriticGroup] = placed("critic")
        self._references: list[ReferenceGroup] = placed("reference", "teacher")
        self._judges: list[JudgeGroup] = placed("judge")
        # The judges' calls, which last for the whole run.
        self._judging: list[WorkerGroupHandle[None]] = []
        self._cfg: Any = cfg
        self._settings: Any = cfg.runner
        self._problems = self._val_problems = 0
        algorithm = self._cfg.algorithm
        self._plan = PromptPlan(
            batch_size=self._cfg.data.rollout_batch_size,
            max_staleness=self.config.staleness,
            max_refills=algorithm.max_refills if algorithm.filter_groups else 0,
            workers=self.world_sizes[self.answering],
            answers=algorithm.group_size,
            temperature=self._cfg.rollout.sampling_params.temperature,
            shown=self._groups_shown,
        )
        self._suspects = SuspectedPrompts(self.record, self._cfg.data)
        self._recovery = AnswerRecovery(self.groups, self.answering, self.record, self._suspects)
        answers = self._cfg.data.rollout_batch_size * algorithm.group_size
        self._arrivals = Arrivals(self._plan, answers, self._settings.max_failed_fraction)
        self._prompts = PromptCheckpoints(self.actor, self._plan, self._arrivals)
        # Whether the log-probabilities of engine and trainer have been compared.
        self._compared_engine = False

    @property
    def last_step(self) -> int | None:
        """The last step of the run, None without an end; an epoch is a pass over the problems."""
        limits: list[int] = [] if self._settings.max_steps == NEVER else [self._settings.max_steps]
        if self._settings.max_epochs != NEVER and self._problems:
            prompts = self._settings.max_epochs * self._problems
            limits.append(max(1, prompts // self._cfg.data.rollout_batch_size))
        return min(limits, default=None)

    def start_workers(self) -> None:
        """Load models and data."""
        number = next(_numbers)
        name = self.groups["actor"].worker_group_name
        answers, scored = f"{name}-answers-{number}", f"{name}-scored-{number}"
        sizes = self.world_sizes
        further = [sizes.get(name, 0) for name in OPTIONAL_COMPONENTS]
        layout = LanguageLayout(sizes["actor"], sizes["rollout"], sizes["reward"], answers, scored, *further)
        # Start the channels' processes while the workers load models and data.
        with ThreadPoolExecutor(2, "rlinf-channel") as pool:
            channels = [pool.submit(Channel.create, name) for name in (answers, scored)]
            wait_together(*(cast("Any", group).init_worker(layout) for group in self.groups.values()))
            self._channels = [channel.result() for channel in channels]
        self._progress = Inbox(self._channels[1], PROGRESS)
        self._prepared(layout)
        note_comparisons(self.record.folder.path, comparisons_of(self.groups.values()))
        self._problems, self._val_problems = self.answers.problem_counts().wait()[0]
        self._suspects.problems = self._problems
        self._plan.curriculum = make_curriculum(self._cfg.data, self._problems)
        self._judging = [group.serve() for group in self._judges]
        self._serve(self._sync_rollouts())

    def _serve(self, service: PromptService) -> None:
        """Use a service from now on."""
        service.alongside = self._judging
        self._service = service

    def _prepared(self, layout: Any) -> None:
        """Pass what workers were prepared with to the recovery, for replaced workers."""
        self._recovery.prepared(layout, self._channels[0], self.send_weights)

    def _sync_rollouts(self) -> PromptService:
        """Return the service for synchronous rollouts."""
        return SyncRollouts(self.rollout, self._recovery.answered)

    def _async_rollouts(self) -> AsyncRollouts:
        """Return the service for asynchronous rollouts."""
        rollout = cast("GenerationGroup", self.rollout)
        return AsyncRollouts.of_engines(rollout, self.reward, self.world_sizes, *self._channels)

    def _run(self) -> None:
        try:
            if self.config.staleness and not self.config.only_eval:
                if self._suspects.due:
                    self.update_rollout_weights()
                    self._recovery.try_suspects()
                self._serve(self._async_rollouts())
            super()._run()
        except BaseException as error:
            if self.runs_ahead and self.answering == "rollout":
                self._suspects.died_with(error, self.groups["rollout"].worker_group_name, self._plan)
            self._service.abandon()
            self._progress.abandon()
            raise

    # A step

    def train_step(self, step: int) -> dict[str, float]:
        """Run the four phases of a step."""
        self.update_rollout_weights(step)
        metrics = self.generate_rollouts(step)
        with self.phase(step, events.ADVANTAGES):
            computed, *_ = self._while_generating(
                step,
                self.actor.compute_advantages_and_returns(step),
                *(group.evaluate(step) for group in (*self._critics, *self._references)),
            )
            metrics |= rank_figures(computed)
        began = time.perf_counter()
        with self.phase(step, events.ACTOR_TRAINING):
            learning, last = (self.actor, *self._critics), self.last_step
            for figures in self._while_generating(step, *(group.run_training(step, last) for group in learning)):
                metrics |= rank_figures(figures)
        metrics["train/actor/tokens"] = float(self._tokens)
        metrics["train/actor/tokens_per_second"] = self._tokens / (time.perf_counter() - began)
        if not self._compared_engine:
            # Actors compare in the first step with a gradient. Ask them alone, as other groups may generate forever.
            self._compared_engine = self._note_actor()
        if step == self.last_step:
            self._end_stream()
        return metrics

    def _note_actor(self) -> bool:
        """Record the actors' comparisons; return whether there are any."""
        checks = comparisons_of([self.groups["actor"]])
        note_comparisons(self.record.folder.path, checks)
        return bool(checks)

    def update_rollout_weights(self, step: int | None = None) -> None:
        update = super().update_rollout_weights

        def attempt() -> None:
            try:
                update(step)
            except BaseException:
                calls, self._syncing = self._syncing, ()
                for call in calls:
                    call.abandon()
                raise

        if self.runs_ahead:
            update(step)
        else:
            self._recovery.sync(attempt)

    def send_weights(self) -> tuple[WorkerGroupHandle[Any], ...]:
        return *self._service.load_weights(self.weight_version), self.actor.sync_model_to_rollout()

    @property
    def runs_ahead(self) -> bool:
        return isinstance(self._service, AsyncRollouts)

    def generate_rollouts(self, step: int | None = None) -> dict[str, float]:
        """Have the batch of a step answered and scored, and send it to the actors with tokens evenly distributed.

        Further prompts replace dropped groups (`algorithm.filter_groups`), up to `max_refills` times.

        Returns:
            Metrics of all answers, by their full names.
        """
        step = self.next_step if step is None else step
        with self.phase(step, events.GENERATE_ROLLOUTS):
            self._ask_due(step)
            while not self._plan.is_whole(step):
                self._arrivals.take(self._service.wait())
                self._arrivals.check(step)
                self._ask_due(step)
            self._arrivals.check(step)
            groups = self._plan.take(step)
            for length in (length for group in groups for length in group.lengths):
                add_call(ANSWER, length, 0.0)
            self._arrivals.close(step, self.record.folder.path, _SAMPLES)
            kept = [group for group in groups if group.kept]
            if not kept:
                raise nothing_to_learn(step, groups)
            assignment = assign(kept, self.world_sizes["actor"], self._cfg.minibatches)
            # In asynchronous rollouts, the reward workers have already put the answers into a channel.
            sends = () if self.runs_ahead else (self.reward.send_rollout_batch(step, assignment),)
            wait_together(*sends, self.actor.recv_rollout_batch(step, assignment))
            self._rest(weights_follow=True)
        self._tokens = sum(group.tokens for group in kept)
        metrics = group_metrics(groups)
        metrics["rollout/groups_kept"] = len(kept) / len(groups)
        metrics["rollout/prompts_set_aside"] = self._suspects.count
        metrics["rollout/tokens_per_second"] = self._service.tokens_per_second()
        metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"] = staleness(kept, self.weight_version)
        if self._plan.curriculum is not None:
            metrics["rollout/passed_over"] = self._plan.curriculum.passed_over
        if self.runs_ahead:
            metrics["rollout/buffered"] = len(self._plan.buffered)
            metrics["rollout/in_flight"] = self._plan.in_flight
            metrics |= self._prompts.figures()
        return metrics

    def _rest(self, *, weights_follow: bool) -> None:
        if self._cfg.rollout.enable_offload:
            self._service.offload(weights_follow=weights_follow)

    def _ask_due(self, step: int) -> None:
        prompts = self._plan.due(self.steps_ahead(step), self.weight_version)
        self._service.ask(self._suspects.marked(prompts))

    def _while_generating(self, step: int, *handles: WorkerGroupHandle[Any]) -> list[list[Any]]:
        """Wait for calls and return their results; asynchronous rollouts answer prompts of later steps meanwhile."""
        if not self.runs_ahead:
            return wait_together(*handles)
        later = self.steps_ahead(step)[1:]

        def serve() -> None:
            self._arrivals.take(self._service.poll())
            self._service.ask(self._suspects.marked(self._plan.due(later, self.weight_version + 1)))

        return wait_for(handles, serve)

    def _groups_shown(self, step: int) -> int:
        """Return the number of groups of a step whose samples are written."""
        interval = self._settings.sample_interval
        due = interval != NEVER and (step == 1 or self._is_due(interval, step))
        return -(-_SAMPLES // self._cfg.algorithm.group_size) if due else 0

    def _end_stream(self) -> None:
        """End asynchronous rollouts; later requests are synchronous."""
        self._service.end()
        if self.runs_ahead:
            self._serve(self._sync_rollouts())

    # Evaluation

    def evaluate_policy(self, step: int) -> dict[str, float]:
        """Answer the evaluation problems, and return the metrics of `evaluation_metrics`."""
        self.update_rollout_weights(step)
        self.record.emit(events.PhaseStarted(step, events.EVALUATE))
        data = self._cfg.data
        samples, groups = data.val_samples, list[GroupReport]()
        self._service.meanwhile = scoring_progress(
            self._progress.poll,
            self._val_problems * samples,
            lambda text: self.record.emit(events.PhaseProgress(step, text)),
        )
        temperature = 0.0 if samples == 1 else self._cfg.rollout.sampling_params.temperature
        for first in range(0, self._val_problems, EVALUATED_AT_ONCE):
            count = min(EVALUATED_AT_ONCE, self._val_problems - first)
            workers = self.world_sizes[self.answering]
            prompts = unlearned_prompts(first, count, workers, samples, temperature, self.weight_version)
            groups += self._answered(prompts)
        self._service.meanwhile = None
        self._rest(weights_follow=False)
        self._arrivals.check_evaluation(groups)
        return evaluation_metrics(groups, samples)

    def _answered(self, prompts: Sequence[Prompt]) -> list[GroupReport]:
        """Return the reports of evaluation prompts, ordered by slot."""
        self._service.ask(prompts)
        reports: list[GroupReport] = []
        while len(reports) < len(prompts):
            groups = self._service.wait()
            reports += [group.report for group in groups if not group.report.step]
            self._arrivals.take([group for group in groups if group.report.step])
        return sorted(reports, key=lambda report: report.slot)

    # Checkpoints

    @property
    def keeps_state(self) -> bool:
        return self._settings.saves_state

    def write_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer, the problems used, buffered groups and unfinished answers; or a folder that
        transformers loads; or both, by `runner.save_format`.
        """
        if not self._settings.saves_state:
            save_parts(self.actor, folder, self._settings)
            self._note_actor()
            return
        unfinished = self._prompts.save_unfinished(folder, self._service, self.record.step)
        save_parts(self.actor, folder, self._settings, *self._critics)
        self._note_actor()
        self._prompts.save(folder, unfinished)

    def read_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint of `write_checkpoint`, see `PromptCheckpoints.restore`."""
        require_state(folder)
        versions, *_ = wait_together(*(group.load_checkpoint(str(folder)) for group in (self.actor, *self._critics)))
        self.weight_version = versions[0]
        self._prompts.restore(folder, self.record.step, self.weight_version)

    def items_in_flight(self) -> ItemFates:
        """See `Runner`: prompts."""
        return self._prompts.in_flight

    def items_resumed(self, in_flight: ItemFates) -> ItemFates:
        """See `Runner`: answers that are too old are sampled again."""
        return self._prompts.resumed

    def finish(self) -> None:
        """End the stream and the judges, and write the trained model to `model` in the run folder."""
        self._end_stream()
        for rank in range(self.world_sizes.get("judge", 0)):
            self._channels[0].put(None, key=judge_key(rank))
        wait_together(*self._judging)
        self._judging = []
        if self._plan.buffered:
            LOGGER.warning("%d answer groups for later steps were not used", len(self._plan.buffered))
        if self._arrivals.all_failures.failed:
            LOGGER.warning("%s", self._arrivals.all_failures)
        if self._settings.saves_model and not self._settings.only_eval:
            self.actor.save_model(str(self.record.folder.path / "model")).wait()
            self._note_actor()

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same."""
        self._progress.abandon()
        with ExitStack() as ends:
            for channel in self._channels:
                ends.callback(channel.close)
            ends.callback(super().shutdown)
