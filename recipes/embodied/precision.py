"""In which type weights are kept, and in which is computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedActorConfig
from recipes.embodied.models.base import Decision, Judgement

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weight_type(config: EmbodiedActorConfig) -> torch.dtype:
    """Return the type of the weights, `model.precision`."""
    return DTYPES[config.model.precision]


def computing(config: EmbodiedActorConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which layers compute in `fsdp_config.mixed_precision.param_dtype`, by default the weights'
    own type.

    Inputs stay as they are: actions in half the bits would be other actions.
    """
    dtype = DTYPES[config.fsdp_config.mixed_precision.param_dtype or config.model.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def widened(found: Decision) -> Decision:
    """Return a decision in float32, whatever it was computed in."""
    actions = found.actions.float() if found.actions.is_floating_point() else found.actions
    return Decision(actions, found.logprobs.float(), _float(found.values))


def widened_judgement(found: Judgement) -> Judgement:
    """Return a judgement in float32, whatever it was computed in."""
    return Judgement(found.logprobs.float(), found.entropy.float(), _float(found.values))


def _float(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
