"""SAC on Pendulum by Stable-Baselines3, for bench_sac.py; it needs neither rlinf nor its interpreter.

    python benchmarks/baselines/sac_baseline.py SEED UPDATES

Prints one JSON object: `cpu_seconds` from the first step of the environment on, without imports and start-up;
`updates`; `score`, the mean return of 20 greedy episodes. Hyperparameters are the defaults of Stable-Baselines3.
"""

from __future__ import annotations

import json
import sys

import torch
from cartpole_baselines import tree_cpu_seconds
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

TASK = "Pendulum-v1"
LEARNING_STARTS = 100


def main() -> int:
    seed, updates = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    model = SAC("MlpPolicy", make_vec_env(TASK, 1, seed=seed), learning_starts=LEARNING_STARTS, seed=seed, device="cpu")
    begun = tree_cpu_seconds()
    model.learn(LEARNING_STARTS + updates)
    seconds = tree_cpu_seconds() - begun
    score, _ = evaluate_policy(model, make_vec_env(TASK, 20, seed=seed + 1000), n_eval_episodes=20)
    print(json.dumps({"cpu_seconds": seconds, "updates": model._n_updates, "score": float(score)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
