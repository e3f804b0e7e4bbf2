"""Jobs that `rlinf chaos` disturbs in tests: shipped recipes, so small that a step takes milliseconds."""

from __future__ import annotations

from typing import Final

EMBODIED: Final = (
    *("laptop", "env.train.task=reach", "env.train.total_num_envs=8", "env.train.max_episode_steps=25"),
    *("env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40", "actor.model.hidden_dim=16"),
    *("algorithm.update_epoch=2", "runner.max_steps=300", "runner.save_interval=10", "runner.val_check_interval=-1"),
)
MATH: Final = (
    *("math_laptop", "actor.warm_start.steps=5", "actor.model.hidden_dim=32", "actor.model.num_layers=1"),
    *("data.rollout_batch_size=6", "data.val_size=20", "algorithm.group_size=4", "runner.max_steps=60"),
    *("runner.save_interval=5", "runner.val_check_interval=-1", "runner.save_format=dcp"),
)
ASYNC: Final = (*MATH, "runner.max_staleness=2")
JOBS: Final = {"embodied": EMBODIED, "math": MATH, "async": ASYNC}
