"""The begin of training a whole language model: its policy, checked, and the state that trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from recipes.language.config.model_job import ModelJobConfig
from recipes.language.learning.warm_start import compare_with_plain, initial_policy
from recipes.language.models.load_model import check_vocabulary
from recipes.language.models.policy import METHODS, LanguagePolicy
from recipes.training.sharding import is_sharded
from recipes.training.state.training_state import TrainingState
from recipes.training.typed_tensors import compute_dtype
from rlinf_core.runners.storage.first_contact import FirstContact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def begin_training(
    config: ModelJobConfig,
    tokenizer: PreTrainedTokenizerBase,
    contact: FirstContact,
    *,
    device: torch.device,
    rank: int,
    world_size: int,
    is_sent: Callable[[str], bool],
) -> tuple[LanguagePolicy, TrainingState]:
    """Load or build the model of `actor`, and create its optimizer. All ranks call it together, and start alike.

    Args:
        config: the configuration of the job.
        tokenizer: its tokens must be within the model's vocabulary.
        contact: receives what was compared.
        device, rank, world_size: the device, rank and world size of this worker.
        is_sent: whether a weight, by its name, goes to other groups.

    Raises:
        ConfigError: the model cannot be loaded, does not fit, or is computed otherwise than by transformers.
    """
    actor = config.actor
    computes = compute_dtype(actor.model.precision)
    policy, weights = initial_policy(
        config,
        tokenizer,
        device,
        gradient_checkpointing=actor.fsdp_config.gradient_checkpointing,
        shards=is_sharded(actor.fsdp_config, world_size, computes),
        rank=rank,
    )
    contact.compare(
        "tokens of the tokenizer",
        "the model's vocabulary",
        lambda: check_vocabulary(policy.causal, tokenizer),
        cheap=True,
    )
    state = TrainingState(
        policy,
        actor.optim,
        actor.fsdp_config,
        rank=rank,
        world_size=world_size,
        device=device,
        blocks=policy.blocks,
        methods=METHODS,
        is_sent=is_sent,
        compute_dtype=computes,
        initial=weights,
    )
    compare_with_plain(contact, policy)
    return policy, state
