"""One of two ranks whose moments are small, over gloo: `python -m tests.unit.recipes.training.small_moment_ranks RANK
FOLDER`.
"""

# torch has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.state.training_state import TrainingState

CASES = [(dtype, sharding) for dtype in ("bf16", "int8") for sharding in ("full_shard", "no_shard")]


def made(dtype: str, sharding: str, rank: int) -> TrainingState:
    """Return the state of a policy whose rows do not divide evenly."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 5))
    optim = OptimConfig.model_validate({"lr": 0.01, "state_dtype": dtype})
    fsdp = FsdpConfig.model_validate({"sharding_strategy": sharding})
    return TrainingState(policy, optim, fsdp, rank=rank, world_size=2, device=torch.device("cpu"))


def learn(state: TrainingState, step: int) -> None:
    """Take an optimizer step on what each rank has of its own."""
    inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(2 * step + state.strategy.rank))
    state.optimizer.zero_grad()
    state.strategy.module(inputs).pow(2).mean().backward()
    state.strategy.finish_gradients()
    state.optimizer.step()


def weights(state: TrainingState) -> dict[str, Tensor]:
    """Return the full weights, as this rank has them."""
    held: dict[str, Tensor] = state.policy.state_dict()
    return {name: state.strategy.full_tensor(value).clone() for name, value in held.items()}


def run(dtype: str, sharding: str, rank: int, folder: Path) -> dict[str, Any]:
    """Return weights after some steps, straight through and by a checkpoint."""
    straight, resumed = made(dtype, sharding, rank), made(dtype, sharding, rank)
    for step in range(3):
        learn(straight, step)
    straight.save(str(folder))
    resumed.load(str(folder))
    for state in (straight, resumed):
        learn(state, 3)
    return {"straight": weights(straight), "resumed": weights(resumed)}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {f"{case}": run(*case, rank, folder / "-".join(case)) for case in CASES}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
