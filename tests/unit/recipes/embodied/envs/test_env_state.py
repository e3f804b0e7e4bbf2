"""States of environments as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.embodied.envs.env_state import observation_digest, pack, unpack


def test_rows_come_back_by_the_numbers_of_their_environments() -> None:
    one = {"number": np.array([0, 1]), "place": np.array([[1.0], [2.0]])}
    other = {"number": np.array([2, 3]), "place": np.array([[3.0], [4.0]])}
    packs = [pack([other], "setup"), pack([one], "setup")]
    unpacked = unpack(packs, "setup", np.array([3, 0]))
    assert unpacked is not None
    assert unpacked["place"].tolist() == [[4.0], [1.0]]
    both = unpack([pack([one, other], "setup")], "setup", np.array([1, 2]))
    assert both is not None
    assert both["place"].tolist() == [[2.0], [3.0]]


def test_rows_of_other_lengths_are_filled_up() -> None:
    one = {"number": np.array([0]), "actions": np.ones((1, 2, 3), np.float32)}
    other = {"number": np.array([1]), "actions": np.ones((1, 4, 3), np.float32)}
    unpacked = unpack([pack([one], ""), pack([other], "")], "", np.array([0, 1]))
    assert unpacked is not None
    assert unpacked["actions"].shape == (2, 4, 3)
    assert unpacked["actions"].dtype == np.float32
    assert unpacked["actions"].sum(axis=(1, 2)).tolist() == [6, 12]


def test_another_setup_and_a_missing_environment_are_refused() -> None:
    packs = [pack([{"number": np.array([0])}], "task: pick")]
    assert unpack(packs, "task: reach", np.array([0])) is None
    assert unpack(packs, "task: pick", np.array([0, 1])) is None
    assert unpack([], "task: pick", np.array([0])) is None


def test_a_state_holds_no_python_objects() -> None:
    with pytest.raises(TypeError, match="`world` holds Python objects"):
        pack([{"number": np.array([0]), "world": np.array([object()])}], "")


def test_a_digest_tells_observations_apart() -> None:
    states = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.5]], np.float32)
    images = np.zeros((3, 2, 2, 3), np.uint8)
    digest = observation_digest({"states": states, "images": images, "instructions": np.array(["a", "b", "c"])})
    assert digest.shape == (3, 16)
    assert (digest[0] == digest[1]).all()
    assert (digest[0] != digest[2]).any()
    images[1, 0, 0, 0] = 1
    assert (observation_digest({"states": states, "images": images})[1] != digest[1]).any()
