"""The forecast of memory beside what processes held: small configurations, peaks of the resident set in every phase.

    python benchmarks/bench_memory.py [--only NAME ...]

Each configuration runs two training steps in processes of its own; `memory.json` of its run has the peaks. A ratio is
the forecast divided by the peak. One that is further than 15 % of the peak away has a line of its own, with what the
forecast counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from recipes.training.memory.process_forecast import ProcessForecast
from rlinf_core.job.load import load_job

SHORT = ("runner.max_steps=2", "runner.val_check_interval=-1", "runner.save_interval=-1")
NEAR: Final = 0.15
GOAL_CONFIGURATIONS: Final = 12
HEADER: Final = f"{'configuration':22} {'process':8} {'phases':>6} {'forecast / peak':>15}  largest forecast and peak"
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
    "reach, mlp 1024": ("env.train.task=reach", "actor.model.hidden_dim=1024"),
    "vlm": VLM,
    "vlm, adapters": (*VLM, "actor.model.is_lora=true"),
    "vlm, micro 40": (*VLM, "actor.micro_batch_size=40"),
    "vlm, 48 px, 128 wide": (*VLM, "env.train.options={image_size: 48}", "actor.model.hidden_dim=128"),
}


def main(names: Sequence[str] = tuple(CONFIGURATIONS)) -> int:
    """Print a line for each process of the named configurations, and a summary; return the exit status."""
    from recipes.embodied.memory.job_forecast import forecast

    ratios: dict[str, list[float]] = {}
    print(HEADER)
    for name in names:
        overrides = CONFIGURATIONS[name]
        job = load_job("laptop", overrides)
        job.raise_if_bad()
        peaks = measured("laptop", overrides)
        ratios[name] = []
        for process in forecast(job.config, {}):  # pyright: ignore[reportArgumentType]
            ratios[name] += compared(
                name, process, {phase: held["rss"] for phase, held in peaks[process.component].items()}
            )
    return summary(ratios)


def compared(name: str, process: ProcessForecast, peaks: Mapping[str, int]) -> list[float]:
    """Print the phases of a process beside their peaks in bytes, those that missed one by one; return their ratios."""
    ratios = [phase.total / peaks[phase.phase] for phase in process.phases]
    most = max(phase.total for phase in process.phases)
    highest = max(peaks[phase.phase] for phase in process.phases)
    span = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(
        f"{name:22} {process.component:8} {len(ratios):6} {span:>15}  {_mib(most)} and {_mib(highest)} MiB", flush=True
    )
    for phase, ratio in zip(process.phases, ratios, strict=True):
        if not _is_near(ratio):
            parts = ", ".join(f"{part} {_mib(size)}" for part, size in phase.parts.items() if size > 2**20)
            print(f"  MISSED {phase.phase}: {ratio:.3f}, peak {_mib(peaks[phase.phase])} MiB; {parts}", flush=True)
    return ratios


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def summary(ratios: Mapping[str, Sequence[float]], goal: int = GOAL_CONFIGURATIONS) -> int:
    """Print how many phases are near their peaks, and of how many configurations all, at least `goal`; return the exit
    status.
    """
    every = [ratio for row in ratios.values() for ratio in row]
    near = sum(map(_is_near, every))
    whole = sum(all(map(_is_near, row)) for row in ratios.values())
    wanted = min(goal, len(ratios))
    print(f"{near} of {len(every)} phases within {NEAR:.0%} of the peak, ratios {min(every):.3f} to {max(every):.3f}")
    print(f"all phases of {whole} of {len(ratios)} configurations (goal {wanted}); load {os.getloadavg()[0]:.1f}")
    return 0 if whole >= wanted else 1


def _is_near(ratio: float) -> bool:
    return abs(ratio - 1) <= NEAR


def measured(config: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the peaks of a short run of a file with overrides, by component and phase."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("rlinf")), "train", config, *SHORT, *overrides]
        environment = {**os.environ, "RLINF_ADDRESS": "local"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        (file,) = Path(folder).glob("runs/*/memory.json")
        return {process["component"]: process["phases"] for process in json.loads(file.read_text())["processes"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), help="these alone"
    )
    sys.exit(main(parser.parse_args().only))
