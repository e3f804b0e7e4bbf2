from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.processes.simulator import Outcome
from rlinf_core import ConfigError

spaces = pytest.importorskip("gymnasium.spaces")
from recipes.embodied.envs.simulators.gymnasium.gymnasium_env import cannot_be_made  # noqa: E402
from recipes.embodied.envs.simulators.gymnasium.gymnasium_spaces import Reader, Writer  # noqa: E402
from recipes.embodied.envs.simulators.gymnasium.gymnasium_steps import checked_step  # noqa: E402

LARGEST = float(np.finfo(np.float32).max)
BYTES = {"low": 0, "high": 255, "dtype": np.uint8}


@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 2, np.int64), (-3, 3, np.int8), (0, 255, np.uint8)])
def test_whole_numbers_get_equal_parts(low: int, high: int, dtype: Any) -> None:
    count = high - low + 1
    drawn = np.linspace(-1, 1, 30 * count, endpoint=False)[:, None]
    taken = Writer("task", spaces.Box(low, high, (1,), dtype))(drawn)
    values, counts = np.unique(taken, return_counts=True)
    assert values.tolist() == list(range(low, high + 1))
    assert np.ptp(counts) <= 2
    assert taken.dtype == dtype


@pytest.mark.parametrize(
    ("low", "high"), [(-LARGEST, LARGEST), (-np.inf, np.inf), (0, np.inf), (-2, LARGEST), (-1e20, 1e20), (3, 7)]
)
def test_actions_are_finite_and_in_the_space(low: float, high: float) -> None:
    space = spaces.Box(low, high, (2,))
    for row in Writer("task", space)(np.array([[-5.0, 5.0], [-0.5, 0.5], [1.0, -1.0]], np.float32)):
        assert np.isfinite(row).all()
        assert space.contains(row)


def test_bounds_are_told() -> None:
    writer = Writer("task", spaces.Box(np.array([-2, -np.inf]), np.array([2, np.inf])))
    assert (writer.low, writer.high) == ((-2, None), (2, None))
    with pytest.raises(ConfigError, match="is unbounded"):
        Writer("task", spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64))


@pytest.mark.parametrize("shape", [(32, 24, 3), (3, 32, 24), (32, 24, 1), (1, 32, 24), (32, 24)])
def test_pictures_are_turned_into_ours(shape: tuple[int, ...]) -> None:
    reader = Reader("task", spaces.Box(shape=shape, **BYTES))
    assert (reader.cameras, reader.state_size) == ({"main": (32, 24, 3)}, 0)
    seen = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    picture = reader(seen)["images.main"]
    upright = seen if shape[0] == 32 else seen.transpose(1, 2, 0)
    assert np.array_equal(picture, np.broadcast_to(upright.reshape(32, 24, -1), (32, 24, 3)))


@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 4), (4, 84, 84, 3), (84, 84, 12), (6, 84, 84)])
def test_stacked_frames_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="not a single one: uint8"):
        Reader("task", spaces.Box(shape=shape, **BYTES))


def test_pictures_of_floats_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a single one: float32"):
        Reader("task", spaces.Box(0, 1, (84, 84, 3)))


def test_parts_of_dictionaries_and_tuples_are_found() -> None:
    picture = spaces.Box(shape=(16, 16, 3), **BYTES)
    inner = spaces.Dict(img=picture, x=spaces.Box(-1, 1, (2,)))
    space = spaces.Dict(a=inner, b=spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2, start=5))))
    reader = Reader("task", space)
    assert (reader.cameras, reader.state_size) == ({"a.img": (16, 16, 3)}, 7)
    row = reader({"a": {"img": np.zeros((16, 16, 3), np.uint8), "x": np.array([0.5, 1])}, "b": (2, 5)})
    assert row["states"].tolist() == [0.5, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("space", "seen", "message"),
    [
        (spaces.Discrete(3), -1, "is -1"),
        (spaces.Box(-1, 1, (2,)), np.zeros(3), r"the shape \[3\]"),
        (spaces.Box(-1, 1, (2,)), np.array(["a", "b"]), "values of the type"),
        (spaces.Box(shape=(16, 16, 3), **BYTES), np.zeros((16, 16, 3)), "the type float64"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2)), {"a": 1}, "has no `b`"),
    ],
)
def test_observations_out_of_their_space_are_refused(space: Any, seen: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Reader("task", space)(seen)


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.array(1), np.array([1.0]), np.array([[1]])])
def test_one_number_is_a_reward(reward: Any) -> None:
    assert checked_step("task", (0, reward, False, np.bool_(True), {"success": 1}))[1] == Outcome(
        1.0, False, True, True
    )


def test_a_missing_extra_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'imageio'", name="imageio")
    assert cannot_be_made("Hopper-v5", missing).help == "run `pip install 'gymnasium[mujoco]'`"
    missing = ModuleNotFoundError("No module named 'jax'", name="jax")
    assert cannot_be_made("phys2d/CartPole-v1", missing).help == "run `pip install 'gymnasium[jax]'`"
    moved = ImportError("The mujoco v2 and v3 based environments have been moved to the gymnasium-robotics project")
    assert "a newer version of its id" in (cannot_be_made("Hopper-v2", moved).help or "")
    old = ImportError("`Pusher-v4` is only supported on `mujoco<3`")
    assert "pip install 'mujoco<3'" in (cannot_be_made("Pusher-v4", old).help or "")
    wraps = ImportError('To use the gym compatibility environments, run `pip install "shimmy[gym-v26]"`')
    assert "shimmy:GymV26Environment-v0" in (cannot_be_made("GymV26Environment-v0", wraps).help or "")
    assert "pip install other" in (cannot_be_made("Own-v0", ModuleNotFoundError("x", name="other")).help or "")


def test_bytes_of_a_grid_or_a_mask_are_no_colours() -> None:
    grid = Reader("task", spaces.Box(0, 10, (7, 7, 3), np.uint8))
    assert (grid.cameras, grid.state_size) == ({}, 147)
    with pytest.raises(ConfigError, match="its numbers go from 0 to 1, and those of a camera from 0 to 255"):
        Reader("task", spaces.Box(0, 1, (32, 32, 3), np.uint8))


def test_part_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="`a` has no numbers"):
        Reader("task", spaces.Dict(a=spaces.Box(-1, 1, (0,)), b=spaces.Box(-1, 1, (2,))))
