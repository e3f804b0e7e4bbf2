"""The model that is served, as each worker loads it."""

from __future__ import annotations

from typing import Any

import torch

from recipes.language.models.load_model import make_model
from recipes.serve.config import ServeConfig
from recipes.serve.values import ServedFacts
from recipes.training.typed_tensors import DTYPES


def served_dtype(config: ServeConfig, device: torch.device) -> torch.dtype:
    """Return the type of the weights: the configured one; on a CPU float32, where half the bits are slower."""
    return DTYPES[config.actor.model.precision] if device.type != "cpu" else torch.float32


def load_base(config: ServeConfig, tokenizer: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the model that is served, in evaluation mode, on its device.

    Args:
        config: the whole file.
        tokenizer: the tokenizer of the model.
        device: where it computes.
        dtype: the type of its weights; None: see `served_dtype`.

    Raises:
        ConfigError: it cannot be loaded, or does not know all tokens of the tokenizer.
    """
    model: Any = make_model(config.actor, tokenizer, dtype or served_dtype(config, device))
    return model.to(device).eval()


def served_facts(model: Any, stops: tuple[int, ...]) -> ServedFacts:
    """Return what the server has to know of the model."""
    return ServedFacts(model.get_input_embeddings().weight.shape[0], stops)
