"""Models whose parameters have shapes but no memory, while their buffers have the values that constructors compute, and
the memory that they would take.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from recipes.sections.actor import FsdpConfig

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


# Numbers that a learning pass holds for each output number of a linear layer or a convolution. A plain layer holds its
# output, one nonlinearity and gradients; a transformer block adds norms, rotated keys and the residual sum. FORWARD:
# the same without learning, for the largest layer alone. Measured by `bench_memory.py`. On an accelerator, kernels for
# packed rows and compiled kernels keep less of a block: `on_gpu.py`.
PLAIN: Final = 2.2
BLOCK: Final = 2.6
BLOCK_ON_ACCELERATOR: Final = 2.15
FORWARD: Final = 3
_BLOCK_NAME: Final = re.compile(r"^(.*\.(?:layers|h|blocks)\.\d+)\.")


def parameter_bytes(parameters: Iterable[Tensor], *, width: int | None = None) -> int:
    """Return the bytes of tensors, in their own type or with `width` bytes per number; shared tensors count once."""
    unlike = {id(weight): weight for weight in parameters}.values()
    return sum(weight.numel() * (width or weight.element_size()) for weight in unlike)


def computing_layers(model: nn.Module) -> Iterator[tuple[str, str | None, nn.Linear | nn.Conv2d]]:
    """Yield the linear layers and convolutions, except adapters and the output layer of logits: the name of each, the
    name of its transformer block (None: in no block), and the layer.
    """
    for name, layer in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d) and ".lora_" not in name and not name.endswith("lm_head"):
            match = _BLOCK_NAME.match(name)
            yield name, None if match is None else match[1], layer


def block_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a transformer's blocks, each with the name of its block."""
    for name, parameter in model.named_parameters():
        match = _BLOCK_NAME.match(name)
        if match is not None:
            yield match[1], parameter


def held_in_blocks(
    outputs: Counter[str], inputs: Counter[str], *, checkpointing: bool, per_output: float = BLOCK
) -> float:
    """Return how many numbers transformer blocks hold in a learning pass.

    Args:
        outputs, inputs: the numbers that the layers of each block output, and that the block reads.
        checkpointing: whether activations of a block are recomputed from its input.
        per_output: the numbers held for each output number of a layer.
    """
    if checkpointing:
        return per_output * max(outputs.values(), default=0) + inputs.total()
    return per_output * outputs.total()


_MIB: Final = 2**20
# Memory of a worker before it holds anything of a job, measured on Linux with the CPU build of torch: the interpreter
# with Ray and its connections; then what torch, its training parts and transformers add.
WORKER: Final = 132 * _MIB
TORCH: Final = 186 * _MIB
TRAINING: Final = 16 * _MIB
TRANSFORMERS: Final = 172 * _MIB
# Bytes of both moments for each byte of a weight in float32; int8 has three scales in float32 for 256 numbers.
_MOMENTS: Final = {"fp32": 2.0, "bf16": 1.0, "int8": 0.5 + 3 / 256}


def shard_parts(
    weights: int, trained: int, fsdp: FsdpConfig, count: int, *, state_dtype: str = "fp32"
) -> dict[str, int]:
    """Return the bytes that one of `count` training workers holds: its shards of float32 weights and, of the trained
    ones, of gradients and of AdamW's two moments in `optim.state_dtype`. `cpu_offload` keeps all of these on the host.
    """
    shards = 1 if fsdp.sharding_strategy == "no_shard" else count
    moments = int(trained * _MOMENTS[state_dtype])
    if fsdp.cpu_offload:
        return {"offloaded shards": (weights + trained + moments) // shards}
    return {"weights": weights // shards, "gradients": trained // shards, "optimizer": moments // shards}
