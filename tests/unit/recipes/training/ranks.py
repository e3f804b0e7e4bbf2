"""One of two ranks that save and resume, over gloo: `python -m tests.unit.recipes.training.ranks RANK FOLDER`."""

# torch has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.weights.training_state import TrainingState
from tests.unit.recipes.two_processes import as_rank

# Moments of few bits, by how weights are divided.
CASES = [(dtype, sharding) for dtype in ("bf16", "int8") for sharding in ("full_shard", "no_shard")]


def state_of(
    policy: nn.Module, rank: int, world_size: int, dtype: str = "fp32", sharding: str = "full_shard"
) -> TrainingState:
    optim = OptimConfig.model_validate({"lr": 0.01, "state_dtype": dtype})
    fsdp = FsdpConfig.model_validate({"sharding_strategy": sharding})
    return TrainingState(policy, optim, fsdp, rank=rank, world_size=world_size, device=torch.device("cpu"))


def made(rank: int, world_size: int) -> TrainingState:
    """Return the state of a policy that has a weight of fewer rows than ranks."""
    torch.manual_seed(rank)
    return state_of(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)), rank, world_size)


def learn(state: TrainingState, inputs: Tensor | None = None) -> float:
    """Take an optimizer step, and return the loss before."""
    inputs = torch.arange(10.0).view(2, 5) if inputs is None else inputs
    state.optimizer.zero_grad()
    loss = state.strategy.module(inputs).pow(2).mean()
    loss.backward()
    state.strategy.finish_gradients()
    state.optimizer.step()
    return float(loss.detach())


def shards(rank: int, folder: Path) -> dict[str, Any]:
    """Return the losses of a rank that goes straight on, and of one that resumes."""
    state = made(rank, 2)
    for _ in range(3):
        learn(state)
    state.version = 3
    state.save(str(folder))
    again = made(5 + rank, 2)
    again.load(str(folder))
    straight, resumed = ([learn(one) for _ in range(2)] for one in (state, again))
    return {"version": again.version, "straight": straight, "resumed": resumed}


def small_moments(case: tuple[str, str], rank: int, folder: Path) -> list[dict[str, Tensor]]:
    """Return full weights after steps on what each rank has of its own, straight through and by a checkpoint."""
    states: list[TrainingState] = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(state_of(nn.Sequential(nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 5)), rank, 2, *case))
    inputs = [torch.randn(4, 300, generator=torch.Generator().manual_seed(2 * step + rank)) for step in range(4)]
    straight, resumed = states
    for step in range(3):
        learn(straight, inputs[step])
    straight.save(str(folder))
    resumed.load(str(folder))
    weights: list[dict[str, Tensor]] = []
    for state in states:
        learn(state, inputs[3])
        held: dict[str, Tensor] = state.policy.state_dict()
        weights.append({name: state.strategy.full_tensor(value).clone() for name, value in held.items()})
    return weights


def results(rank: int, folder: Path) -> dict[str, Any]:
    return {"shards": shards(rank, folder)} | {
        str(case): small_moments(case, rank, folder / "-".join(case)) for case in CASES
    }


if __name__ == "__main__":
    as_rank(results)
