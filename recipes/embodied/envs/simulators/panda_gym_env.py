"""The tasks of panda-gym: a Franka Panda in PyBullet. Importing the package registers its Gymnasium ids."""

# panda-gym is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.simulators.gymnasium_env import GymnasiumEnv


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Suppress PyBullet's output from C: its build time on import, and its options for every environment."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    libc, kept = ctypes.CDLL(None), {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with open(os.devnull, "wb") as nowhere:
        for descriptor in kept:
            os.dup2(nowhere.fileno(), descriptor)
    try:
        yield
    finally:
        libc.fflush(None)
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


with _without_chatter():
    import panda_gym  # noqa: F401 - registers its ids


class PandaGymEnv(GymnasiumEnv):
    """`task` is an id such as `PandaReachDense-v3`."""

    def __init__(self, settings: EnvSettings) -> None:
        with _without_chatter():
            super().__init__(settings)
