"""Workers with a frozen model: the reference, near which the policy is kept, and the teacher."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from recipes.language.config.described_models import reference_model, teacher_model, teacher_start, with_model
from recipes.language.config.group_names import LanguageLayout
from recipes.language.config.language_config import LanguageConfig
from recipes.language.learning.micro_batches import MicroBatches
from recipes.language.learning.warm_start import compare_with_plain, initial_policy
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.packing import PackedRows
from recipes.language.models.policy import METHODS, AnswerEval
from recipes.language.rules.template_rules import vocabulary_difference
from recipes.language.workers.token_evaluation import EvaluationServer
from recipes.training.huggingface import load_tokenizer
from recipes.training.sharding import is_sharded, parallelize
from recipes.training.weights.training_state import release_memory
from recipes.training.worker_parts import ComparingWorker
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference


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
        temperature = self._config.rollout.sampling_params.temperature

        def logprobs(rows: PackedRows) -> Tensor:
            evaluation: AnswerEval = self._strategy.module(rows, temperature)
            return evaluation.logprobs

        batch = self._exchange.recv()
        self._policy.to(self.torch_device)
        self._exchange.send_tokens(self._micro.evaluate(batch, logprobs))
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
