"""Data types: of the weights, of the computation, and of what leaves it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedActorConfig
from recipes.embodied.models.base_policy import ActionEval, PolicyOutput
from recipes.training.dtypes import DTYPES


def weight_type(config: EmbodiedActorConfig) -> torch.dtype:
    """Return the type of the weights, `model.precision`."""
    return DTYPES[config.model.precision]


def computing(config: EmbodiedActorConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which layers compute in `fsdp_config.mixed_precision.param_dtype`.

    The default is the weights' own type. Inputs stay as they are: actions in half the bits would be other actions.
    """
    dtype = DTYPES[config.fsdp_config.mixed_precision.param_dtype or config.model.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def output_in_float32(found: PolicyOutput) -> PolicyOutput:
    """Return a policy's output in float32."""
    actions = found.actions.float() if found.actions.is_floating_point() else found.actions
    return PolicyOutput(actions, found.logprobs.float(), _float(found.values))


def evaluation_in_float32(found: ActionEval) -> ActionEval:
    """Return the evaluation of actions in float32."""
    return ActionEval(found.logprobs.float(), found.entropy.float(), _float(found.values))


def _float(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
