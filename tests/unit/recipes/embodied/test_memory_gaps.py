"""Gaps in the heap of an actor, found by learning without memory in a process of its own."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.memory.heap_gaps import Gaps, gaps
from recipes.embodied.memory.policy_memory import PolicyMemory
from recipes.training.memory.host_memory import LARGEST_KEPT
from rlinf_core import load_job

SPEC = EnvSpec(21, 8)
WIDTH = 64

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")


def actor(*overrides: str) -> Any:
    job = load_job("laptop", (f"actor.model.hidden_dim={WIDTH}", *overrides))
    job.raise_if_bad()
    config: Any = job.config
    return config.actor


def of(rows: int) -> Gaps:
    return gaps(actor(), SPEC, rows, rows)


def test_the_heap_of_a_batch_stays_and_has_gaps() -> None:
    # Outputs of a layer, WIDTH numbers of 4 bytes a row, are half of the largest block that is kept.
    rows = LARGEST_KEPT // (4 * WIDTH) // 2
    found, learning = of(rows), PolicyMemory(actor(), SPEC).learning(rows, 1)
    # Of all that learning takes nothing is given back, and blocks that are freed on the way leave holes.
    assert found.resting > learning
    assert LARGEST_KEPT // 2 <= found.learning < 2 * learning


def test_blocks_that_are_mapped_leave_no_gaps() -> None:
    # Outputs of a layer are larger than what is kept; logarithms and the like are not.
    rows = 2 * LARGEST_KEPT // (4 * WIDTH)
    assert of(rows).learning < PolicyMemory(actor(), SPEC).learning(rows, 1) / 2
