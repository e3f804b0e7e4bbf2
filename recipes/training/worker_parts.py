"""Parts of the workers of all recipes: comparisons with what comes from outside, random seeds, and freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final, Protocol

from rlinf_core import Worker
from rlinf_core.runners.storage.first_contact import ContactCheck, FirstContact
from rlinf_core.worker.handle import wait_together


class ComparingWorker(Worker):
    """A worker that collects its comparisons for the runner; its configuration is `_config`."""

    _config: Any

    @cached_property
    def _contact(self) -> FirstContact:
        return FirstContact(self.config_section or "", skips=getattr(self._config.runner, "skip_checks", False))

    def compared(self) -> list[ContactCheck]:
        """Return the comparisons since the last call."""
        return self._contact.take()


class Comparing(Protocol):
    """The methods of a worker that compares."""

    def compared(self) -> list[ContactCheck]: ...


def comparisons_of(groups: Iterable[Any]) -> list[ContactCheck]:
    """Return the comparisons that the workers of groups have made since the last call; some groups never compare."""
    asked = [group.compared() for group in groups if hasattr(group, "compared")]
    by_group: list[list[list[ContactCheck]]] = wait_together(*asked)
    return [check for ranks in by_group for checks in ranks for check in checks]


class Purpose(IntEnum):
    """A use of random numbers; no two uses share a seed.

    A worker reseeds torch in every step. A resumed run therefore draws the same numbers, and no generator state is
    saved.
    """

    WEIGHTS = 0
    ACTIONS = 1
    BATCHES = 2
    EVALUATION = 3


def derive_seed(seed: int, purpose: Purpose, step: int = 0, rank: int = 0) -> int:
    """Return a seed for `torch.manual_seed`, from 0 to below 2^63, hashed from all arguments."""
    text = f"{seed} {int(purpose)} {step} {rank}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


# The largest freed block that is kept, in bytes: the maximum of glibc's mallopt(3).
_LARGEST_KEPT: Final = 32 * 2**20
# Parameters of mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1


def keep_freed_memory() -> None:
    """Have this process keep freed blocks of up to 32 MiB for reuse, instead of returning them to the system.

    Layers that compute on the host, and batches of images, allocate and free the same megabytes again and again. The
    system clears their pages each time, which costs up to a tenth of a training step. Without glibc nothing is done.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def release_host_memory() -> None:
    """Return freed memory of this process to the system.

    glibc's allocator keeps freed blocks of up to 32 MiB: after a training step these can take as much as the weights.
    Without glibc nothing is done.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
