"""The workers that estimate values, for PPO."""

from __future__ import annotations

import torch

from recipes.language.config.described_models import critic_model, critic_optim
from recipes.language.config.group_names import LanguageLayout
from recipes.language.config.language_config import LanguageConfig
from recipes.language.learning.learner import LearnerSettings, ValueLearner
from recipes.language.learning.warm_start import compare_with_plain, initial_policy
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.policy import METHODS, ValueModel
from recipes.language.workers.token_evaluation import EvaluationServer
from recipes.language.workers.training_worker import TrainingWorker
from recipes.training.sharding import is_sharded
from recipes.training.typed_tensors import compute_dtype, explained_variance
from recipes.training.weights.training_state import TrainingState
from recipes.training.without_memory import move_what_has_memory
from recipes.training.worker_parts import Purpose, derive_seed
from rlinf_core import LossSettings


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
