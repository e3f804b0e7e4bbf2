"""Attention on the meta device: what it holds grows with the tokens, not with their square."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.embodied.memory.meta_attention import fuse_attention
from recipes.training.memory.live_memory import LiveMemory

LENGTH, HEADS = 512, 8


def model(**changes: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=4,
        **changes,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def peak(network: LlamaForCausalLM, length: int) -> int:
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    mask = torch.ones(1, length, dtype=torch.int64, device="meta")
    with LiveMemory() as live, torch.device("meta"), torch.no_grad():
        found = network.model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
    assert found.shape == (1, length, 64)
    return live.peak


def test_scores_are_never_held_at_once() -> None:
    scores = 4 * HEADS * LENGTH**2
    network = model(attn_implementation="eager")
    assert peak(network, LENGTH) > scores
    fuse_attention(network)
    assert peak(network, LENGTH) < scores


def test_the_backward_pass_runs() -> None:
    network = model()
    fuse_attention(network)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        network(tokens, attention_mask=tokens, use_cache=False).logits.sum().backward()
    assert all(each.grad is not None for each in network.parameters())
