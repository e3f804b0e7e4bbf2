"""The workers that train a language model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import (
    RolloutBatch,
    UnfinishedReport,
    load_buffered,
    load_unfinished,
    save_buffered,
    save_unfinished,
)
from recipes.language.answers.prompt_messages import UNFINISHED, Assignment, unfinished_key
from recipes.language.config.algorithm_config import LANGUAGE_LOSSES
from recipes.language.config.language_config import LanguageConfig
from recipes.language.learning.learner import LanguageLearner, LearnerSettings
from recipes.language.learning.token_targets import GAP_LIMITS, TokenTargets, logprob_gap, token_advantages
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.language.weights.model_export import export_state
from recipes.language.weights.weight_transfer import messages
from recipes.language.workers.training_worker import EvaluationClient, TrainingWorker
from recipes.sections.algorithm import own_names, refuse_unknown_options
from recipes.training.huggingface import without_adapters
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.typed_tensors import floats, integers
from recipes.training.weights.weight_sync import WeightSender, receiver_ranks
from rlinf_core import AdvantageSettings, ConfigError, LossSettings, get_advantage
from rlinf_core.algorithms.loss_inputs import kl_estimate
from rlinf_core.algorithms.options import checked_options, get_policy_loss
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    pass


class LanguageActor(TrainingWorker):
    """An actor that learns from scored answers. Actors share every batch, and weights as `actor.fsdp_config` says."""

    config_section = "actor"
    _config: LanguageConfig

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        # Whether engine and trainer are still to be compared.
        self._compares = True

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load or build the model, and create the optimizer; all ranks start with the same weights."""
        config = self._config.actor
        torch.set_num_threads(config.threads)
        self._layout = layout
        self._tokenizer = make_tokenizer(config)
        self._lora = config.model.adapter() is not None
        policy = self._begin_training(self._tokenizer, self._is_sent)
        self._sender = WeightSender(
            self,
            (config.group_name, self._rank),
            self._config.rollout.group_name,
            receiver_ranks(self._rank, layout.actors, layout.rollouts),
            in_background=False,
        )
        self._learner = self._make_learner(policy)
        self._channel = self.connect_channel(layout.scored)
        # Clients of the optional groups that evaluate batches.
        self._critic = self._reference = self._teacher = None
        if layout.critics:
            self._critic = EvaluationClient(self, self._config.critic.group_name, layout.critics)
        if layout.references:
            self._reference = EvaluationClient(self, self._config.reference.group_name, layout.references)
        if layout.teachers:
            self._teacher = EvaluationClient(self, self._config.teacher.group_name, layout.teachers)
        self._offload()

    def _make_learner(self, policy: LanguagePolicy) -> LanguageLearner:
        config, algorithm = self._config.actor, self._config.algorithm
        loss = get_policy_loss(algorithm.loss_type)
        refuse_unknown_options(algorithm.own_options, own_names(algorithm), "algorithm.options")
        options = checked_options(loss, algorithm.options, "algorithm.options")
        return LanguageLearner(
            policy,
            self._state.strategy,
            self._state.optimizer,
            loss,
            replace(LossSettings.of(algorithm.inputs), options=options),
            LearnerSettings(
                minibatches=self._config.minibatches,
                epochs=algorithm.update_epoch,
                max_tokens=config.max_tokens_per_micro_batch,
                max_answers=config.micro_batch_size,
                longest=self._config.longest_answer,
                masks=policy.takes_masks(self._config.runner.seq_length),
                temperature=self._config.rollout.sampling_params.temperature,
                clip_grad=config.optim.clip_grad,
                skip_nonfinite=self._config.runner.on_nonfinite == "skip",
                leave_out=algorithm.loss_type in LANGUAGE_LOSSES,
            ),
            self.torch_device,
        )

    # Weights

    def _is_sent(self, name: str) -> bool:
        return name.startswith("model.") and (not self._lora or ".lora_" in name)

    def sync_model_to_rollout(self) -> int:
        """Send the weights to this actor's share of the rollout workers, and return their version."""
        state, is_adapter = self._state, self._lora
        self._sender.send(messages(state.sent_weights(), state.version, prefix="model.", adapter_only=is_adapter))
        return state.version

    # A training step

    def recv_rollout_batch(self, step: int, assignment: Assignment) -> None:
        """Receive this actor's groups of a batch from the reward workers, or in asynchronous mode, take them from the
        channel.

        Args:
            step: the training step.
            assignment: the assignment of the groups of all actors.
        """
        numbers = {slot: number for number, part in enumerate(assignment[self._rank]) for slot in part}
        slots, rewards = sorted(numbers), self._layout.rewards
        if self._config.runner.max_staleness:
            arriving = [self._channel.get(key=str(slot), async_op=True) for slot in slots]
            pieces: list[RolloutBatch] = [handle.wait() for handle in arriving]
        else:
            group = self._config.reward.group_name
            pieces = [self.recv(group, rank) for rank in sorted({slot % rewards for slot in slots})]
        batch = RolloutBatch.joined(pieces)
        # Sort by slots, regardless of which worker scored them.
        batch = batch.select(batch.groups.argsort(stable=True)) if len(pieces) > 1 else batch
        minibatches = torch.tensor([numbers[slot] for slot in integers(batch.groups)], dtype=torch.int64)
        self._batch = replace(batch, minibatches=minibatches)

    def compute_advantages_and_returns(self, step: int) -> dict[str, float]:
        """Compute the training targets of the answers, and return metrics."""
        self._state.onload()
        batch, algorithm = self._batch, self._config.algorithm
        for group in (self._critic, self._reference, self._teacher):
            if group is not None:
                group.send(batch)
        metrics: dict[str, float] = {}
        same = batch.drawn_by(self._state.version)
        if algorithm.recompute_logprobs:
            old, behaviour = self._learner.evaluate(batch), batch.logprobs
            metrics |= self._check_logprobs((old - behaviour)[same], step)
        else:
            old, behaviour = batch.logprobs, None
        reference = self._reference_logprobs() if algorithm.kl_beta else None
        kl = None
        if reference is not None and algorithm.settings.kl_in_reward:
            kl = kl_estimate(old, reference, algorithm.settings.kl_penalty)
            metrics["train/kl_in_reward"] = self._mean(kl)
        if self._teacher is not None:
            kl = kl_estimate(old, self._teacher.recv_tokens(), "k1")
            metrics["train/teacher_kl"] = self._mean(kl)
        values = None if self._critic is None else self._critic.recv_tokens()
        advantage = get_advantage(algorithm.adv_type)
        settings = replace(
            AdvantageSettings.of(algorithm.inputs, self._state.strategy.reduce_sum),
            options=checked_options(advantage, algorithm.options, "algorithm.options"),
        )
        advantages, returns = token_advantages(batch, advantage, settings, values=values, kl=kl)
        if self._critic is not None:
            self._critic.send_tokens(_learned_values(returns, algorithm.adv_type))
        self._targets = TokenTargets(
            advantages=advantages,
            old_logprobs=old,
            ref_logprobs=None if algorithm.settings.kl_in_reward else reference,
            behaviour_logprobs=behaviour,
            comparable=None if algorithm.recompute_logprobs else same,
        )
        return metrics

    def _check_logprobs(self, differences: Tensor, step: int) -> dict[str, float]:
        """Return the differences of engine and trainer as metrics; warn or end the run if they exceed the limit.

        Args:
            differences: float [m], log-probabilities of the trainer minus those of the engine, with equal weights.
            step: the training step.

        Raises:
            RLinfError: the log-probabilities differ too much, with `rollout.check_logprobs: strict`.
        """
        gap, check = logprob_gap(differences, self._state.strategy), self._config.rollout.check_logprobs
        if gap is None:
            return {}
        limit = GAP_LIMITS[self._config.actor.model.precision]
        if self._compares:
            # Record the first comparison as a start-up check; metrics have every step.
            self._compares = False
            result = Difference(gap.largest, limit, f"step {step}, {gap.tokens} tokens", agrees=gap.largest <= limit)
            self._contact.keep("log-probabilities of the engine", "those of the trainer, by equal weights", result)
        if check != "off" and not gap.largest <= limit:
            error = gap.error(limit, step)
            if check == "strict":
                raise error
            if self._rank == 0:
                self.log_warning("%s", error)
        return gap.metrics()

    def _mean(self, values: Tensor) -> float:
        """Return the mean of values, float [A], over the trained tokens of all ranks. Collective."""
        mine = values[self._batch.trained].double()
        sums = torch.stack((mine.sum(), mine.new_tensor(len(mine))))
        total, count = floats(self._state.strategy.reduce_sum(sums))
        return total / max(1.0, count)

    def _reference_logprobs(self) -> Tensor:
        if self._reference is not None:
            return self._reference.recv_tokens()
        with without_adapters(self._state.policy):
            return self._learner.evaluate(self._batch)

    def run_training(self, step: int, last_step: int | None) -> dict[str, float]:
        """Learn from the batch, and return metrics by their full names.

        Args:
            step: the training step.
            last_step: the last step of the run; None: the run has no end.
        """
        rate = self._begin_step(step, last_step)
        seed = derive_seed(self._config.actor.seed, Purpose.BATCHES, step)
        figures = self._learner.train(self._batch, self._targets, seed, step)
        # Of ranks without answers, there is no share.
        learned = {"train/actor/learned_fraction": self._learner.learned} if len(self._batch) else {}
        gap = {} if self._targets.comparable is None else self._check_logprobs(self._learner.differences, step)
        del self._batch, self._targets
        return {
            **self._end_step(step, figures),
            **gap,
            **learned,
            "train/actor/lr": rate,
        }

    # Checkpoints

    def save_buffered(self, folder: str, slots: tuple[int, ...]) -> None:
        """Write the groups that wait in the channel under these slots into a checkpoint."""
        if self._rank == 0:
            save_buffered(self._channel, slots, Path(folder))

    def load_buffered(self, folder: str, slots: tuple[int, ...]) -> None:
        """Put the groups of a checkpoint into the channel under their slots."""
        if self._rank == 0:
            load_buffered(self._channel, slots, Path(folder))

    def save_unfinished(self, folder: str) -> dict[int, int | None]:
        """Write the unfinished answers of the rollout workers into a checkpoint.

        Returns:
            The positions of their problems, with the oldest version of weights that drew a token, or None; empty on
                ranks above 0.
        """
        if self._rank:
            return {}
        reports: list[UnfinishedReport] = [self._channel.get(key=UNFINISHED) for _ in range(self._layout.rollouts)]
        save_unfinished((group for report in reports for group in report.groups), Path(folder))
        return {position: oldest for report in reports for position, oldest in report.oldest.items()}

    def load_unfinished(self, folder: str, positions: tuple[int, ...]) -> None:
        """Make a checkpoint's unfinished answers, by problem position, available to the rollout workers."""
        if self._rank == 0:
            for group in load_unfinished(positions, Path(folder)):
                self._channel.put(group, key=unfinished_key(group.position))

    def save_model(self, folder: str) -> None:
        """Write a folder that `from_pretrained` and engines load: config, tokenizer, and weights with adapters
        merged."""
        export_state(self._state, self._config.actor, self._tokenizer, folder, self._contact, writes=self._rank == 0)


def _learned_values(returns: Tensor | None, name: str) -> Tensor:
    """Return the value targets.

    Raises:
        ConfigError: a custom advantage function returns no value targets.
    """
    if returns is None:
        raise ConfigError(
            f"`algorithm.adv_type: {name}` returns no returns, which the group `critic` learns",
            help="return `Advantages(advantages, returns)`, or remove `critic` from `cluster.component_placement`",
        )
    return returns
