"""Workers that hold a model which does not learn: the reference, which a policy is kept near."""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.language.config import LanguageConfig, LanguageReferenceConfig, LanguageTeacherConfig
from recipes.language.config.frozen_models import reference_model, with_model
from recipes.language.config.group_names import LanguageLayout
from recipes.language.learning.micro_batches import MicroBatches
from recipes.language.learning.warm_start import compare_with_plain, initial_policy
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.packing import PackedRow
from recipes.language.models.policy import METHODS, AnswerEval
from recipes.language.workers.token_evaluation import EvaluationServer
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.sharding import is_sharded, parallelize
from recipes.training.state.training_state import release_memory


class LanguageReference(ComparingWorker):
    """Sends the actors the log-probabilities of the initial model, or of `reference.model_path`."""

    config_section = "reference"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load or build the model."""
        config, actor = self._section, self._config.actor
        torch.set_num_threads(config.threads)
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
            max_tokens=config.max_tokens_per_micro_batch,
            share_prompts=actor.share_prompts,
        )
        self._exchange = EvaluationServer(self, actor.group_name, layout.actors)
        self._offload()

    @property
    def _section(self) -> LanguageReferenceConfig | LanguageTeacherConfig:
        """The settings of these workers."""
        return self._config.reference

    def _frozen(self) -> LanguageConfig:
        """Return the file as if its actor trained the model that is held here."""
        return with_model(self._config, reference_model(self._config))

    def _offload(self) -> None:
        """Leave the accelerator to other components, where `enable_offload` says so."""
        if self._section.enable_offload:
            self._policy.to("cpu")
            release_memory(self.torch_device)

    def evaluate(self, step: int) -> None:
        """Send the actors the log-probabilities of their batches' answer tokens."""
        temperature = self._config.rollout.sampling_params.temperature

        def logprobs(row: PackedRow) -> Tensor:
            evaluation: AnswerEval = self._strategy.module(row, temperature)
            return evaluation.logprobs

        batch = self._exchange.recv()
        self._policy.to(self.torch_device)
        self._exchange.send_tokens(self._micro.evaluate(batch, logprobs))
        self._offload()
