"""Memory: arithmetic on layers, forecasts of processes, and freed blocks."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from recipes.sections.actor import FsdpConfig
from recipes.training.host_memory import release_host_memory
from recipes.training.without_memory import BLOCK, computing_layers, held_in_blocks, parameter_bytes, shard_parts
from rlinf_core.job.recipe import ACCELERATOR_LIBRARIES, ProcessForecast
from rlinf_core.process.proc import rss_fields

WIDTH, MIDDLE, LAYERS, WORDS = 64, 96, 3, 50
TEXT: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS}
TEXT.update({"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS})


def made(kind: str, **changes: Any) -> nn.Module:
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


def test_layers_are_named_by_their_block_without_the_logits() -> None:
    layers = list(computing_layers(made("Llama")))
    assert {block for _, block, _ in layers} == {f"model.layers.{number}" for number in range(LAYERS)}
    # Queries, keys and values of two heads each, the attention's output; gate, up and down.
    outputs = sum(layer.weight.shape[0] for _, _, layer in layers)
    assert outputs == LAYERS * (WIDTH + 2 * WIDTH // 2 + WIDTH + 2 * MIDDLE + WIDTH)
    names = {name for name, _, _ in layers}
    assert "lm_head" not in names
    assert "model.layers.0.mlp.up_proj" in names


PARTS = {"base": 300, "weights": 100, "optimizer": 200, "activations": 50, "trajectories": 7}


@pytest.mark.parametrize(
    ("accelerated", "offloads", "held"),
    [
        (False, False, (657, 0)),
        # Weights are loaded on the host.
        (True, False, (407 + ACCELERATOR_LIBRARIES, 350)),
        # Weights and the optimizer's state wait there.
        (True, True, (607 + ACCELERATOR_LIBRARIES, 350)),
    ],
)
def test_parts_lie_where_they_are_computed_with(accelerated: bool, offloads: bool, held: tuple[int, int]) -> None:
    forecast = ProcessForecast("actor", 2, PARTS, offloads=offloads)
    assert forecast.held(accelerated=accelerated) == held


def test_a_part_may_take_less_on_an_accelerator() -> None:
    forecast = ProcessForecast("actor", 2, PARTS, on_accelerator={"activations": 40})
    assert forecast.held(accelerated=False) == (657, 0)
    assert forecast.held(accelerated=True) == (407 + ACCELERATOR_LIBRARIES, 340)
    assert forecast.parts_of(accelerated=True) == {**PARTS, "activations": 40}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, {"weights": 50, "gradients": 20, "optimizer": 40}),
        ({"sharding_strategy": "no_shard"}, {"weights": 100, "gradients": 40, "optimizer": 80}),
        ({"cpu_offload": True}, {"offloaded shards": 110}),
    ],
)
def test_shards_divide_what_training_holds(settings: dict[str, object], parts: dict[str, int]) -> None:
    assert shard_parts(100, 40, FsdpConfig.model_validate(settings), 2) == parts


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident set is read from /proc")
def test_freed_blocks_are_given_back() -> None:
    # Small ones, of which the allocator keeps those below the last: that lives on.
    blocks = [bytearray(64 * 1024) for _ in range(1024)]
    last = bytearray(64 * 1024)
    held = rss_fields()["VmRSS"]
    del blocks
    release_host_memory()
    assert held - rss_fields()["VmRSS"] > 32 * 2**20
    assert len(last) == 64 * 1024


# Page faults of blocks that are taken, written and freed together, five times.
PROGRAM = """
import ctypes
import resource
import sys

from recipes.training.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    blocks = [ctypes.c_void_p(library.malloc(ctypes.c_size_t(20 * 2**20))) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, 20 * 2**20)
    for block in blocks:
        library.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_blocks_are_used_again_without_page_faults() -> None:
    # The first time pages are new either way.
    assert 3 * faults("keep") < faults("leave")
