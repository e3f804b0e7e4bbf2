"""Engines by the names that `rollout.backend` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recipes.language.config import LanguageConfig
from recipes.language.engines.base import Engine
from rlinf_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_engine(
    config: LanguageConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
    device: torch.device,
) -> Engine:
    """Return the engine that `rollout.backend` names, with its model.

    Raises:
        ConfigError: there is none of that name, its package is missing, or the model cannot be loaded.
    """
    backend = config.rollout.backend
    if backend not in ("torch", "huggingface"):
        raise ConfigError(f"`rollout.backend: {backend}` is not available yet", help="write `backend: torch`")
    from recipes.language.engines.torch_engine import TorchEngine
    from recipes.language.models import make_model
    from recipes.training.precision import DTYPES

    rollout, actor = config.rollout, config.actor
    # In float32 on a CPU: half the bits are slower there.
    dtype = DTYPES[actor.model.precision] if device.type != "cpu" else torch.float32
    model = make_model(actor, tokenizer, dtype).to(device)
    lora = actor.model.adapter()
    return TorchEngine(
        model,
        stop_token_ids=stop_token_ids,
        decode=tokenizer.decode,
        max_running_tokens=rollout.max_running_tokens,
        max_sequence_tokens=config.runner.seq_length,
        adapter_scale=lora.alpha / lora.rank if lora else 1.0,
    )
