"""Small policies of lerobot, as its own classes save them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

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

from recipes.embodied.models.vla.vision_language import built_tokenizer

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
    "vqbet": {
        "n_obs_steps": 1,
        "n_action_pred_token": 1,
        "action_chunk_size": CHUNK,
        "gpt_hidden_dim": 32,
        "gpt_input_dim": 32,
        "gpt_output_dim": 32,
        "gpt_n_head": 2,
        "gpt_n_layer": 1,
        "dropout": 0.0,
        "crop_is_random": False,
        "pretrained_backbone_weights": None,
    },
    "multi_task_dit": {
        "n_obs_steps": 1,
        "horizon": 8,
        "hidden_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "dropout": 0.0,
        "num_train_timesteps": 5,
        "image_crop_shape": (32, 32),
        "image_crop_is_random": False,
        "tokenizer_max_length": 16,
    },
    "xvla": {
        "chunk_size": 8,
        "hidden_size": 32,
        "depth": 1,
        "num_heads": 2,
        "num_domains": 5,
        "len_soft_prompts": 2,
        "max_len_seq": 128,
        "tokenizer_max_length": 16,
        "action_mode": "auto",
        "max_action_dim": 6,
        "florence_config": {
            "vision_config": {
                "embed_dim": [8, 16],
                "depths": [1, 1],
                "num_heads": [2, 2],
                "num_groups": [2, 2],
                "patch_size": [7, 3],
                "patch_stride": [4, 2],
                "patch_padding": [3, 1],
                "patch_prenorm": [False, True],
                "window_size": 4,
                "projection_dim": 32,
                "drop_path_rate": 0.0,
            },
            "text_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "decoder_layers": 1,
                "decoder_attention_heads": 2,
                "decoder_ffn_dim": 32,
                "vocab_size": 200,
                "dropout": 0.0,
            },
        },
    },
}
_PIXELS = {"act": 64, "diffusion": 96, "vqbet": 96, "multi_task_dit": 32, "xvla": 64}
# Of the embodiments that an X-VLA knows, the one that its processor names.
_DOMAIN = 3


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
    spec = spec_of(side, side, instructions=kind in _INSTRUCTED)
    if kind in _INSTRUCTED:
        chosen |= _INSTRUCTED[kind](folder.with_name(f"{kind}_clip"))
    if kind != "vqbet":
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
    if kind == "vqbet":
        # A policy that is published has learned its codes.
        theirs.vqbet.action_head.vqvae_model.discretized.fill_(True)
    theirs.save_pretrained(folder)
    before, after = make_pre_post_processors(shape, dataset_stats=stats)
    for step in before.steps:
        if hasattr(step, "domain_id"):
            step.domain_id = _DOMAIN
    before.save_pretrained(folder, config_filename="policy_preprocessor.json")
    after.save_pretrained(folder, config_filename="policy_postprocessor.json")
    steps = shape.n_obs_steps

    def made(step: int = 0) -> Any:
        return before(lerobot_batch(seen_in(spec, step)))

    def chunk() -> Any:
        theirs.eval()
        theirs.reset()
        # Whole chunks before the one that is held against, each action with an observation of its own.
        for step in range(-CHUNK * -(-(steps - 1) // CHUNK), 0):
            theirs.select_action(dict(made(step)))
        torch.manual_seed(0)
        chosen = [after(theirs.select_action(dict(made()))) for _ in range(CHUNK)]
        return torch.stack(chosen, dim=1).numpy()

    def loss(actions: Any) -> float:
        theirs.train()
        batch = lerobot_batch(seen_in(spec))
        shown: dict[str, Any] = dict(before({**batch, "action": torch.from_numpy(actions)}))
        if shape.observation_delta_indices is not None:
            rows = [made(step) for step in shape.observation_delta_indices]
            for key in ("observation.state", "observation.images.main"):
                shown[key] = torch.stack([row[key] for row in rows], dim=1)
        torch.manual_seed(3)
        none = torch.zeros(actions.shape[:2], dtype=torch.bool)
        return float(theirs.forward({**shown, "action_is_pad": none})[0].detach())

    horizon = len(shape.action_delta_indices)
    return Original({"model_type": "lerobot"}, spec, theirs, horizon, chunk, loss, observed_steps=steps)


def _clip(folder: Path) -> dict[str, Any]:
    """Save a small CLIP with a tokenizer; return the settings that name it."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    words: Any = built_tokenizer()
    text = {**sizes, "vocab_size": len(words), "max_position_embeddings": 16, "eos_token_id": 1, "pad_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    words.save_pretrained(folder)
    return {"text_encoder_name": str(folder), "vision_encoder_name": str(folder)}


def _words(folder: Path) -> dict[str, Any]:
    """Save a tokenizer; return the setting that names it."""
    built_tokenizer().save_pretrained(folder)
    return {"tokenizer_name": str(folder)}


# Policies that read an instruction, with what saves the folders that their configurations name.
_INSTRUCTED: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {"multi_task_dit": _clip, "xvla": _words}
