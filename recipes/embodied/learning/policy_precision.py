"""Data types of trained and acting weights, of the computation and of its outputs; and checks of output shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from recipes.embodied.config import PolicyActorConfig
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, PolicyOutput
from recipes.training.typed_tensors import DTYPES
from rlinf_core import ConfigError

SomeT = TypeVar("SomeT", Tensor, Tensor | None)


def acting_type(config: PolicyActorConfig) -> torch.dtype:
    """Return the type of the weights of rollout workers, `model.precision`.

    An actor keeps float32: bfloat16 would round away an update of 5e-6, which is less than half a step.
    """
    return DTYPES[config.model.precision]


def acting_types(policy: nn.Module, config: PolicyActorConfig) -> Mapping[str, torch.dtype] | None:
    """Return the types in which rollout workers hold the weights of a policy, by name; None: the policy's own types.

    A policy may keep some weights in float32 whatever the type, so a copy without memory is converted and inspected.
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

    The default is `model.precision`. Inputs keep their type: rounding actions to half the bits would change them.
    """
    dtype = DTYPES[config.fsdp_config.mixed_precision.param_dtype or config.model.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def checked_output(output: PolicyOutput, policy: BasePolicy, rows: int, chunk: int) -> PolicyOutput:
    """Return a policy's output for `rows` observations, of `chunk` actions each, in float32.

    Raises:
        ConfigError: it is no `PolicyOutput`, or a tensor has another shape than that says.
    """
    _check_type("act", policy, output, PolicyOutput)
    if len(output.actions) != rows:
        raise _misshapen("act", policy, "actions", output.actions, f"[{rows}, ...]")
    logprobs = _checked_tokens("act", policy, "logprobs", output.logprobs, (rows, chunk))
    values = checked_values(output.values, "act", policy, rows, chunk)
    actions = output.actions.float() if output.actions.is_floating_point() else output.actions
    return PolicyOutput(actions, logprobs, values)


def checked_evaluation(evaluation: ActionEval, policy: BasePolicy, rows: int, chunk: int) -> ActionEval:
    """Return the evaluation of the actions for `rows` observations, of `chunk` each, in float32.

    Raises:
        ConfigError: it is no `ActionEval`, or a tensor has another shape than that says.
    """
    _check_type("forward", policy, evaluation, ActionEval)
    logprobs = _checked_tokens("forward", policy, "logprobs", evaluation.logprobs, (rows, chunk))
    entropy = _checked_tokens("forward", policy, "entropy", evaluation.entropy, (rows, chunk))
    return ActionEval(logprobs, entropy, checked_values(evaluation.values, "forward", policy, rows, chunk))


def checked_values(values: SomeT, method: str, policy: BasePolicy, rows: int, chunk: int) -> SomeT:
    """Return the values of `rows` observations that a method of a policy estimates, in float32.

    Raises:
        ConfigError: there is neither one value per observation, nor one per action of its chunk.
    """
    if values is None:
        return values
    if values.dim() != 2 or len(values) != rows or values.shape[1] not in (1, chunk):
        raise _misshapen(method, policy, "values", values, " or ".join(f"[{rows}, {n}]" for n in sorted({1, chunk})))
    return values.float()


def _checked_tokens(method: str, policy: BasePolicy, name: str, tensor: SomeT, shape: tuple[int, int]) -> SomeT:
    if tensor is None:
        return tensor
    # Sums over actions and tokens would silently run over other dimensions.
    if tensor.dim() != 3 or tensor.shape[:2] != shape:
        raise _misshapen(method, policy, name, tensor, f"[{shape[0]}, {shape[1]}, D]")
    return tensor.float()


def _check_type(method: str, policy: BasePolicy, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"`{method}` of `{type(policy).__name__}` returned a `{type(value).__name__}`",
            help=f"return a `{kind.__name__}` of `recipes.embodied`",
        )


def _misshapen(method: str, policy: BasePolicy, name: str, tensor: Tensor, wanted: str) -> ConfigError:
    return ConfigError(
        f"`{method}` of `{type(policy).__name__}` returned `{name}` of shape {list(tensor.shape)}",
        why=f"the shape for these observations is {wanted}",
        help="return a row for each observation, and in it one entry for each action of the chunk and each of its D"
        " tokens (docs/models.md, A policy of your own)",
    )
