"""A program for an interpreter with LeRobot: reads a data set by LeRobot's own classes, or writes one.

python lerobot_sets.py read FOLDER OUT.npz
python lerobot_sets.py write FOLDER image|video OUT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

# A torchvision that was built for another torch has no operators; its transforms, which LeRobot uses, need none.
OPERATORS = torch.library.Library("torchvision", "DEF")
try:
    import torchvision  # noqa: F401
except RuntimeError:
    for missing in ("nms", "qnms"):
        OPERATORS.define(f"{missing}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [module for module in sys.modules if module.startswith("torchvision")]:
        del sys.modules[name]

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

MAIN = "observation.images.main"


def read(folder: str, out: str) -> None:
    """Keep every row as LeRobot gives it."""
    result = LeRobotDataset("local/set", root=folder)
    rows: list[dict[str, Any]] = [result[index] for index in range(len(result))]
    columns = {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0] if key != "task"}
    tasks = np.array([row["task"] for row in rows])
    stats = {f"stats/{name}": result.meta.stats[name]["mean"] for name in ("action", MAIN)}
    np.savez(out, tasks=tasks, fps=result.fps, episodes=result.num_episodes, **stats, **columns)


def write(folder: str, kind: str, out: str) -> None:
    """Record two episodes, and keep what was recorded."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        MAIN: {"dtype": kind, "shape": (32, 48, 3), "names": ["height", "width", "channels"]},
    }
    made = LeRobotDataset.create("local/set", fps=10, features=features, root=folder, use_videos=kind == "video")
    random = np.random.default_rng(0)
    kept: dict[str, list[Any]] = {"observation.state": [], "action": [], MAIN: [], "task": []}
    for episode, length in enumerate((6, 9)):
        for step in range(length):
            shade = np.linspace(20, 200, 32 * 48).reshape(32, 48) + 5 * step
            row = {
                "observation.state": random.normal(size=3).astype(np.float32),
                "action": random.normal(size=2).astype(np.float32),
                MAIN: np.repeat(shade.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2),
                "task": f"task {episode}",
            }
            for name, values in kept.items():
                values.append(row[name])
            made.add_frame(row)
        made.save_episode()
    made.finalize()
    np.savez(out, **{name: np.stack([np.asarray(value) for value in values]) for name, values in kept.items()})


if __name__ == "__main__":
    Path(sys.argv[-1]).parent.mkdir(parents=True, exist_ok=True)
    {"read": read, "write": write}[sys.argv[1]](*sys.argv[2:])
