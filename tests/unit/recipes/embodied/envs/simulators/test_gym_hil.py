"""The scripted expert of gym-hil, without the simulator."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium")
from recipes.embodied.envs.simulators.gym_hil import pick_cube

OPEN, CLOSE = -1.0, 1.0


@pytest.mark.parametrize(
    ("away", "angle", "speed", "motion", "gripper"),
    [
        ((0.1, 0.0, -0.05), 0.0, 0.0, (0.1, 0.0, 0.05), OPEN),  # from afar, toward a place above it
        ((0.02, 0.0, -0.05), 0.0, 0.0, (0.02, 0.0, 0.01), OPEN),  # nearly there, lower
        ((0.0, 0.01, -0.05), 0.0, 0.0, (0.0, 0.01, -0.05), OPEN),  # above it, down
        ((0.0, 0.0, -0.01), 0.0, 0.0, (0.0, 0.0, 0.0), CLOSE),  # around it, waits for the fingers
        ((0.0, 0.0, -0.01), 0.4, 1.0, (0.0, 0.0, 0.0), CLOSE),  # they move
        ((0.0, 0.0, -0.02), 0.4, 0.0, (0.0, 0.0, 0.1), CLOSE),  # they hold it, up
        ((0.0, 0.0, -0.05), 0.4, 0.0, (0.0, 0.0, -0.05), OPEN),  # it was lost
    ],
)
def test_the_expert_goes_by_the_state_alone(
    away: tuple[float, ...], angle: float, speed: float, motion: tuple[float, ...], gripper: float
) -> None:
    chosen, command = pick_cube(np.array(away), angle, speed)
    np.testing.assert_allclose(chosen, motion, atol=1e-9)
    assert command == gripper
