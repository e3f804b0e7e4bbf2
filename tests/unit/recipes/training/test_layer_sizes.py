"""Arithmetic on layers: parameters and what they put out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from recipes.training.memory_parts import BLOCK, computing_layers, held_in_blocks, parameter_bytes

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


def test_blocks_hold_what_their_layers_put_out() -> None:
    outputs, inputs = Counter({"layers.0": 7, "layers.1": 9}), Counter({"layers.0": 2, "layers.1": 2})
    assert held_in_blocks(outputs, inputs, checkpointing=False) == BLOCK * 16
    assert held_in_blocks(outputs, inputs, checkpointing=True) == BLOCK * 9 + 4
    assert held_in_blocks(Counter(), Counter(), checkpointing=True) == 0


def test_layers_are_named_by_their_block() -> None:
    layers = list(computing_layers(made("Llama")))
    assert {block for _, block, _ in layers} == {f"model.layers.{number}" for number in range(LAYERS)}
    # Queries, keys and values of two heads each, the attention's output; gate, up and down.
    outputs = sum(layer.weight.shape[0] for _, _, layer in layers)
    assert outputs == LAYERS * (WIDTH + 2 * WIDTH // 2 + WIDTH + 2 * MIDDLE + WIDTH)


def test_the_matrix_of_logits_is_left_out() -> None:
    names = {name for name, _, _ in computing_layers(made("Qwen2"))}
    assert "lm_head" not in names
    assert "model.layers.0.mlp.up_proj" in names
