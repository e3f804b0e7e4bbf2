"""LeRobot's own dataset classes read what we write, and we read what they write.

They live in an interpreter of their own (with ffmpeg for torchcodec), which `RLINF_TEST_LEROBOT` names; without one
the tests are skipped:

    python3.12 -m venv V && V/bin/pip install 'lerobot[dataset]'

or an older lerobot on Python 3.11, without its pin of torch:

    python3.11 -m venv V && V/bin/pip install torch torchvision 'torchcodec<0.12' && V/bin/pip install --no-deps lerobot
    V/bin/pip install accelerate av datasets pandas draccus deepdiff termcolor jsonlines imageio einops
    V/bin/pip install opencv-python-headless
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.demonstrations.lerobot.lerobot_set import read_lerobot
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter

PYTHON = os.environ.get("RLINF_TEST_LEROBOT", "")
PROGRAM = Path(__file__).with_name("lerobot_sets.py")
MAIN = "observation.images.main"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot"),
    pytest.mark.timeout(600),
]


def lerobot(home: Path, *arguments: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_lerobot_reads_what_we_write(tmp_path: Path, kind: str) -> None:
    features = {
        "observation.state": Feature("float32", (3,)),
        MAIN: Feature(kind, (32, 48, 3), ["height", "width", "channels"]),
        "action": Feature("float32", (2,)),
        "next.done": Feature("bool", (1,)),
    }
    random = np.random.default_rng(0)
    parts: list[dict[str, NDArray[Any]]] = []
    with DatasetWriter(tmp_path / "set", 10, features) as writer:
        for number, length in enumerate((6, 9, 4)):
            shade = np.linspace(20, 180, 32 * 48).reshape(32, 48, 1) + 5 * np.arange(length)[:, None, None, None]
            parts.append(
                {
                    "observation.state": random.normal(size=(length, 3)).astype(np.float32),
                    MAIN: np.repeat(shade, 3, axis=3).astype(np.uint8),
                    "action": random.normal(size=(length, 2)).astype(np.float32),
                    "next.done": np.arange(length) == length - 1,
                }
            )
            writer.add(parts[-1], f"task {number % 2}")
    lerobot(tmp_path, "read", str(tmp_path / "set"), str(tmp_path / "out.npz"))
    theirs, ours = np.load(tmp_path / "out.npz"), read_lerobot(tmp_path / "set")
    assert (int(theirs["fps"]), int(theirs["episodes"])) == (10, 3)
    for name in ("observation.state", "action", "next.done"):
        assert np.array_equal(theirs[name].squeeze(), np.concatenate([part[name] for part in parts])), name
    assert theirs["tasks"].tolist() == [ours.tasks[task] for task in ours.task_of]
    assert np.array_equal(theirs["episode_index"].ravel(), np.repeat([0, 1, 2], [6, 9, 4]))
    np.testing.assert_allclose(theirs["timestamp"].ravel(), np.concatenate([np.arange(n) for n in (6, 9, 4)]) / 10)
    pictures = (theirs[MAIN].transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    assert np.array_equal(pictures, ours.cameras["main"].read(np.arange(19)))
    if kind == "image":
        assert np.array_equal(pictures, np.concatenate([part[MAIN] for part in parts]))
    assert ours.statistics is not None
    np.testing.assert_allclose(theirs["stats/action"], ours.statistics["action"]["mean"])
    np.testing.assert_allclose(theirs[f"stats/{MAIN}"], ours.statistics[MAIN]["mean"])


@pytest.mark.parametrize("kind", ["image", "video"])
def test_we_read_what_lerobot_writes(tmp_path: Path, kind: str) -> None:
    lerobot(tmp_path, "write", str(tmp_path / "set"), kind, str(tmp_path / "written.npz"))
    lerobot(tmp_path, "read", str(tmp_path / "set"), str(tmp_path / "read.npz"))
    written, read, ours = (
        np.load(tmp_path / "written.npz"),
        np.load(tmp_path / "read.npz"),
        read_lerobot(tmp_path / "set"),
    )
    assert ours.states is not None
    assert (ours.fps, ours.bounds.tolist()) == (10, [0, 6, 15])
    assert np.array_equal(ours.actions, written["action"])
    assert np.array_equal(ours.states, written["observation.state"])
    assert [ours.tasks[task] for task in ours.task_of] == written["task"].tolist()
    pictures = ours.cameras["main"].read(np.arange(15))
    assert np.array_equal(pictures, (read[MAIN].transpose(0, 2, 3, 1) * 255).round().astype(np.uint8))
    if kind == "image":
        assert np.array_equal(pictures, written[MAIN])
    assert np.abs(pictures.astype(int) - written[MAIN]).mean() < 4
    assert ours.statistics is not None
    np.testing.assert_allclose(ours.statistics["action"]["mean"], read["stats/action"])
