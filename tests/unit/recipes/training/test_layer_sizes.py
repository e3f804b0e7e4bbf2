"""Arithmetic on layers: parameters and what they put out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recipes.training.memory.layer_sizes import BLOCK, block_sizes, computing_layers, parameter_bytes

WIDTH, MIDDLE, LAYERS, WORDS = 64, 96, 3, 50
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
}


def made(kind: str, **changes: Any) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**TEXT, **changes))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_equal_those_of_a_built_model(kind: str, tied: bool) -> None:
    with torch.device("meta"):
        shapes = made(kind, tie_word_embeddings=tied)
    built = sum(weight.numel() for weight in made(kind, tie_word_embeddings=tied).parameters())
    assert parameter_bytes(shapes.parameters()) == 4 * built
    assert parameter_bytes(shapes.parameters(), width=2) == 2 * built


def test_parameters_that_are_shared_count_once() -> None:
    weight = nn.Parameter(torch.empty(10))
    assert parameter_bytes([weight, weight]) == 40


def test_blocks_are_counted_by_their_linear_layers() -> None:
    sizes = block_sizes(made("Llama"))
    # Queries, keys and values of two heads each, the attention's output; gate, up and down.
    outputs = WIDTH + 2 * WIDTH // 2 + WIDTH + 2 * MIDDLE + WIDTH
    weights = 2 * WIDTH**2 + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * MIDDLE
    assert sizes == (LAYERS * outputs, LAYERS * WIDTH, outputs, LAYERS * weights, weights)
    assert sizes.kept(checkpointing=False) == BLOCK * (LAYERS * outputs)
    assert sizes.kept(checkpointing=True) == BLOCK * outputs + LAYERS * WIDTH


def test_a_model_without_blocks_has_sizes_of_zero() -> None:
    assert block_sizes(nn.Linear(2, 3)) == (0, 0, 0, 0, 0)


def test_the_matrix_of_logits_is_left_out() -> None:
    names = {name for name, _, _ in computing_layers(made("Qwen2"))}
    assert "lm_head" not in names
    assert "model.layers.0.mlp.up_proj" in names
