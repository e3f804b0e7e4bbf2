"""DSRL on a toy task: a flow learns from demonstrations that go to either of two places, and reward wants one of them.

A point has 12 steps to be within 0.2 of the goal; every other demonstration goes to the opposite. The greedy flow
is not asked: what counts is the flow that draws its noise, and the noise that was learned.

    python -m benchmarks.embodied.bench_dsrl [--aliases] [SEED]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.embodied.config import EmbodiedModelConfig, EmbodiedOptimConfig
from recipes.embodied.envs.env_spec import EnvSpec, learned_spec
from recipes.embodied.models.critics import Critics
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.off_policy.algorithm import CRITIC, TransitionTensors
from recipes.embodied.off_policy.buffer import ReplayBuffer
from recipes.embodied.off_policy.dsrl import NOISE_CRITIC, Dsrl, DsrlOptions, DsrlSettings
from recipes.embodied.off_policy.sources import transition_spec
from recipes.embodied.off_policy.storage import Transitions
from recipes.sections.actor import FsdpConfig
from recipes.training.updater import Figures
from recipes.training.weights.training_state import TrainingState

SPEC, CHUNK, CHUNKS, ENVS, SPEED = EnvSpec(4, 2), 4, 3, 32, 0.15


def starts(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Return states [n, 4]: the point near the middle, and a goal at distance 1."""
    angle = random.uniform(0, 2 * np.pi, count)
    goal = np.stack((np.cos(angle), np.sin(angle)), axis=1)
    return np.concatenate((random.normal(0, 0.05, (count, 2)), goal), axis=1).astype(np.float32)


def moved(states: NDArray[np.float32], chunk: NDArray[Any]) -> NDArray[np.float32]:
    """Return the states after a chunk [n, C, 2]."""
    after = states.copy()
    after[:, :2] += SPEED * np.clip(chunk, -1, 1).sum(axis=1)
    return after


def solved(states: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which points are at their goal, bool [n]."""
    return np.linalg.norm(states[:, :2] - states[:, 2:], axis=1) < 0.2


def demonstrated(random: np.random.Generator, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return observations [n, 4] and chunks [n, C, 2] of an expert that chooses its side once an episode."""
    side = random.choice((-1.0, 1.0), (count, 1))
    states, seen, chunks = starts(random, count), [], []
    for _ in range(CHUNKS):
        action = np.clip((side * states[:, 2:] - states[:, :2]) / (CHUNK * SPEED), -0.7, 0.7)
        chunk = np.repeat(action[:, None], CHUNK, axis=1) + random.normal(0, 0.05, (count, CHUNK, 2))
        seen.append(states)
        chunks.append(chunk)
        states = moved(states, chunk)
    return np.concatenate(seen), np.concatenate(chunks).astype(np.float32)


def flow(folder: Path, random: np.random.Generator) -> None:
    """Train a flow by demonstrations, and save it."""
    config = EmbodiedModelConfig(model_type="flow_policy", hidden_dim=32, num_action_chunks=CHUNK, add_value_head=False)
    policy = make_model(config, SPEC)
    states, chunks = demonstrated(random, 400)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for _ in range(800):
        rows = random.integers(0, len(states), 128)
        inputs = policy.prepare({"states": states[rows]})
        loss = policy.imitation_loss(inputs, policy.from_env(chunks[rows]), torch.ones(128, CHUNK, dtype=torch.bool))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_policy(policy, config, SPEC, folder)


def success(policy: Any, random: np.random.Generator, how: Any, count: int = 256) -> float:
    """Return the share of episodes that end at the goal."""
    states = starts(random, count)
    for _ in range(CHUNKS):
        states = moved(states, policy.to_env(how(policy.prepare({"states": states})).actions))
    return float(solved(states).mean())


def main() -> None:
    """Print success by steps of the environment."""
    aliases, seed = "--aliases" in sys.argv, int(sys.argv[-1]) if sys.argv[-1].isdigit() else 0
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    folder = Path(tempfile.mkdtemp()) / "flow"
    flow(folder, random)
    section = EmbodiedModelConfig(
        model_type="steered_policy", model_path=str(folder), num_action_chunks=CHUNK, hidden_dim=64
    )
    policy: Any = make_model(section, SPEC)
    executed = CHUNK * SPEC.action_size
    sizes = [executed, policy.action_size] if aliases else [policy.action_size]
    part = slice(policy.action_size, None) if aliases else slice(policy.action_size)
    optim = EmbodiedOptimConfig(lr=1e-3, adam_eps=1e-8)
    modules = {"actor": policy} | {
        name: Critics(learned_spec(SPEC, size), 2, 64).eval()
        for name, size in zip((CRITIC, NOISE_CRITIC), sizes, strict=False)
    }
    states = {
        name: TrainingState(
            module, optim, FsdpConfig(), rank=0, world_size=1, device=torch.device("cpu"), component=name
        )
        for name, module in modules.items()
    }
    settings = DsrlSettings(options=DsrlOptions(temperature=0.05, target_entropy=0.0, noise_aliasing=aliases))
    learner = Dsrl(settings, states.pop("actor"), states, lr=1e-3)
    buffer = ReplayBuffer(transition_spec(learned_spec(SPEC, sizes[0])), ENVS, 20_000)
    figures = Figures(), Figures()
    held = np.random.default_rng(1000 + seed)
    print(f"frozen, drawing its noise: {success(policy, held, policy.random):.3f}", flush=True)
    steps = 0
    for episode in range(31):
        begun = starts(random, ENVS)
        for number in range(CHUNKS):
            act = policy.random if episode < 6 else policy.act
            output = act(policy.prepare({"states": begun})).actions
            after = moved(begun, policy.to_env(output))
            over = np.full(ENVS, number == CHUNKS - 1)
            rewards = (over & solved(after)).astype(np.float32)
            action = output[:, 0, part].numpy()
            before, following = {"states": begun}, {"states": after}
            buffer.add(Transitions(before, action, rewards, over, ~over & False, following), np.arange(ENVS))
            begun, steps = after, steps + ENVS * CHUNK
        if episode >= 5:
            for _ in range(60):
                batch = buffer.gather(buffer.sample(128, random), 1, 0.97)
                learner.update(TransitionTensors.of(batch, learner.prepare, torch.device("cpu")), episode, *figures)
        if episode % 5 == 0 and episode > 5:
            share = success(policy, held, lambda inputs: policy.act(inputs, greedy=True))
            print(f"{steps} steps: {share:.3f}; {time.process_time():.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
