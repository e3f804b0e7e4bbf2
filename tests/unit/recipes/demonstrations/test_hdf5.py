"""HDF5 files as LIBERO and robomimic write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.load_set import load_demonstrations

h5py = pytest.importorskip("h5py")


def write(file: Path, observations: dict[str, Any], attributes: dict[str, Any], lengths: tuple[int, ...]) -> None:
    with h5py.File(file, "w") as opened:
        data = opened.create_group("data")
        for name, value in attributes.items():
            data.attrs[name] = json.dumps(value)
        # Written in an order that is not that of the numbers.
        for number in reversed(range(len(lengths))):
            demo, length = data.create_group(f"demo_{number}"), lengths[number]
            demo["actions"] = np.full((length, 7), number, np.float64)
            for name, shape in observations.items():
                kind = np.uint8 if len(shape) == 3 else np.float64
                demo[f"obs/{name}"] = (np.ones((length, *shape)) * (number + 1)).astype(kind)


def test_libero(tmp_path: Path) -> None:
    file = tmp_path / "pick_up_the_bowl_demo.hdf5"
    observations = {"agentview_rgb": (8, 8, 3), "ee_states": (6,), "gripper_states": (2,), "joint_states": (7,)}
    said = {
        "problem_info": {"language_instruction": "pick up the bowl"},
        "env_args": {"env_kwargs": {"control_freq": 20}},
    }
    write(file, observations, said, tuple(range(2, 14)))
    found = load_demonstrations([str(file)])
    assert found.tasks == ("pick up the bowl",)
    assert found.fps == 20
    assert found.episodes == 12
    assert found.states is not None
    assert found.states.shape == (len(found), 8)
    # demo_10 after demo_9.
    assert np.array_equal(found.actions[found.bounds[:-1], 0], np.arange(12))
    assert found.cameras["agentview_rgb"].read(np.array([5, 0]))[:, 0, 0, 0].tolist() == [3, 1]


def test_robomimic(tmp_path: Path) -> None:
    file = tmp_path / "lift.hdf5"
    observations = {"robot0_eef_pos": (3,), "robot0_eef_quat": (4,), "robot0_gripper_qpos": (2,), "object": (10,)}
    write(file, observations, {"env_args": {"env_name": "Lift"}}, (3, 4))
    found = load_demonstrations([str(file)])
    assert (found.tasks, found.fps, found.cameras) == (("Lift",), None, {})
    assert found.states is not None
    assert found.states.shape == (7, 9)
    wider = load_demonstrations([str(file)], ["robot0_eef_pos", "object"])
    assert wider.states is not None
    assert wider.states.shape == (7, 13)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="the file does not exist"):
        load_demonstrations([str(tmp_path / "none.hdf5")])
    damaged = tmp_path / "damaged.hdf5"
    damaged.write_bytes(b"nothing")
    with pytest.raises(DatasetError, match="cannot be read as HDF5"):
        load_demonstrations([str(damaged)])
    empty = tmp_path / "empty.hdf5"
    h5py.File(empty, "w").close()
    with pytest.raises(DatasetError, match="has no demonstrations"):
        load_demonstrations([str(empty)])
    file = tmp_path / "lift.hdf5"
    write(file, {"object": (10,)}, {}, (3,))
    with pytest.raises(DatasetError, match="has no observation `joints`"):
        load_demonstrations([str(file)], ["joints"])
