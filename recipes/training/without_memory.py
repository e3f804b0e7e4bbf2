"""Models whose parameters have shapes but no memory, while their buffers have the values that constructors compute."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_META: Final = torch.device("meta")
_HOLLOW: Final = ContextVar("hollow", default=False)
Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def without_memory() -> Generator[None, None, None]:
    """Register parameters of this thread's modules without memory; nothing is initialized or loaded.

    Unlike in `torch.device("meta")`, buffers have the values that constructors compute, such as rotary frequencies,
    which no file holds.
    """
    thread = threading.get_ident()

    def forget(_module: nn.Module, _name: str, parameter: Tensor) -> nn.Parameter | None:
        return None if parameter.is_meta or threading.get_ident() != thread else _forgotten(parameter)

    handle = cast("Any", register_module_parameter_registration_hook)(forget)
    token = _HOLLOW.set(True)
    try:
        yield
    finally:
        _HOLLOW.reset(token)
        handle.remove()


def are_shapes_only() -> bool:
    """Return whether parameters are created without memory, so that no weights are loaded: in `without_memory` and in
    `torch.device("meta")`.
    """
    return _HOLLOW.get() or torch.get_default_device().type == "meta"


def hollow_copy(module: Module) -> Module:
    """Return a copy of a module whose parameters have no memory; buffers keep their values."""
    return copy.deepcopy(module, {id(weight): _forgotten(weight) for weight in module.parameters()})


@contextmanager
def seemingly_on_host(module: nn.Module) -> Generator[None, None, None]:
    """Have the parameters without memory of a module seem to be on the host in this block.

    Each is a single expanded number. Libraries that place new layers on a parameter's device then place them there.
    """
    stand_ins: dict[int, nn.Parameter] = {}

    def stand_in(weight: nn.Parameter) -> nn.Parameter | None:
        if not weight.is_meta:
            return None
        number = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        made = nn.Parameter(number, requires_grad=weight.requires_grad)
        stand_ins[id(made)] = made
        return made

    replace_parameters(module, stand_in)
    try:
        yield
    finally:
        replace_parameters(module, lambda weight: _forgotten(weight) if id(weight) in stand_ins else None)


def forget_weights(module: nn.Module) -> None:
    """Take the memory of all parameters of a module."""
    replace_parameters(module, lambda weight: None if weight.is_meta else _forgotten(weight))


def replace_parameters(module: nn.Module, change: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
    """Replace parameters of a module; shared parameters stay shared.

    Args:
        module: is changed in place.
        change: is called once for each parameter, and returns its replacement; None: keep it.
    """
    changed: dict[int, nn.Parameter] = {}
    # Replaced parameters are kept until the end: Python would reuse the id of a collected one.
    kept: list[nn.Parameter] = []
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(weight) not in changed:
                kept.append(weight)
                other = change(weight)
                changed[id(weight)] = weight if other is None else other
            setattr(part, name, changed[id(weight)])


def move_what_has_memory(module: nn.Module, device: torch.device) -> None:
    """Move buffers, and parameters that have memory, to a device."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(part, name, buffer.to(device))
    for weight in module.parameters():
        if not weight.is_meta:
            weight.data = weight.data.to(device)


def _forgotten(weight: Tensor) -> nn.Parameter:
    shape = torch.empty(weight.shape, dtype=weight.dtype, device=_META)
    return nn.Parameter(shape, requires_grad=weight.requires_grad)
