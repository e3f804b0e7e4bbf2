"""Forecasts of the memory that processes will hold, as a recipe's part `memory` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

# Parts that wait on the host where a process leaves its accelerator to others, and all that lie on the accelerator.
_RESIDENT: Final = ("weights", "optimizer", "critics")
DEVICE_PARTS: Final = (
    *(*_RESIDENT, "gradients", "activations", "advantages", "batch", "merged adapter", "keys and values"),
    *("gathered weights", "gathered gradients"),
)
# Host memory of a process that computes on an accelerator: libraries of CUDA and their context. On an H200 with torch
# 2.11 an engine took 1.5 GiB, and a trainer that compiles kernels 2.2.
ACCELERATOR_LIBRARIES: Final = 3 << 29


class ProcessForecast(NamedTuple):
    """The most memory that the processes of a component will hold; each holds the same.

    Attributes:
        component: the component of the job.
        processes: the number of processes.
        parts: bytes by what they hold: `base` (interpreter and libraries), `weights`, `gradients`, ...
        shared: bytes of shared memory (/dev/shm) that its messages take at most, over all processes.
        offloads: whether it leaves its accelerator while others use it.
        notes: what is not known.
        on_accelerator: bytes of those parts that take another amount on an accelerator.
    """

    component: str
    processes: int
    parts: Mapping[str, int]
    shared: int = 0
    offloads: bool = False
    notes: tuple[str, ...] = ()
    on_accelerator: Mapping[str, int] = MappingProxyType({})

    def parts_of(self, *, accelerated: bool) -> dict[str, int]:
        """Return the parts of a process that has an accelerator, or has none."""
        return {**self.parts, **self.on_accelerator} if accelerated else dict(self.parts)

    def held(self, *, accelerated: bool) -> tuple[int, int]:
        """Return the bytes of the host's memory and of an accelerator's, of a process that has one or has none."""
        parts = self.parts_of(accelerated=accelerated)
        host = sum(parts.values())
        if not accelerated:
            return host, 0
        device = sum(parts.get(name, 0) for name in DEVICE_PARTS)
        # Weights are loaded on the host, and go to the accelerator from there.
        waiting = _RESIDENT if self.offloads else _RESIDENT[:1]
        stays = ACCELERATOR_LIBRARIES + sum(parts.get(name, 0) for name in waiting)
        return host - device + stays, device
