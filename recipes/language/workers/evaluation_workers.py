"""The workers that evaluate the tokens of the actors' batches: critic, reference and teacher."""

from __future__ import annotations

from typing import Any, cast

import torch

from recipes.language.config.described_models import (
    critic_model,
    critic_optim,
    reference_model,
    teacher_model,
    teacher_start,
    with_model,
)
from recipes.language.config.language_config import LanguageConfig
from recipes.language.learning.learner import LearnerSettings, MicroBatches, ValueLearner
from recipes.language.learning.warm_start import compare_with_plain, initial_policy
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.policy import METHODS, ValueModel
from recipes.language.rules.model_rules import vocabulary_difference
from recipes.language.workers.training_worker import EvaluationServer, TrainingWorker
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.huggingface import load_tokenizer
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.sharding import is_sharded, parallelize
from recipes.training.typed_tensors import compute_dtype, explained_variance
from recipes.training.weights.training_state import TrainingState, release_memory
from recipes.training.without_memory import move_what_has_memory
from rlinf_core import ConfigError, LossSettings
from rlinf_core.runners.storage.first_contact import Difference


class LanguageCritic(TrainingWorker):
    """A critic that estimates the values of the states before answer tokens, and learns from returns."""

    config_section = "critic"
    _config: LanguageConfig

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load or build the model, and create the optimizer; all ranks start with the same weights."""
        whole, config, optim = self._config, self._config.actor, critic_optim(self._config)
        torch.set_num_threads(config.threads)
        computes = compute_dtype(config.model.precision)
        policy, weights = initial_policy(
            whole,
            make_tokenizer(config),
            self.torch_device,
            critic_model(whole),
            gradient_checkpointing=config.fsdp_config.gradient_checkpointing,
            shards=is_sharded(config.fsdp_config, self._world_size, computes),
            rank=self._rank,
        )
        model = ValueModel(policy.model)
        move_what_has_memory(model, self.torch_device)
        self._state = TrainingState(
            model,
            optim,
            config.fsdp_config,
            rank=self._rank,
            world_size=self._world_size,
            device=self.torch_device,
            blocks=model.blocks,
            methods=METHODS,
            is_sent=lambda _: False,
            component="critic",
            compute_dtype=computes,
            exact=[model.value_head],
            initial=weights,
        )
        compare_with_plain(self._contact, model)
        self._learner = ValueLearner(
            self._state.strategy,
            self._state.optimizer,
            LossSettings.of(whole.algorithm.inputs),
            LearnerSettings(
                minibatches=whole.minibatches,
                epochs=whole.algorithm.update_epoch,
                max_tokens=config.max_tokens_per_micro_batch,
                max_answers=config.micro_batch_size,
                masks=model.takes_masks(whole.runner.seq_length),
                clip_grad=optim.clip_grad,
                skip_nonfinite=whole.runner.on_nonfinite == "skip",
            ),
            self.torch_device,
        )
        self._exchange = EvaluationServer(self, config.group_name, layout.actors)
        self._offload()

    def evaluate(self, step: int) -> None:
        """Send the actors the values of their batches' answer tokens."""
        self._batch = self._exchange.recv()
        self._state.onload()
        self._values = self._learner.evaluate(self._batch)
        self._exchange.send_tokens(self._values)

    def run_training(self, step: int, last_step: int | None) -> dict[str, float]:
        """Learn from the returns that the actors send, and return metrics by their full names.

        Args:
            step: the training step.
            last_step: the last step of the run; None: the run has no end.
        """
        returns = self._exchange.recv_tokens()
        rate = self._begin_step(step, last_step)
        seed = derive_seed(self._config.actor.seed, Purpose.BATCHES, step)
        figures = self._learner.train(self._batch, returns, self._values, seed, step)
        values, trained = self._values, self._batch.trained
        del self._batch, self._values
        metrics = self._end_step(step, figures)
        metrics = {name.replace("train/actor/", "train/critic/"): value for name, value in metrics.items()}
        # A rank without answers explains nothing.
        if bool(trained.any()):
            metrics["train/critic/explained_variance"] = explained_variance(values, returns, trained).item()
        return metrics | {"train/critic/lr": rate}


class LanguageReference(ComparingWorker):
    """A worker that sends the actors the log-probabilities of the initial model, or of `reference.model_path`."""

    config_section = "reference"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load or build the model."""
        actor = self._config.actor
        torch.set_num_threads(actor.threads)
        tokenizer = make_tokenizer(actor)
        policy, weights = initial_policy(
            self._frozen(),
            tokenizer,
            self.torch_device,
            trains=False,
            shards=is_sharded(actor.fsdp_config, self._world_size, None),
            rank=self._rank,
        )
        self._policy = policy
        self._strategy = parallelize(
            policy,
            self._rank,
            self._world_size,
            actor.fsdp_config,
            self.torch_device,
            policy.blocks,
            METHODS,
            initial=weights,
        )
        compare_with_plain(self._contact, policy)
        self._micro = MicroBatches(
            self._strategy,
            self.torch_device,
            max_tokens=actor.max_tokens_per_micro_batch,
            masks=policy.takes_masks(self._config.runner.seq_length),
            max_answers=actor.micro_batch_size,
        )
        self._exchange = EvaluationServer(self, actor.group_name, layout.actors)
        self._offload()

    def _frozen(self) -> LanguageConfig:
        """Return the configuration of an actor with this worker's model."""
        return with_model(self._config, reference_model(self._config))

    def _offload(self) -> None:
        """Free the accelerator for other components, if `actor.enable_offload` is set."""
        if self._config.actor.enable_offload:
            self._policy.to("cpu")
            release_memory(self.torch_device)

    def evaluate(self, step: int) -> None:
        """Send the actors the log-probabilities of their batches' answer tokens."""
        batch = self._exchange.recv()
        self._policy.to(self.torch_device)
        temperature = self._config.rollout.sampling_params.temperature
        self._exchange.send_tokens(self._micro.logprobs(batch, self._strategy.module, temperature))
        self._offload()


class LanguageTeacher(LanguageReference):
    """A worker that sends the actors the teacher's log-probabilities of the policy's tokens."""

    config_section = "teacher"

    def _frozen(self) -> LanguageConfig:
        return with_model(self._config, teacher_model(self._config), teacher_start(self._config))

    def init_worker(self, layout: LanguageLayout) -> None:
        """Compare the tokens of teacher and actor, and load or build the teacher."""
        self._contact.compare("tokens of the teacher", "those of the actor's tokenizer", self._same_tokens, cheap=True)
        super().init_worker(layout)

    def _same_tokens(self) -> Difference | None:
        """Compare the tokens of the teacher's folder with the actor's; None without such a folder.

        Raises:
            ConfigError: the tokens differ.
        """
        folder = self._config.teacher.model_path
        if folder is None:
            return None
        tokenizers = make_tokenizer(self._config.actor), load_tokenizer(folder)
        mine, theirs = (cast("Any", tokenizer).get_vocab() for tokenizer in tokenizers)
        difference = vocabulary_difference(mine, theirs)
        if difference is not None:
            raise ConfigError(
                f"the teacher in `{folder}` was trained with other tokens than the actor: {difference}",
                help="distillation compares token by token: use a teacher of the same family",
            )
        return Difference(note=f"{len(mine)} tokens")
