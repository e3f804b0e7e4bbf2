"""HIL-SERL on gym-hil by lerobot, for bench_hil_serl.py; it runs in lerobot's own interpreter, without rlinf.

    python hil_serl_baseline.py DEMONSTRATIONS.npz SEED STEPS [--defaults]

lerobot's actor and learner processes take pictures alone (`make_robot_env` asks for them), so their classes are driven
here: `GaussianActorPolicy`, `SACAlgorithm` through `RLTrainer`, two `ReplayBuffer` and the `OnlineOfflineMixer` of its
learner. As with its actor, steps and new weights are exchanged at the end of an episode; the learner takes one
training step for each step of the environment. Prints one line of JSON for each episode, and ends with the goal.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import gym_hil  # noqa: F401 - registers its tasks
import gymnasium
import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.gaussian_actor.configuration_gaussian_actor import GaussianActorConfig
from lerobot.policies.gaussian_actor.modeling_gaussian_actor import GaussianActorPolicy
from lerobot.rl.algorithms.sac import SACAlgorithm, SACAlgorithmConfig
from lerobot.rl.buffer import ReplayBuffer
from lerobot.rl.data_sources.data_mixer import OnlineOfflineMixer
from lerobot.rl.trainer import RLTrainer
from numpy.typing import NDArray
from torch import Tensor

STATES, BLOCK, ACTION = "observation.state", "observation.environment_state", "action"
ARM = 18
BATCH = 256
# A run ends with this share of successes among so many of the last episodes.
GOAL, EPISODES = 0.9, 50
LARGEST_SEED = 2**31


def observation(states: NDArray[Any]) -> dict[str, Tensor]:
    """Return states [21] of the arm and the block as lerobot's actor has them, one row each."""
    row = torch.as_tensor(states, dtype=torch.float32)[None]
    return {STATES: row[:, :ARM], BLOCK: row[:, ARM:]}


def joined(observed: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the states of the arm and the block [21]."""
    return np.concatenate((observed["agent_pos"], observed["environment_state"]))


def bounds(values: NDArray[Any]) -> dict[str, list[float]]:
    """Return the smallest and largest values of each column, a column that does not vary spread by 1 to either side."""
    low, high = values.min(axis=0), values.max(axis=0)
    still = high - low < 1e-3
    return {"min": (low - still).tolist(), "max": (high + still).tolist()}


@dataclass
class Demonstrations:
    """Recorded steps, one row each: states before and after, actions [-1, 1], rewards, ends."""

    states: NDArray[Any]
    next_states: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[Any]
    dones: NDArray[Any]


def build(recorded: Demonstrations, *, defaults: bool) -> tuple[GaussianActorPolicy, SACAlgorithm, Any, Any]:
    """Return the policy, the algorithm and the two processors; `defaults` keeps all of lerobot's own settings."""
    config = GaussianActorConfig(
        device="cpu",
        storage_device="cpu",
        num_discrete_actions=3,
        input_features={
            STATES: PolicyFeature(type=FeatureType.STATE, shape=(ARM,)),
            BLOCK: PolicyFeature(type=FeatureType.ENV, shape=(3,)),
        },
        output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(3,))},
        dataset_stats={
            STATES: bounds(recorded.states[:, :ARM]),
            BLOCK: bounds(recorded.states[:, ARM:]),
            ACTION: {"min": [-1.0] * 3, "max": [1.0] * 3},
        },
    )
    policy = GaussianActorPolicy(config)
    settings = SACAlgorithmConfig.from_policy_config(config)
    if not defaults:
        settings.discount, settings.temperature_init, settings.utd_ratio = 0.97, 0.01, 2
    before, after = make_pre_post_processors(policy_cfg=config, dataset_stats=config.dataset_stats)
    return policy, SACAlgorithm(policy, settings), before, after


def buffer(capacity: int) -> ReplayBuffer:
    """Return an empty buffer with lerobot's own settings."""
    return ReplayBuffer(capacity, device="cpu", state_keys=[STATES, BLOCK], storage_device="cpu", optimize_memory=True)


def transition(
    states: NDArray[Any], action: Tensor, reward: float, following: NDArray[Any], done: bool, penalty: float
) -> dict[str, Any]:
    """Return one step as `ReplayBuffer.add` takes it, and as lerobot's actor sends it."""
    return {
        "state": observation(states),
        "action": action,
        "reward": reward,
        "next_state": observation(following),
        "done": done,
        "truncated": False,
        "complementary_info": {"discrete_penalty": torch.tensor([penalty]), "is_intervention": False},
    }


def main() -> None:
    path, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    starts = np.random.default_rng(seed)
    recorded = Demonstrations(**np.load(path))
    policy, algorithm, before, after = build(recorded, defaults="--defaults" in sys.argv)
    offline, online = buffer(100_000), buffer(100_000)
    for states, following, action, reward, done in zip(
        recorded.states, recorded.next_states, recorded.actions, recorded.rewards, recorded.dones, strict=True
    ):
        # The gripper's action is a number of one of three: open, stay, close.
        executed = torch.as_tensor(action, dtype=torch.float32)[None] + torch.tensor([[0.0, 0.0, 0.0, 1.0]])
        offline.add(**transition(states, executed, float(reward), following, bool(done), 0.0))
    mixer = OnlineOfflineMixer(online, offline, online_ratio=0.5)
    trainer = RLTrainer(algorithm, mixer, BATCH, preprocessor=before)
    # Acts with the weights of the last exchange.
    acting = GaussianActorPolicy(policy.config).eval()
    environment = gymnasium.make("gym_hil/PandaPickCube-v0", reset_delay_seconds=0.0, random_block_position=True)
    begun = time.process_time()
    taken, successes = 0, deque[bool]([False] * EPISODES, EPISODES)
    while taken < steps and sum(successes) < GOAL * EPISODES:
        acting.load_state_dict(policy.state_dict())
        # gym-hil draws its starts by numpy's global generator.
        np.random.seed(starts.integers(LARGEST_SEED))
        states = joined(environment.reset()[0])
        ended, made, information = False, [], {}
        while not ended:
            action = acting.select_action(before.process_observation(observation(states)))
            continuous = after.process_action(action[:, :-1])
            executed = torch.cat((continuous, action[:, -1:].to(continuous.dtype)), dim=1)
            observed, reward, terminated, truncated, information = environment.step(executed[0].numpy())
            following = joined(observed)
            penalty = float(information["discrete_penalty"])
            made.append(transition(states, executed, float(reward), following, bool(terminated), penalty))
            states, ended = following, terminated or truncated
        for row in made:
            online.add(**row)
        taken += len(made)
        if len(online) >= policy.config.online_step_before_learning:
            for _ in made:
                trainer.training_step()
        successes.append(bool(information["succeed"]))
        row = {
            "steps": taken,
            "success": successes[-1],
            "cpu_seconds": round(time.process_time() - begun, 1),
            "temperature": algorithm.temperature,
            "reached": sum(successes) >= GOAL * EPISODES,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
