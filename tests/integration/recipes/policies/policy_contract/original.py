"""A published policy and its original implementation, which records what the one here is held against."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.envs.env_spec import EnvSpec

Observation: TypeAlias = dict[str, Any]
N, STATES, ACTIONS, CHUNK = 3, 5, 4, 2


@dataclass
class Original:
    """A policy of somebody else, and what it makes of observations.

    Attributes:
        model: settings of `actor.model` that read its folder.
        spec: of the environment.
        network: a convolution sees the pictures first.
        horizon: actions that are demonstrated together, H.
        chunk: returns actions [N, C, A] as the environment takes them, of the observations of `seen_in`.
        loss: returns that of demonstrated actions [N, H, A], as the environment takes them.
        unread: weights in the folder that it never uses, by what their names contain.
        noise: of a flow model's loss, [N, H, M], with the share of it, [N]; None: it draws none.
        folder: that it was saved in, where it is another than the one that was asked for.
        observed_steps: observations in a row that it acts by.
    """

    model: dict[str, Any]
    spec: EnvSpec
    network: nn.Module
    horizon: int
    chunk: Callable[[], NDArray[Any]]
    loss: Callable[[NDArray[Any]], float]
    unread: tuple[str, ...] = ()
    noise: tuple[Tensor, Tensor] | None = None
    folder: Path | None = None
    observed_steps: int = 1

    def record(self, folder: Path) -> None:
        """Write what the policy makes of the observations beside its folder, for `contract.py`."""
        # Before the loss, which moves the running statistics of batch norms.
        arrays: dict[str, Any] = {
            "picture": first_seen(self.network, self.chunk, self.observed_steps),
            "chunk": self.chunk(),
        }
        about = {
            "model": {"num_action_chunks": CHUNK, **self.model, "model_path": str(self.folder or folder)},
            "camera": self.spec.cameras["main"],
            "instructions": self.spec.has_instructions,
            "unread": self.unread,
            "loss": self.loss(demonstrated(self.horizon)),
        }
        folder.with_suffix(".json").write_text(json.dumps(about))
        if self.noise is not None:
            arrays |= {"noise": self.noise[0].numpy(), "share": self.noise[1].numpy()}
        np.savez(folder.with_suffix(".npz"), **arrays)


def demonstrated(horizon: int) -> NDArray[np.float32]:
    """Return demonstrated actions [N, H, A]."""
    return np.random.default_rng(2).normal(-1, 2, (N, horizon, ACTIONS)).astype(np.float32)


def first_seen(network: nn.Module, act: Callable[[], Any], observed_steps: int) -> NDArray[Any]:
    """Return the N pictures that the first convolution which a network calls sees while it acts; of several in a row
    all that it sees for the last chunk."""
    seen: dict[nn.Module, list[Tensor]] = {}

    def look(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.setdefault(part, []).append(inputs[0].detach().float())

    handles = [part.register_forward_pre_hook(look) for part in network.modules() if isinstance(part, nn.Conv2d)]
    try:
        act()
    finally:
        for handle in handles:
            handle.remove()
    calls = next(iter(seen.values()))
    return (torch.cat(calls)[:N] if observed_steps == 1 else calls[-1]).numpy()


def spec_of(height: int, width: int, *, instructions: bool = True) -> EnvSpec:
    """Return an environment with one camera."""
    return EnvSpec(STATES, ACTIONS, cameras={"main": (height, width, 3)}, has_instructions=instructions)


def seen_in(spec: EnvSpec, step: int = 0, observed_steps: int = 1) -> Observation:
    """Return observations of an environment at a step, with those of the steps before as a policy here takes them."""
    random = np.random.default_rng(1 - step)
    seen: Observation = {
        "states": random.normal(0.5, 2, (N, STATES)).astype(np.float32),
        "images.main": random.integers(0, 256, (N, *spec.cameras["main"]), np.uint8),
    }
    if spec.has_instructions:
        seen["instructions"] = np.array(["pick up the red block", "push it", "open the drawer"])
    if observed_steps > 1:
        past = [seen_in(spec, step - before) for before in range(observed_steps - 1, 0, -1)]
        for name in ("states", "images.main"):
            seen[f"past.{name}"] = np.stack([row[name] for row in past], axis=1)
    return seen


def statistics() -> dict[str, dict[str, Tensor]]:
    """Return statistics as lerobot's data sets have them."""
    random = np.random.default_rng(0)
    stats: dict[str, dict[str, Tensor]] = {}
    for key, size, mean, deviation in (("observation.state", STATES, 0.5, 2), ("action", ACTIONS, -1, 2)):
        rows = random.normal(mean, deviation, (40, size))
        columns = {"mean": rows.mean(0), "std": rows.std(0), "min": rows.min(0), "max": rows.max(0)}
        columns |= {f"q{share:02d}": np.quantile(rows, share / 100, axis=0) for share in (1, 10, 50, 90, 99)}
        stats[key] = {name: torch.tensor(value, dtype=torch.float32) for name, value in columns.items()}
    return stats


def lerobot_batch(seen: Observation) -> dict[str, Any]:
    """Return observations as lerobot's data sets have them."""
    pictures = torch.from_numpy(seen["images.main"]).permute(0, 3, 1, 2).float() / 255
    batch: dict[str, Any] = {
        "observation.state": torch.from_numpy(seen["states"]),
        "observation.images.main": pictures,
    }
    if "instructions" in seen:
        batch["task"] = seen["instructions"].tolist()
    return batch


def redrawn(network: nn.Module) -> None:
    """Draw weights that all matter, and differ from each other."""
    torch.manual_seed(7)
    for weight in network.parameters():
        nn.init.normal_(weight, 0, 0.15 if weight.dim() > 1 else 0.05)
