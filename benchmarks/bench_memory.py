"""The forecast of memory beside what processes held: small configurations, peaks of the resident set in every phase.

    python -m benchmarks memory [FIRST LAST]

Each configuration runs two training steps in a process of its own; `memory.json` of its run has the peaks. A ratio is
the forecast divided by the peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlinf_core.job.load import load_job

SHORT = ("runner.max_steps=2", "runner.val_check_interval=-1", "runner.save_interval=-1")
VISION = ("env.train.env_type=franka_vision", "env.train.task=touch")
VLM = (
    *VISION,
    "env.train.total_num_envs=32",
    "actor.global_batch_size=200",
    "actor.model={model_type: vlm_policy, hidden_dim: 64, options: {action_bins: 16, max_prompt_tokens: 4}}",
)
# Name -> overrides of the shipped `laptop`.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "mlp 128": (),
    "mlp 2048": ("actor.model.hidden_dim=2048",),
    "mlp 4096": ("actor.model.hidden_dim=4096",),
    "mlp 2048, 512 envs": ("actor.model.hidden_dim=2048", "env.train.total_num_envs=512"),
    "mlp 1024, chunks of 5": ("actor.model.hidden_dim=1024", "actor.model.num_action_chunks=5"),
    "mlp, 4096 envs": ("env.train.total_num_envs=4096",),
    "flow": ("actor.model.model_type=flow_policy",),
    "flow 1024, 256 envs": (
        "actor.model.model_type=flow_policy",
        "actor.model.hidden_dim=1024",
        "env.train.total_num_envs=256",
    ),
    "cnn, 64 px": (*VISION, "env.train.options={image_size: 64}", "actor.model.model_type=cnn_policy"),
    "cnn, 64 px, micro 64": (
        *VISION,
        "env.train.options={image_size: 64}",
        "actor.model.model_type=cnn_policy",
        "actor.micro_batch_size=64",
        "actor.global_batch_size=640",
    ),
    "cnn, 128 px, 16 envs": (
        *VISION,
        "env.train.options={image_size: 128}",
        "env.train.total_num_envs=16",
        "actor.model.model_type=cnn_policy",
        "actor.micro_batch_size=40",
        "actor.global_batch_size=200",
    ),
    "reach, two ranks of env": ("env.train.task=reach", "actor.model.hidden_dim=1024"),
    "vlm": VLM,
    "vlm, adapters": (*VLM, "actor.model.is_lora=true"),
    "vlm, micro 40": (*VLM, "actor.micro_batch_size=40"),
    "vlm, 48 px, 128 wide": (*VLM, "env.train.options={image_size: 48}", "actor.model.hidden_dim=128"),
}


def main(first: int = 0, last: int = len(CONFIGURATIONS)) -> None:
    """Print a line for each configuration and phase, and the worst ratio."""
    from recipes.embodied.memory import forecast

    worst = 1.0
    for name, overrides in list(CONFIGURATIONS.items())[first:last]:
        job = load_job("laptop", overrides)
        job.raise_if_bad()
        expected: Any = {each.component: each for each in forecast(job.config, {})}  # pyright: ignore[reportArgumentType]
        peaks = measured(overrides)
        for component, phase in [(name, phase) for name, each in expected.items() for phase in each.phases]:
            peak = peaks[component][phase.phase]["rss"]
            ratio = phase.total / peak
            worst = max(worst, ratio, 1 / ratio)
            parts = {part: round(size / 2**20, 1) for part, size in phase.parts.items()}
            sizes = f"{phase.total / 2**20:7.0f} {peak / 2**20:7.0f} MiB  {ratio:.3f}"
            print(f"{name:24} {component:8} {phase.phase:31} {sizes}  {parts}", flush=True)
    print(f"worst ratio: {worst:.3f}")


def measured(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the peaks of a short run, by component and phase."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("rlinf")), "train", "laptop", *SHORT, *overrides]
        environment = {**os.environ, "RLINF_ADDRESS": "local"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        (file,) = Path(folder).glob("runs/*/memory.json")
        return {each["component"]: each["phases"] for each in json.loads(file.read_text())["processes"]}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
