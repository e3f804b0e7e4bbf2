"""Forecasts of the memory that processes will hold, as a recipe's part `memory` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from recipes.sections.actor import FsdpConfig

_MIB: Final = 2**20
# What a worker holds before it holds anything of a job, measured on Linux with the CPU build of torch: the interpreter
# with Ray and its connections; what torch, its training and transformers add to it.
WORKER: Final = 132 * _MIB
TORCH: Final = 186 * _MIB
TRAINING: Final = 16 * _MIB
TRANSFORMERS: Final = 172 * _MIB
# Parts that wait on the host where a process leaves its accelerator to others, and all that lie on the accelerator.
_RESIDENT: Final = ("weights", "optimizer", "critics")
DEVICE_PARTS: Final = (
    *(*_RESIDENT, "gradients", "activations", "advantages", "batch", "merged adapter", "keys and values"),
    *("copied weights", "gathered weights", "gathered gradients"),
)


class ProcessForecast(NamedTuple):
    """The most memory that the processes of a component will hold; each holds the same.

    Attributes:
        component: of the job.
        processes: how many there are.
        parts: bytes by what they hold: `base` (interpreter and libraries), `weights`, `gradients`, ...
        shared: bytes of shared memory (/dev/shm) that its messages take at most, over all processes.
        offloads: whether it leaves its accelerator while others use it.
        notes: what is not known.
    """

    component: str
    processes: int
    parts: Mapping[str, int]
    shared: int = 0
    offloads: bool = False
    notes: tuple[str, ...] = ()

    def held(self, *, accelerated: bool) -> tuple[int, int]:
        """Return the bytes of the host's memory and of an accelerator's, of a process that has one or has none."""
        host = sum(self.parts.values())
        if not accelerated:
            return host, 0
        device = sum(self.parts.get(name, 0) for name in DEVICE_PARTS)
        # Weights are loaded on the host, and go to the accelerator from there.
        waiting = _RESIDENT if self.offloads else _RESIDENT[:1]
        return host - device + sum(self.parts.get(name, 0) for name in waiting), device


def shard_parts(weights: int, trained: int, fsdp: FsdpConfig, count: int) -> dict[str, int]:
    """Return what one of `count` workers that train holds of all weights and of the trained ones, with gradients and
    AdamW's two moments. `cpu_offload` keeps them on the host.
    """
    shards = 1 if fsdp.sharding_strategy == "no_shard" else count
    if fsdp.cpu_offload:
        return {"offloaded shards": (weights + 3 * trained) // shards}
    return {"weights": weights // shards, "gradients": trained // shards, "optimizer": 2 * trained // shards}
