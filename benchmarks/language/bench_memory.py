"""The forecast of the host's memory beside the peaks of processes, in short runs of small configurations.

    python benchmarks/language/bench_memory.py [--only NAME ...]

Each configuration runs two training steps. A ratio is the forecast divided by the largest peak of the component's
processes. Where answers have a number of tokens none ends before, and a bonus for entropy lets all of them be learned
from: a forecast is of answers as long as they may be. `smollm2` needs the folder that SMOLLM2 names
(configs/math/smollm2-laptop.yaml).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

SHORT: Final = ("runner.max_steps=2", "runner.val_check_interval=-1", "runner.save_interval=-1")
NEAR: Final = 0.25
VISION: Final = ("embodied/pick-laptop", "env.train.env_type=franka_vision", "env.train.task=touch")
CNN: Final = (*VISION, "actor.model.model_type=cnn_policy")
VLM: Final = (
    *VISION,
    "env.train.total_num_envs=32",
    "actor.global_batch_size=200",
    "actor.model={model_type: openvla, hidden_dim: 64, options: {prompt: '{instruction}', max_prompt_tokens: 4}}",
)
FLOW: Final = ("embodied/pick-laptop", "actor.model.model_type=flow_policy")
WIDE: Final = ("actor.model={hidden_dim: 1024, num_layers: 3}", "actor.warm_start.steps=2")
ALL_LEARNED: Final = "algorithm.entropy_bonus=0.001"
REFERENCE: Final = "cluster.component_placement.reference={node_group: node, placement: 0}"


def _answers(tokens: int, prompts: int) -> tuple[str, ...]:
    """Return overrides by which every answer is of that many tokens, and a step has that many prompts."""
    return (
        f"runner.seq_length={tokens + 24}",
        f"rollout.sampling_params={{max_new_tokens: {tokens}, min_new_tokens: {tokens}}}",
        f"data.rollout_batch_size={prompts}",
        ALL_LEARNED,
    )


# A shipped file, and overrides.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "mlp 128": ("embodied/pick-laptop",),
    "mlp 2048": ("embodied/pick-laptop", "actor.model.hidden_dim=2048"),
    "mlp 4096": ("embodied/pick-laptop", "actor.model.hidden_dim=4096"),
    "mlp 2048, 512 envs": ("embodied/pick-laptop", "actor.model.hidden_dim=2048", "env.train.total_num_envs=512"),
    "mlp, 4096 envs": ("embodied/pick-laptop", "env.train.total_num_envs=4096"),
    "flow": FLOW,
    "flow 1024, 256 envs": (*FLOW, "actor.model.hidden_dim=1024", "env.train.total_num_envs=256"),
    "cnn, 64 px": (*CNN, "env.train.options={image_size: 64}"),
    "cnn, 64 px, micro 64": (
        *CNN,
        "env.train.options={image_size: 64}",
        "actor.micro_batch_size=64",
        "actor.global_batch_size=640",
    ),
    "vlm": VLM,
    "vlm, adapters": (*VLM, "actor.model.lora={rank: 32, alpha: 64}"),
    "vlm, micro 40": (*VLM, "actor.micro_batch_size=40"),
    "vlm, 48 px, 128 wide": (*VLM, "env.train.options={image_size: 48}", "actor.model.hidden_dim=128"),
    "math": ("math/sums-laptop",),
    "math, ppo": ("math/sums-ppo-laptop",),
    "math, answers of 128": ("math/sums-laptop", "actor.model.hidden_dim=256", *_answers(128, 8)),
    "math, 1024 wide": ("math/sums-laptop", *WIDE, *_answers(32, 4)),
    "math, 1024 wide, ppo": ("math/sums-ppo-laptop", *WIDE, *_answers(32, 4)),
    "math, adapters": ("math/sums-laptop", *WIDE, *_answers(32, 4), "actor.model.lora={rank: 8, alpha: 16}"),
    "math, reference": ("math/sums-laptop", *WIDE, *_answers(32, 4), "algorithm.kl_beta=0.01", REFERENCE),
    "agents": ("agent/calculator-laptop", "actor.warm_start.steps=50"),
    "agents, 1024 wide": ("agent/calculator-laptop", *WIDE, "data.rollout_batch_size=8", ALL_LEARNED),
    "smollm2": ("math/smollm2-laptop", "rollout.sampling_params.min_new_tokens=6", ALL_LEARNED),
}


def main(names: Sequence[str] = tuple(CONFIGURATIONS)) -> int:
    """Print a line for each component of the named configurations, and a summary; return the exit status."""
    ratios: list[float] = []
    print(f"{'configuration':22} {'component':9} {'ratio':>5}  forecast and peak")
    for name in names:
        if name == "smollm2" and "SMOLLM2" not in os.environ:
            print(f"{name:22} left out: SMOLLM2 names no folder", flush=True)
            continue
        for component, sizes in _compared(CONFIGURATIONS[name]).items():
            forecast, peak = sizes["host"], sizes["host_measured"]
            ratios.append(forecast / peak)
            print(f"{name:22} {component:9} {ratios[-1]:5.2f}  {forecast >> 20} and {peak >> 20} MiB", flush=True)
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    print(f"{near} of {len(ratios)} within {NEAR:.0%} of the peak, ratios {min(ratios):.2f} to {max(ratios):.2f}")
    return 0 if near == len(ratios) else 1


def _compared(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what `rlinf inspect memory` says of the components of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        _rlinf(folder, "train", *arguments, *SHORT)
        (run,) = Path(folder).glob("runs/*")
        return json.loads(_rlinf(folder, "inspect", "memory", str(run), "--json"))["components"]


def _rlinf(folder: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("rlinf")), *arguments]
    environment = {**os.environ, "RLINF_ADDRESS": "local"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), help="these alone"
    )
    sys.exit(main(parser.parse_args().only))
