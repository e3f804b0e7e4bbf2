"""The tasks of panda-gym: a Franka Panda in PyBullet. Its ids are Gymnasium's once the package is imported."""

# panda-gym is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import panda_gym  # noqa: F401 - registers its ids

from recipes.embodied.envs.gymnasium_env import GymnasiumEnv


class PandaGymEnv(GymnasiumEnv):
    """`task` is an id such as `PandaReachDense-v3`."""
