"""A person grabs the arm in the middle of a chunk of actions, and a fault comes while they move it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.replay.segments import read_segments
from tests.integration.recipes.robots.grabbed_holder import CHUNK, PERSONS_ACTION, grabbed
from tests.integration.recipes.robots.standing import check_stop

REPOSITORY = Path(__file__).parents[4]
SAID = {"unplugged": ("the device was lost", "plug it in again"), "not a number": ("not finite", "fix the source")}


def check_recorded(folder: Path, seed: int, messages: int, late: int) -> None:
    """Check that the chunks before the fault are there, and say tick by tick who moved the arm, and how.

    Args:
        folder: of the recording.
        seed: of the person's motions.
        told: chunks that the holder told of.
        late: actions that came too late on a busy machine; nothing of them was executed.
    """
    chunks = list(read_segments(folder))
    ticks, last = grabbed(seed)
    assert len(chunks) == messages == last // CHUNK
    for chunk, truth in zip(chunks, ticks.reshape(-1, CHUNK), strict=False):
        assert np.array_equal(chunk["flags"], truth)
        begun = int(truth.argmax())
        wanted = np.where(truth[:, None], PERSONS_ACTION, chunk["policy"])
        wrong = (np.abs(chunk["executed"] - wanted) > 1e-4).any(axis=1) & (truth | (np.arange(CHUNK) < begun))
        late -= int(wrong.sum())
        np.testing.assert_allclose(chunk["executed"][wrong], 0, atol=1e-4)
        # What is left of a chunk when they let go is nobody's: the policy has not seen what they did.
        np.testing.assert_allclose(chunk["executed"][begun:][~truth[begun:]], 0, atol=1e-4)
    assert late >= 0


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["killed", "hung", *SAID])
@pytest.mark.parametrize("seed", range(5))
def test_an_arm_that_was_grabbed_within_a_chunk_stands(fault: str, seed: int, start_arm: Any, tmp_path: Path) -> None:
    arm, _ = start_arm()
    words = ["-m", "tests.integration.recipes.robots.grabbed_holder", arm.robot_ip, str(arm.robot_port)]
    holder = subprocess.Popen(
        [sys.executable, *words, str(tmp_path), str(seed), fault],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        # Before that the arm stands because it was just switched on.
        assert holder.stdout.readline() == "recorded\n", holder.communicate()
        assert f"process {holder.pid} on" in check_stop(arm)
    finally:
        holder.kill()
    output, said = holder.communicate(timeout=60)
    check_recorded(tmp_path, seed, 1 + output.count("recorded"), said.count("came too late"))
    if fault in SAID:
        assert holder.returncode == 1, said
        assert all(words in said for words in SAID[fault]), said
