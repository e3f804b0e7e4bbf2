"""Pieces of a rollout come together in one order, whoever was first."""

from __future__ import annotations

import numpy as np
import torch

from recipes.embodied.learning.trajectory import RolloutBuffer, RolloutChunks, joined
from recipes.embodied.models.base_policy import PolicyOutput


def outcome(batch: int, value: float) -> dict[str, object]:
    flags = np.zeros((batch, 1), np.bool_)
    rewards = np.full((batch, 1), value, np.float32)
    return {"rewards": rewards, "terminations": flags, "truncations": flags, "valid": ~flags}


def record(steps: int, batch: int, *, version: int = 0, values: bool = True) -> RolloutChunks:
    buffer = RolloutBuffer(steps, version)
    for step in range(steps):
        value = torch.full((batch, 1), float(step)) if values else None
        output = PolicyOutput(torch.full((batch, 1, 2), float(step)), torch.zeros(batch, 1, 2), value)
        buffer.add_action(step, {"states": torch.arange(batch).float()[:, None] + 100 * step}, output)
        buffer.add_outcome(step, outcome(batch, float(step)), None)  # pyright: ignore[reportArgumentType]
    return buffer.finish(torch.zeros(batch, 1) if values else None)


def test_a_recorder_keeps_steps_in_time() -> None:
    recorded = record(3, 4)
    assert recorded.inputs["states"].shape == (3, 4, 1)
    assert recorded.inputs["states"][2, 1] == 201
    assert recorded.steps["rewards"][:, 0, 0].tolist() == [0, 1, 2]
    assert recorded.steps["finals"].shape == (3, 4, 1)
    assert recorded.batch == 4


def test_episode_that_failed_is_left_out_from_its_beginning() -> None:
    buffer = RolloutBuffer(4, 0)
    for step in range(4):
        result = outcome(2, 1)
        if step == 1:
            result["truncations"] = np.array([[True], [False]])
        buffer.add_outcome(step, result, None)  # pyright: ignore[reportArgumentType]
    buffer.leave_out(3, np.array([True, True]))
    valid = buffer.finish(None).steps["valid"][:, :, 0].tolist()
    # The first environment's episode before ended with step 1, and counts; step 3 is the environment's to judge.
    assert valid == [[True, False], [True, False], [False, False], [True, True]]


def test_what_is_recorded_is_copied() -> None:
    buffer = RolloutBuffer(1, 0)
    inputs = outcome(2, 1)
    states = torch.ones(2, 1)
    buffer.add_action(0, {"states": states}, PolicyOutput(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), None))
    buffer.add_outcome(0, inputs, None)  # pyright: ignore[reportArgumentType]
    states.zero_()
    inputs["rewards"][:] = 7  # pyright: ignore[reportIndexIssue]
    result = buffer.finish(None)
    assert result.inputs["states"].sum() == 2
    assert result.steps["rewards"].sum() == 2
    assert result.last is None


def test_pieces_are_ordered_by_environment_and_not_by_arrival() -> None:
    whole = record(2, 6, version=3)
    pieces = [whole.rows(4, 6, 4), whole.rows(0, 1, 0), whole.rows(1, 4, 1)]
    result = joined(pieces)
    torch.testing.assert_close(result.inputs["states"], whole.inputs["states"])
    assert result.last is not None
    assert result.last.shape == (6, 1)
    assert result.version == 3


def test_the_oldest_version_is_that_of_the_whole() -> None:
    pieces = [record(1, 1, version=version).rows(0, 1, version) for version in (5, 4)]
    assert joined(pieces).version == 4
