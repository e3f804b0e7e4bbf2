"""Small policies of lerobot, as its own classes save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from original import (
    ACTIONS,
    CHUNK,
    STATES,
    Original,
    lerobot_batch,
    redrawn,
    seen_in,
    spec_of,
    statistics,
)

# Small sizes, by lerobot's own names.
SIZES: dict[str, dict[str, Any]] = {
    "act": {
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 64,
        "chunk_size": 8,
        "dropout": 0.0,
        "latent_dim": 4,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "horizon": 8,
        "n_obs_steps": 1,
        "down_dims": [16, 32],
        "n_groups": 4,
        "num_train_timesteps": 5,
        "use_group_norm": True,
        "pretrained_backbone_weights": None,
    },
}
_PIXELS = {"act": 64, "diffusion": 96}


def features(height: int, width: int) -> dict[str, Any]:
    """Return what a policy of lerobot observes and does."""
    return {
        "input_features": {
            "observation.state": PolicyFeature(FeatureType.STATE, (STATES,)),
            "observation.images.main": PolicyFeature(FeatureType.VISUAL, (3, height, width)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
    }


def small(kind: str, folder: Path, **sizes: Any) -> Original:
    """Save a policy as lerobot does; return it."""
    side = _PIXELS[kind]
    chosen = {**SIZES[kind], **sizes}
    spec = spec_of(side, side, instructions=False)
    chosen["n_action_steps"] = CHUNK
    shape = make_policy_config(kind, device="cpu", **features(side, side), **chosen)
    torch.manual_seed(0)
    theirs: Any = get_policy_class(kind)(shape)
    stats = statistics() | {
        "observation.images.main": {
            "mean": torch.tensor([0.4, 0.5, 0.6])[:, None, None],
            "std": torch.tensor([0.2, 0.3, 0.25])[:, None, None],
        }
    }
    redrawn(theirs)
    theirs.save_pretrained(folder)
    before, after = make_pre_post_processors(shape, dataset_stats=stats)
    before.save_pretrained(folder, config_filename="policy_preprocessor.json")
    after.save_pretrained(folder, config_filename="policy_postprocessor.json")
    seen = seen_in(spec)
    made = before(lerobot_batch(seen))

    def chunk() -> Any:
        theirs.eval()
        theirs.reset()
        torch.manual_seed(0)
        chosen = [after(theirs.select_action(dict(made))) for _ in range(CHUNK)]
        return torch.stack(chosen, dim=1).numpy()

    def loss(actions: Any) -> float:
        theirs.train()
        shown: dict[str, Any] = dict(before({**lerobot_batch(seen), "action": torch.from_numpy(actions)}))
        if shape.observation_delta_indices is not None:
            for key in ("observation.state", "observation.images.main"):
                shown[key] = shown[key][:, None]
        torch.manual_seed(3)
        none = torch.zeros(actions.shape[:2], dtype=torch.bool)
        return float(theirs.forward({**shown, "action_is_pad": none})[0].detach())

    return Original({"model_type": "lerobot"}, spec, theirs, len(shape.action_delta_indices), chunk, loss)
