"""Gaps in the heap of an actor on the host: freed memory between blocks, which what comes next does not fit into."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final, NamedTuple

import torch

from recipes.embodied.config import PolicyActorConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.memory.policy_memory import PolicyMemory
from recipes.training.memory.host_memory import heap_size, keep_freed_memory, release_host_memory
from recipes.training.memory.live_memory import HeapMemory

# Optimizer steps that are taken: until so many in a row have not made the heap grow, and no more than these.
_UNCHANGED_STEPS: Final = 2
_MOST_STEPS: Final = 8


class Gaps(NamedTuple):
    """Bytes that a process on the host holds and no tensor has.

    Attributes:
        learning: at the peak of learning.
        resting: between two training steps.
    """

    learning: int
    resting: int


def gaps(actor: PolicyActorConfig, spec: EnvSpec, batch: int, rows: int, *, imitates: bool = False) -> Gaps:
    """Return the gaps that learning leaves in the heap of an actor on the host; none where the heap is not known.

    A process of its own learns without memory until its heap does not grow any more.

    Args:
        actor: the section `actor`.
        spec: of the environment.
        batch: samples of an optimizer step.
        rows: those of a forward and backward pass.
        imitates: it learns by the loss of demonstrations, not by reinforcement.

    Raises:
        RuntimeError: the system gives no addresses for a heap of that size.
    """
    context = get_context("forkserver")
    # Imported once; each process then begins with the same heap.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_learned, actor, spec, batch, rows, imitates=imitates).result()


def _learned(actor: PolicyActorConfig, spec: EnvSpec, batch: int, rows: int, *, imitates: bool) -> Gaps:
    torch.set_num_threads(1)
    policy = PolicyMemory(actor, spec, imitates=imitates)
    with HeapMemory(), torch.device("meta"):
        # What is imported on the way is no part of the heap's growth.
        policy.take_step(1, 1)
        policy.check_weights()
    policy.forget()
    keep_freed_memory()
    release_host_memory()
    before = size = heap_size()
    with HeapMemory() as live, torch.device("meta"):
        policy.take_step(batch, rows)
        moments = policy.optimizer_state()
        policy.check_weights()
        unchanged = 0
        for _ in range(_MOST_STEPS - 1):
            policy.take_step(batch, rows)
            policy.check_weights()
            grown, size = heap_size() - size, heap_size()
            unchanged = 0 if grown else unchanged + 1
            if unchanged == _UNCHANGED_STEPS:
                break
        heap = size - before
        resting = heap + live.mapped - live.now
        del moments
    return Gaps(max(0, heap + live.most_mapped - live.peak), max(0, resting))
