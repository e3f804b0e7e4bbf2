"""One of two ranks that train a policy together, over gloo: `python -m ... RANK FOLDER`.

`CASES` are policies. `train` takes one optimizer step and returns what there is to compare.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.franka.franka_kin import FrankaVisionEnv
from recipes.embodied.workers.actor_base import PolicyActor
from recipes.training.weights.training_state import TrainingState
from rlinf_core import load_job

ROWS = 4
_SMALL: Mapping[str, Any] = {"num_layers": 3, "max_prompt_tokens": 6}
CASES: Mapping[str, Mapping[str, Any]] = {
    "openvla": {"model": {"model_type": "openvla", "hidden_dim": 32, "options": {**_SMALL, "max_prompt_tokens": 32}}},
    "pi0": {"model": {"model_type": "pi0", "hidden_dim": 64, "options": {**_SMALL, "steps": 2}}},
    "pi0, computed again": {
        "model": {"model_type": "pi0", "hidden_dim": 64, "options": {**_SMALL, "steps": 2}},
        "again": True,
    },
    "openvla_oft, computed again": {
        "model": {"model_type": "openvla_oft", "hidden_dim": 32, "options": {"num_layers": 2, "max_prompt_tokens": 32}},
        "again": True,
    },
    "mlp_policy": {"model": {"model_type": "mlp_policy", "hidden_dim": 32}},
}


def train(case: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the weights before and after a step, and the number of parts that are gathered one at a time."""
    job = load_job("embodied/pick-laptop", (), environ={})
    config = cast("EmbodiedConfig", job.config)
    model = policy_model({"num_action_chunks": 2, **case["model"]})
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"model": model})})
    env = FrankaVisionEnv(EnvSettings(num_envs=ROWS))
    device = torch.device("cpu")
    worker: Any = SimpleNamespace(_config=config, _rank=rank, _world_size=world_size, torch_device=device)
    policy, initial = PolicyActor._first_policy(worker, env.spec)  # pyright: ignore[reportPrivateUsage]
    if case.get("again"):
        policy.checkpoint_activations()
    state = TrainingState(
        policy,
        config.actor.optim,
        config.actor.fsdp_config,
        rank=rank,
        world_size=world_size,
        device=device,
        blocks=policy.blocks,
        methods=("imitation_loss",),
        initial=initial,
    )
    before = {name: value.clone() for name, value in state.whole_tensors()}
    inputs = policy.prepare(env.reset())
    generator = torch.Generator().manual_seed(2)
    actions = policy.from_env((torch.rand(ROWS, 2, env.spec.action_size, generator=generator) * 2 - 1).numpy())
    share = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    # What a flow draws is that of a row, on whatever rank.
    for start in range(share.start, share.stop):
        torch.manual_seed(start)
        row = slice(start, start + 1)
        mine = {name: value[row] for name, value in inputs.items()}
        valid = torch.ones(actions[row].shape[:2], dtype=torch.bool)
        loss = policy.imitation_loss(mine, actions[row], valid) / (share.stop - share.start)
        loss.backward()
    state.strategy.finish_gradients()
    norm = state.strategy.gradient_norm()
    state.optimizer.step()
    clone = {name: value.clone() for name, value in state.whole_tensors()}
    return {"before": before, "after": clone, "norm": float(norm), "blocks": len(policy.blocks)}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({name: train(case, rank, 2) for name, case in CASES.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
