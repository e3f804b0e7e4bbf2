"""CartPole by Stable-Baselines3 or RLlib, for bench_cartpole.py; it needs neither rlinf nor its interpreter.

    python benchmarks/baselines/cartpole_baselines.py sb3|rllib SEED TARGET MAX_STEPS

Prints one JSON object: `cpu_seconds` of this process and all it started, from the first training step on, without
imports and start-up; `env_steps`; `reached`, whether the mean return of the last 100 training episodes came to TARGET.
Hyperparameters: RL Baselines3 Zoo's for PPO on CartPole-v1, and RLlib's own tuned example. One torch thread each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TASK = "CartPole-v1"


def tree_cpu_seconds(root: int | None = None) -> float:
    """CPU seconds of a process (this one by default), its living descendants and the dead that were waited for."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents[int(entry.name)] = int(fields[1])
        seconds[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {root or os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(seconds.get(pid, 0.0) for pid in family)


def stable_baselines3(seed: int, target: float, max_steps: int) -> dict[str, Any]:
    import numpy as np
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Until(BaseCallback):
        def _on_step(self) -> bool:
            episodes = self.model.ep_info_buffer or ()
            self.mean = float(np.mean([episode["r"] for episode in episodes])) if len(episodes) == 100 else 0.0
            return self.mean < target

    model = PPO(
        "MlpPolicy",
        make_vec_env(TASK, n_envs=8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=seed,
        device="cpu",
    )
    until = Until()
    begun = tree_cpu_seconds()
    model.learn(max_steps, callback=until)
    return {
        "cpu_seconds": tree_cpu_seconds() - begun,
        "env_steps": model.num_timesteps,
        "reached": until.mean >= target,
    }


def rllib(seed: int, target: float, max_steps: int) -> dict[str, Any]:
    import logging

    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = (
        PPOConfig()
        .environment(TASK)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True))
        .debugging(seed=seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    begun, steps, mean = tree_cpu_seconds(), 0, 0.0
    while mean < target and steps < max_steps:
        runners = algorithm.train()["env_runners"]
        steps, mean = int(runners["num_env_steps_sampled_lifetime"]), float(runners["episode_return_mean"])
    outcome = {"cpu_seconds": tree_cpu_seconds() - begun, "env_steps": steps, "reached": mean >= target}
    algorithm.stop()
    ray.shutdown()
    return outcome


def main() -> int:
    name, seed, target, max_steps = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    import torch

    torch.set_num_threads(1)
    run = {"sb3": stable_baselines3, "rllib": rllib}[name]
    print(json.dumps(run(seed, target, max_steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
