"""A program for an interpreter with lerobot: published policies and what their own implementations make of pictures.

python record.py FOLDER NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from flow_models import pi, smolvla
from lerobot_small import small
from original import Original
from token_models import token_model

# By policy and layout, what saves the folder.
CASES: dict[str, Callable[[Path], Original]] = {
    "act": lambda folder: small("act", folder),
    "diffusion": lambda folder: small("diffusion", folder),
    "vqbet": lambda folder: small("vqbet", folder),
    "multi_task_dit": lambda folder: small("multi_task_dit", folder),
    "diffusion_2_obs": lambda folder: small("diffusion", folder, n_obs_steps=2),
    "vqbet_5_obs": lambda folder: small("vqbet", folder, n_obs_steps=5),
    "multi_task_dit_2_obs": lambda folder: small("multi_task_dit", folder, n_obs_steps=2),
    "xvla": lambda folder: small("xvla", folder),
    "pi0_lerobot": lambda folder: pi("pi0", folder),
    "pi0_openpi": lambda folder: pi("pi0", folder, layout="openpi"),
    "pi05_lerobot": lambda folder: pi("pi05", folder),
    "pi05_openpi": lambda folder: pi("pi05", folder, layout="openpi"),
    "smolvla": smolvla,
    "openvla": lambda folder: token_model("openvla", folder),
    "openvla_oft": lambda folder: token_model("openvla_oft", folder),
}

if __name__ == "__main__":
    home = Path(sys.argv[1])
    for name in sys.argv[2:]:
        CASES[name](home / name).record(home / name)
