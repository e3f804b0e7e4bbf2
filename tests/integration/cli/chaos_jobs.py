"""Jobs that `make chaos` disturbs in tests: shipped recipes, so small that a step takes milliseconds."""

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
# Rollouts run ahead of training.
AHEAD: Final = (*EMBODIED, "runner.max_staleness=1")
# SAC on a simulated Franka arm with contacts.
ARM: Final = (
    *("laptop", "env.train.env_type=franka_mujoco", "env.train.task=reach", "env.train.total_num_envs=2"),
    *("env.train.max_episode_steps=15", "env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40"),
    *("actor.model.model_type=squashed_policy", "actor.model.hidden_dim=16", "algorithm.loss_type=sac"),
    *(
        "algorithm.learning_starts=40",
        "algorithm.random_steps=20",
        "algorithm.update_to_data=0.5",
        "algorithm.n_steps=3",
    ),
    *("algorithm.replay.capacity=400", "runner.max_steps=100", "runner.save_interval=10"),
    "runner.val_check_interval=-1",
)
AGENT: Final = (
    *("agent_calculator", "actor.warm_start.steps=5", "actor.model.hidden_dim=32", "actor.model.num_layers=1"),
    *("data.rollout_batch_size=6", "data.val_size=20", "algorithm.group_size=4", "runner.max_steps=40"),
    *("runner.save_interval=5", "runner.val_check_interval=-1", "runner.save_format=dcp"),
)
SFT: Final = (
    *("sft_chat_laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.global_batch_size=8"),
    *("data.train_size=1600", "runner.max_steps=200", "runner.save_interval=10", "runner.val_check_interval=-1"),
)
JOBS: Final = {
    "embodied": EMBODIED,
    "ahead": AHEAD,
    "arm": ARM,
    "math": MATH,
    "async": ASYNC,
    "agent": AGENT,
    "sft": SFT,
}
