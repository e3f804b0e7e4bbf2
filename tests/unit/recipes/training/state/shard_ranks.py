"""One of two ranks that save shards, over gloo: `python -m ....shard_ranks RANK FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.state.training_state import TrainingState


def made(rank: int, world_size: int) -> TrainingState:
    """Return the state of a policy that has a weight of fewer rows than ranks."""
    torch.manual_seed(rank)
    policy = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    device = torch.device("cpu")
    optim, fsdp = OptimConfig(lr=0.01), FsdpConfig(sharding_strategy="full_shard")
    return TrainingState(policy, optim, fsdp, rank=rank, world_size=world_size, device=device)


def learn(state: TrainingState) -> float:
    """Take an optimizer step, and return the loss before."""
    state.optimizer.zero_grad()
    loss = state.strategy.module(torch.arange(10.0).view(2, 5)).pow(2).mean()
    loss.backward()
    state.optimizer.step()
    return float(loss.detach())


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    state = made(rank, 2)
    for _ in range(3):
        learn(state)
    state.version = 3
    state.save(str(folder))
    again = made(5 + rank, 2)
    again.load(str(folder))
    losses = {"version": again.version, "straight": [learn(state) for _ in range(2)]}
    torch.save({**losses, "resumed": [learn(again) for _ in range(2)]}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
