"""The tasks of panda-gym: a Franka Panda in PyBullet. Its ids are Gymnasium's once the package is imported."""

# panda-gym is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recipes.embodied.envs.base import EnvSettings
from recipes.embodied.envs.gymnasium_env import GymnasiumEnv


@contextmanager
def _without_chatter() -> Iterator[None]:
    """PyBullet prints its options for every environment that it makes, past Python, to the standard output."""
    sys.stdout.flush()
    libc, kept = ctypes.CDLL(None), os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


with _without_chatter():
    import panda_gym  # noqa: F401 - registers its ids


class PandaGymEnv(GymnasiumEnv):
    """`task` is an id such as `PandaReachDense-v3`."""

    def __init__(self, settings: EnvSettings) -> None:
        with _without_chatter():
            super().__init__(settings)
