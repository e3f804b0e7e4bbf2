"""The workers that train a language model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from recipes.language.advantages import token_advantages
from recipes.language.batch import RolloutBatch
from recipes.language.buffered import load_buffered, save_buffered
from recipes.language.config import LanguageConfig
from recipes.language.export import export
from recipes.language.layout import LanguageLayout
from recipes.language.learner import LanguageLearner, LearnerSettings, TokenTargets
from recipes.language.models import make_model, make_tokenizer, with_lora
from recipes.language.policy import LanguagePolicy
from recipes.language.warm_start import right_answers, warm_start
from recipes.language.weights import WeightUpdate
from recipes.training.precision import DTYPES
from recipes.training.seeding import Purpose, seed_of
from recipes.training.state import TrainingState
from recipes.training.updater import SKIPPED
from recipes.training.weight_sync import WeightSender, receivers_of
from rlinf_core import AdvantageSettings, LossSettings, RLinfError, Worker
from rlinf_core.algorithms.registry import get_advantage, get_policy_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference of log-probabilities of one token that rounding explains, by the type of the weights.
_GAP_LIMITS: Final = {"fp32": 1e-2, "bf16": 1.0, "fp16": 0.5}


class LanguageActor(Worker):
    """Learns from scored answers. Several of them share every batch, and their weights, as `actor.fsdp_config` says."""

    config_section = "actor"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load or build the model, and make the optimizer; every rank begins with the same weights."""
        config = self._config.actor
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed_of(config.seed, Purpose.WEIGHTS))
        self._layout = layout
        self._tokenizer = make_tokenizer(config)
        model = make_model(config, self._tokenizer, DTYPES[config.model.precision])
        lora = config.model.adapter()
        self._lora = lora is not None
        reference = None
        if self._config.algorithm.kl_beta and not self._lora:
            reference = copy.deepcopy(model)
        whole = with_lora(model, lora) if lora is not None else model
        if config.fsdp_config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = LanguagePolicy(cast("PreTrainedModel", whole), value_head=False).to(self.torch_device)
        self._warm_start(policy)
        if reference is not None:
            reference.load_state_dict(model.state_dict())
            self._reference = LanguagePolicy(reference).to(self.torch_device).requires_grad_(False)
        blocks = cast("list[Any]", list(cast("Any", policy.causal.get_decoder()).layers))
        self._state = state = TrainingState(
            policy,
            config.optim,
            config.fsdp_config,
            rank=self._rank,
            world_size=self._world_size,
            device=self.torch_device,
            blocks=blocks,
            is_sent=self._is_sent,
        )
        self._sender = WeightSender(
            self,
            (config.group_name, self._rank),
            self._config.rollout.group_name,
            receivers_of(self._rank, layout.actors, layout.rollouts),
            in_background=False,
        )
        algorithm, sampling = self._config.algorithm, self._config.rollout.sampling_params
        self._learner = LanguageLearner(
            policy,
            state.strategy,
            state.optimizer,
            get_policy_loss(algorithm.loss_type),
            LossSettings.of(algorithm),
            LearnerSettings(
                minibatches=self._config.minibatches,
                epochs=algorithm.update_epoch,
                max_tokens=config.max_tokens_per_micro_batch,
                share_prompts=config.share_prompts,
                temperature=sampling.temperature,
                clip_grad=config.optim.clip_grad,
                skip_nonfinite=self._config.runner.on_nonfinite == "skip",
            ),
            self.torch_device,
        )
        self._channel = self.connect_channel(layout.scored)

    def _warm_start(self, policy: LanguagePolicy) -> None:
        """Show a model that was built on the spot some right answers. Every rank does the same."""
        config = self._config
        start = config.actor.warm_start
        if not start.steps or config.actor.model.model_path is not None:
            return
        warm_start(policy, right_answers(config, self._tokenizer), config.data.rollout_batch_size, start.lr)

    # Weights

    def _is_sent(self, name: str) -> bool:
        return name.startswith("model.") and (not self._lora or ".lora_" in name)

    def sync_model_to_rollout(self) -> int:
        """Send the weights to the rollout workers; each actor serves its share of them. Return their version."""
        state, is_adapter = self._state, self._lora
        self._sender.send(
            state.whole_weights(),
            lambda weights: WeightUpdate.of(weights, state.version, prefix="model.", adapter_only=is_adapter),
        )
        return state.version

    # A training step

    def recv_rollout_batch(self, step: int, assignment: tuple[tuple[int, ...], ...]) -> None:
        """Take this actor's groups of a batch out of the channel.

        Args:
            step: the training step.
            assignment: by rank of the actors, slots of the groups.
        """
        pieces: list[RolloutBatch] = [self._channel.get(key=str(slot)) for slot in assignment[self._rank]]
        self._batch = RolloutBatch.joined(pieces)

    def compute_advantages_and_returns(self, step: int) -> dict[str, float]:
        """Compute what the answers are trained towards, and return figures of it."""
        batch, algorithm = self._batch, self._config.algorithm
        metrics: dict[str, float] = {}
        old = batch.logprobs
        if algorithm.recompute_logprobs or self._config.rollout.check_logprobs != "off":
            found = self._learner.evaluate(batch).logprobs
            metrics |= self._gap(found, batch)
            if algorithm.recompute_logprobs:
                old = found
        settings = AdvantageSettings.of(algorithm, self._state.strategy.reduce_sum)
        advantages, _ = token_advantages(batch, get_advantage(algorithm.adv_type), settings)
        self._targets = TokenTargets(
            advantages=advantages,
            old_logprobs=old,
            ref_logprobs=self._reference_logprobs(batch) if algorithm.kl_beta else None,
            behaviour_logprobs=batch.logprobs if algorithm.recompute_logprobs else None,
        )
        return metrics

    def _gap(self, found: Tensor, batch: RolloutBatch) -> dict[str, float]:
        """Return how much engine and trainer differ in the log-probabilities of tokens of the present weights."""
        same = batch.versions == self._state.version
        difference = (found - batch.logprobs)[same]
        if not len(difference):
            return {}
        size = difference.abs()
        self._judge_gap(float(size.max()))
        return {
            "train/logprob_gap/mean": float(size.mean()),
            "train/logprob_gap/max": float(size.max()),
            "train/logprob_gap/k3": float((difference.expm1() - difference).mean()),
        }

    def _judge_gap(self, largest: float) -> None:
        """Warn, or end the run, when engine and trainer are not the same model."""
        check = self._config.rollout.check_logprobs
        limit = _GAP_LIMITS[self._config.actor.model.precision]
        if check == "off" or largest <= limit:
            return
        what = f"log-probabilities of engine and trainer differ by up to {largest:.3g}, more than {limit:g}"
        if check == "strict":
            raise RLinfError(
                what,
                why="`rollout.check_logprobs: strict` ends the run then",
                help="model, precision and chat template of actor and rollout must be the same",
            )
        self.log_warning("%s", what)

    def _reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        if self._lora:
            with cast("Any", self._state.policy.model).disable_adapter():
                return self._learner.evaluate(batch).logprobs
        return self._learner.evaluate(batch, self._reference).logprobs

    def run_training(self, step: int) -> dict[str, float]:
        """Learn from the batch, and return figures by their full names."""
        config = self._config.actor
        last = self._config.runner.max_steps
        rate = self._state.apply_settings(step, last if last > 0 else None)
        figures = self._learner.train(self._batch, self._targets, seed_of(config.seed, Purpose.BATCHES, step), step)
        self._state.version += 1
        del self._batch, self._targets
        if figures.skipped:
            self.log_warning(SKIPPED, step, figures.skipped)
        return {
            **figures.metrics(counts_skipped=self._config.runner.on_nonfinite == "skip"),
            "train/actor/lr": rate,
        }

    # Checkpoints

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees; together."""
        self._state.save(folder)

    def load_checkpoint(self, folder: str) -> int:
        """Read what `save_checkpoint` wrote, and return the version of the weights."""
        self._state.load(folder)
        return self._state.version

    def save_buffered(self, folder: str, slots: tuple[int, ...]) -> None:
        """Write the groups that wait in the channel, by their slots, into a checkpoint."""
        if self._rank == 0:
            save_buffered(self._channel, slots, Path(folder))

    def load_buffered(self, folder: str, slots: tuple[int, ...]) -> None:
        """Put the groups of a checkpoint, by their slots, into the channel."""
        if self._rank == 0:
            load_buffered(self._channel, slots, Path(folder))

    def save_model(self, folder: str) -> None:
        """Write a folder that `from_pretrained` and engines load: config, weights, tokenizer; adapters merged."""
        state: dict[str, Tensor] = self._state.policy.state_dict()
        whole = {name: self._state.strategy.whole(value) for name, value in state.items()}
        if self._rank == 0:
            export(whole, self._config.actor, self._tokenizer, Path(folder))
