"""Forecasts of the memory that processes will hold, as a recipe's part `memory` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PhaseForecast(NamedTuple):
    """Memory that a process is expected to hold at most in a phase, the method that runs.

    Attributes:
        parts: bytes by what they hold: `base` (interpreter and libraries), `weights`, `gradients`, ...
        on_device: the parts that lie in the accelerator's memory, where the process has one.
        host_only: the parts that there are only where it has none.
    """

    phase: str
    parts: Mapping[str, int]
    on_device: frozenset[str] = frozenset()
    host_only: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def device(self) -> int:
        """Bytes of the parts that lie in the accelerator's memory, where the process has one."""
        return sum(size for name, size in self.parts.items() if name in self.on_device)

    def on_host(self, *, accelerated: bool) -> int:
        """Return the bytes of the host's memory, of a process with an accelerator or without."""
        elsewhere = self.on_device | self.host_only if accelerated else frozenset[str]()
        return sum(size for name, size in self.parts.items() if name not in elsewhere)


class ProcessForecast(NamedTuple):
    """Memory of the processes of a component, each of which holds the same.

    Attributes:
        processes: how many there are.
        phases: in the order in which they come.
        shared: bytes of shared memory (/dev/shm) that its messages take at most, over all processes.
        notes: what is not known.
    """

    component: str
    processes: int
    phases: tuple[PhaseForecast, ...]
    shared: int = 0
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(each.total for each in self.phases)

    def on_host(self, *, accelerated: bool) -> int:
        """Return the bytes of the host's memory in the largest phase, of a process with an accelerator or without."""
        return max(each.on_host(accelerated=accelerated) for each in self.phases)

    @property
    def on_device(self) -> int:
        """Bytes of an accelerator's memory in the largest phase."""
        return max(each.device for each in self.phases)
