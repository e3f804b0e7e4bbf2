"""Small folders of pi0 and pi0.5 in the layouts that lerobot and openpi publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipes.embodied.models.vla.pi_network import GemmaSizes, Pi05Network, PiShape

ROOM, HORIZON = 5, 6
# SigLIP's 16 heads cannot be seen in the shapes of weights.
SHAPE: Final = PiShape(
    language=GemmaSizes(32, 48, 2, 4, 8),
    expert=GemmaSizes(16, 24, 2, 4, 8),
    vision=(32, 40, 2, 16),
    image=32,
    patch=8,
    vocabulary=160,
    actions=ROOM,
    horizon=HORIZON,
)
_BEGINNINGS: Final = (
    ("vlm.vision_tower.", "paligemma_with_expert.paligemma.model.vision_tower.vision_model."),
    ("vlm.language_model.embed_tokens.", "paligemma_with_expert.paligemma.lm_head."),
    ("vlm.", "paligemma_with_expert.paligemma.model."),
    ("expert.", "paligemma_with_expert.gemma_expert.model."),
)


def published_name(name: str) -> str:
    """Return the name in openpi's `PI0Pytorch` of a weight of the network here."""
    for ours, theirs in _BEGINNINGS:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def drawn_network() -> Pi05Network:
    """Return a network whose weights all matter."""
    torch.manual_seed(3)
    network = Pi05Network(SHAPE)
    for name, weight in network.named_parameters():
        torch.nn.init.normal_(weight, 0, 0.15 if weight.dim() > 1 or "dense" in name else 0.05)
    return network


def write_openpi(folder: Path, weights: dict[str, Tensor] | None = None, prefix: str = "") -> dict[str, Any]:
    """Write a folder as openpi's converter does, with statistics; return its settings."""
    kept = drawn_network().state_dict() if weights is None else weights
    named = {prefix + published_name(name): weight.clone().contiguous() for name, weight in kept.items()}
    # The expert has a head for words that nothing reads.
    named[f"{prefix}paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.zeros(160, 16)
    save_file(named, folder / "model.safetensors")
    about = {"action_dim": ROOM, "action_horizon": HORIZON, "paligemma_variant": "gemma_2b", "precision": "float32"}
    (folder / "config.json").write_text(json.dumps(about))
    stats = {
        name: {"mean": [0.5] * size, "std": [2.0] * size, "q01": [-1.0] * size, "q99": [3.0] * size}
        for name, size in (("state", 10), ("actions", 3))
    }
    (folder / "assets" / "lab" / "arm").mkdir(parents=True)
    (folder / "assets" / "lab" / "arm" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    return about


def write_lerobot(folder: Path) -> None:
    """Write a folder as lerobot's `save_pretrained` does, with the processors."""
    write_openpi(folder, prefix="model.")
    modes = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    about = {
        "type": "pi05",
        "chunk_size": HORIZON,
        "n_action_steps": HORIZON,
        "max_state_dim": 12,
        "max_action_dim": ROOM,
        "num_inference_steps": 5,
        "normalization_mapping": modes,
    }
    (folder / "config.json").write_text(json.dumps(about))
    file = "policy_preprocessor_step_2_normalizer_processor.safetensors"
    save_file(
        {
            f"{name}.{part}": torch.full((size,), value)
            for name, size in (("observation.state", 10), ("action", 3))
            for part, value in (("q01", -1.0), ("q99", 3.0))
        },
        folder / file,
    )
    step = {"registry_name": "normalizer_processor", "config": {"eps": 1e-8, "norm_map": modes}, "state_file": file}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
