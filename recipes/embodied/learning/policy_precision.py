"""Data types of trained weights, of acting weights, of the computation and of its outputs, and their shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from recipes.embodied.config import PolicyActorConfig
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, PolicyOutput
from recipes.training.typed_tensors import DTYPES
from rlinf_core import ConfigError


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


def output_in_float32(output: PolicyOutput, policy: BasePolicy, rows: int, chunk: int) -> PolicyOutput:
    """Return a policy's output for `rows` observations, of `chunk` actions each, in float32.

    Raises:
        ConfigError: a tensor has another shape than `PolicyOutput` says.
    """
    if len(output.actions) != rows:
        raise _misshapen("act", policy, "actions", output.actions, f"[{rows}, ...]")
    _check_outputs("act", policy, {"logprobs": output.logprobs}, output.values, rows, chunk)
    actions = output.actions.float() if output.actions.is_floating_point() else output.actions
    return PolicyOutput(actions, _float(output.logprobs), _float(output.values))


def evaluation_in_float32(evaluation: ActionEval, policy: BasePolicy, rows: int, chunk: int) -> ActionEval:
    """Return the evaluation of the actions for `rows` observations, of `chunk` each, in float32.

    Raises:
        ConfigError: a tensor has another shape than `ActionEval` says.
    """
    tokens = {"logprobs": evaluation.logprobs, "entropy": evaluation.entropy}
    _check_outputs("forward", policy, tokens, evaluation.values, rows, chunk)
    return ActionEval(evaluation.logprobs.float(), evaluation.entropy.float(), _float(evaluation.values))


def _check_outputs(
    method: str, policy: BasePolicy, tokens: Mapping[str, Tensor | None], values: Tensor | None, rows: int, chunk: int
) -> None:
    for name, tensor in tokens.items():
        # Sums over actions and tokens would run over other dimensions, and differ for nobody to see.
        if tensor is not None and (tensor.dim() != 3 or tensor.shape[:2] != (rows, chunk)):
            raise _misshapen(method, policy, name, tensor, f"[{rows}, {chunk}, D]")
    if values is not None and (values.dim() != 2 or len(values) != rows or values.shape[1] not in (1, chunk)):
        raise _misshapen(method, policy, "values", values, " or ".join(f"[{rows}, {n}]" for n in sorted({1, chunk})))


def _misshapen(method: str, policy: BasePolicy, name: str, tensor: Tensor, wanted: str) -> ConfigError:
    return ConfigError(
        f"`{method}` of `{type(policy).__name__}` returned `{name}` of shape {list(tensor.shape)}",
        why=f"the shape for these observations is {wanted}",
        help="return a row for each observation, and in it one entry for each action of the chunk and each of its D"
        " tokens (docs/models.md, A policy of your own)",
    )


def _float(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
