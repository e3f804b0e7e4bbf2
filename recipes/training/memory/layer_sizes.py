"""Arithmetic on a model that was made on torch's meta device, with shapes and no memory: parameters and activations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from torch import Tensor, nn

# Numbers that a pass which learns holds for each number that a linear layer or a convolution puts out. A plain layer
# has its output, one nonlinearity and gradients; in a block of a transformer come norms, rotated keys and the sum of
# the residual. FORWARD: the same without learning, for the largest layer alone. Measured: `benchmarks/bench_memory.py`.
PLAIN: Final = 2.2
BLOCK: Final = 2.6
FORWARD: Final = 3
_BLOCK_NAME: Final = re.compile(r"^(.*\.(?:layers|h|blocks)\.\d+)\.")


class BlockSizes(NamedTuple):
    """Numbers in the blocks of a transformer: what their layers put out and what blocks take, for a token; what layers
    of the widest block put out; weights of all, and of the largest.
    """

    outputs: int = 0
    inputs: int = 0
    widest: int = 0
    weights: int = 0
    largest: int = 0

    def kept(self, *, checkpointing: bool) -> float:
        """Return the numbers that a pass which learns holds for a token; it may compute blocks again from inputs."""
        return BLOCK * self.widest + self.inputs if checkpointing else BLOCK * self.outputs


def parameter_bytes(parameters: Iterable[Tensor], *, width: int | None = None) -> int:
    """Return the bytes of tensors, in their own type or with `width` bytes a number; one that is shared counts once."""
    unlike = {id(each): each for each in parameters}.values()
    return sum(each.numel() * (width or each.element_size()) for each in unlike)


def computing_layers(model: nn.Module) -> Iterator[tuple[str, str | None, nn.Linear | nn.Conv2d]]:
    """Yield linear layers and convolutions, apart from adapters and the matrix of logits: the name of each, and that of
    the transformer's block that it is in; None: in none.
    """
    modules: Iterable[tuple[str, nn.Module]] = model.named_modules()
    for name, layer in modules:
        if isinstance(layer, nn.Linear | nn.Conv2d) and ".lora_" not in name and not name.endswith("lm_head"):
            match = _BLOCK_NAME.match(name)
            yield name, None if match is None else match[1], layer


def block_sizes(model: nn.Module) -> BlockSizes:
    """Return the sizes of the blocks of a transformer."""
    blocks: dict[str, BlockSizes] = {}
    for _, block, layer in computing_layers(model):
        if block is not None and isinstance(layer, nn.Linear):
            sizes = blocks.get(block) or BlockSizes(inputs=layer.in_features)
            outputs, weights = sizes.outputs + layer.out_features, sizes.weights + layer.weight.numel()
            blocks[block] = BlockSizes(outputs, sizes.inputs, outputs, weights, weights)
    every = BlockSizes(*(sum(column) for column in zip(*blocks.values(), strict=True)))
    widest = max((each.widest for each in blocks.values()), default=0)
    return every._replace(widest=widest, largest=max((each.largest for each in blocks.values()), default=0))
