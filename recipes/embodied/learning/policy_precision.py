"""Data types of trained weights, of acting weights, of the computation and of its outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from recipes.embodied.config import PolicyActorConfig
from recipes.embodied.models.base_policy import ActionEval, PolicyOutput
from recipes.training.typed_tensors import DTYPES


def acting_type(config: PolicyActorConfig) -> torch.dtype:
    """Return the type of the weights of rollout workers, `model.precision`.

    An actor keeps float32: an update of 5e-6 is less than half a step of bfloat16, and would be rounded away.
    """
    return DTYPES[config.model.precision]


def acting_types(policy: nn.Module, config: PolicyActorConfig) -> Mapping[str, torch.dtype] | None:
    """Return the types in which rollout workers hold the weights of a policy, by name; None: as the policy does.

    A policy may keep some of its weights in float32 whatever type it is given, so a copy without memory is asked.
    """
    dtype = acting_type(config)
    if dtype == torch.float32:
        return None
    tensors = [*policy.parameters(), *policy.buffers()]
    skeleton = copy.deepcopy(policy, {id(tensor): _without_memory(tensor) for tensor in tensors}).to(dtype)
    state: dict[str, Tensor] = skeleton.state_dict()
    return {name: tensor.dtype for name, tensor in state.items()}


def _without_memory(tensor: Tensor) -> Tensor:
    shape = tensor.detach().to("meta")
    return nn.Parameter(shape, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def computing(config: PolicyActorConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which layers compute in `fsdp_config.mixed_precision.param_dtype`.

    The default is `model.precision`. Inputs stay as they are: actions in half the bits would be other actions.
    """
    dtype = DTYPES[config.fsdp_config.mixed_precision.param_dtype or config.model.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def output_in_float32(output: PolicyOutput) -> PolicyOutput:
    """Return a policy's output in float32."""
    actions = output.actions.float() if output.actions.is_floating_point() else output.actions
    return PolicyOutput(actions, _float(output.logprobs), _float(output.values))


def evaluation_in_float32(evaluation: ActionEval) -> ActionEval:
    """Return the evaluation of actions in float32."""
    return ActionEval(evaluation.logprobs.float(), evaluation.entropy.float(), _float(evaluation.values))


def _float(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
