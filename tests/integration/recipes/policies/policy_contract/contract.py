"""A program that holds policies here against what `record.py` has recorded of their originals.

python contract.py FOLDER NAME...

It prints a JSON object: the verdicts on each policy, by column.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from original import CHUNK, N, demonstrated, first_seen, seen_in, spec_of
from safetensors.torch import load_file
from torch import Tensor

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models import flow_policy
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model

EQUAL, CLOSE = 1e-4, 1e-5


def verdicts(about: dict[str, Any], arrays: dict[str, Any], saved: Path) -> dict[str, str]:
    """Return how a policy here compares with its original."""
    height, width, _ = about["camera"]
    spec = spec_of(height, width, instructions=about["instructions"])
    config = policy_model(about["model"])
    torch.manual_seed(0)
    policy: Any = make_model(config, spec)
    acted = chunk_of(policy, spec)
    picture = first_seen(policy, lambda: chunk_of(policy, spec), policy.observed_steps)
    columns = {
        "names": _names(policy, Path(about["model"]["model_path"]), about["unread"]),
        "picture": _within(np.abs(picture - arrays["picture"]).max(), CLOSE),
        "chunk": _within(np.abs(acted - arrays["chunk"]).max(), EQUAL),
    }
    save_policy(policy, config, spec, saved)
    again: Any = make_model(config.model_copy(update={"model_path": str(saved)}), spec)
    columns["reload"] = _within(np.abs(chunk_of(again, spec) - acted).max(), 0.0)
    columns["repeat"] = _within(np.abs(chunk_of(policy, spec) - acted).max(), 0.0)
    # Last, since a loss moves the running statistics of batch norms.
    loss = _loss(policy, spec, arrays)
    columns["loss"] = _within(abs(loss - about["loss"]), CLOSE * max(1.0, abs(about["loss"])))
    return columns


def chunk_of(policy: Any, spec: EnvSpec) -> Any:
    return policy.to_env(policy.act(policy.prepare(_seen(policy, spec)), greedy=True).actions)


def _seen(policy: Any, spec: EnvSpec) -> dict[str, Any]:
    return seen_in(spec, observed_steps=policy.observed_steps)


def _within(difference: Any, bound: float) -> str:
    return "equal" if float(difference) <= bound else f"differs by {float(difference):.2g}"


def _names(policy: Any, folder: Path, unread: list[str]) -> str:
    """Return whether every number of every weight in the folder is among the policy's."""
    mine = np.unique(np.concatenate([weight.detach().flatten().numpy() for weight in policy.state_dict().values()]))
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.startswith("policy_"):
            continue
        for name, weight in load_file(file).items():
            if not any(part in name for part in unread) and not np.isin(weight.flatten().numpy(), mine).all():
                return f"does not use {name}"
    return "all"


def _loss(policy: Any, spec: EnvSpec, arrays: dict[str, Any]) -> float:
    horizon = policy.horizon or CHUNK
    if "noise" in arrays:
        noise, share = (torch.from_numpy(arrays[name]) for name in ("noise", "share"))

        def losses(velocity: Any, samples: Tensor, time: Tensor) -> Tensor:
            """With the noise of the original."""
            at = time[:, None, None]
            return (velocity((1 - at) * noise + at * samples, time) - (samples - noise)).square()

        flow_policy.flow_matching_losses = losses  # pyright: ignore[reportPrivateLocalImportUsage]
        policy.times = lambda _: 1 - share
    torch.manual_seed(3)
    valid = torch.ones(N, horizon, dtype=torch.bool)
    taken = policy.from_env(demonstrated(horizon))
    return float(policy.imitation_loss(policy.prepare(_seen(policy, spec)), taken, valid).detach())


if __name__ == "__main__":
    home = Path(sys.argv[1])
    rows: dict[str, dict[str, str]] = {}
    for name in sys.argv[2:]:
        with np.load(home / f"{name}.npz") as file:
            arrays = dict(file)
        rows[name] = verdicts(json.loads((home / f"{name}.json").read_text()), arrays, home / f"saved_{name}")
    print(json.dumps(rows))
