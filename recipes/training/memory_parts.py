"""Arithmetic on models on torch's meta device, which have shapes but no memory: parameters and layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, cast

from torch import Tensor, nn

from recipes.sections.actor import FsdpConfig

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
    name
    of its transformer block (None: in no block), and the layer.
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
    ones,
    of gradients and of AdamW's two moments in `optim.state_dtype`. `cpu_offload` keeps all of these on the host.
    """
    shards = 1 if fsdp.sharding_strategy == "no_shard" else count
    moments = int(trained * _MOMENTS[state_dtype])
    if fsdp.cpu_offload:
        return {"offloaded shards": (weights + trained + moments) // shards}
    return {"weights": weights // shards, "gradients": trained // shards, "optimizer": moments // shards}
