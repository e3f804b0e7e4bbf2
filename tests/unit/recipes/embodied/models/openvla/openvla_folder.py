"""A small OpenVLA in the published layout, with random weights by timm's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipes.embodied.models.vla.vision_language import built_tokenizer

WIDTH, HIDDEN, LAYERS, PIXELS, PATCH = 32, 64, 3, 28, 14
TEXT, PADDING, BINS = 32, 64, 256
PATCHES = (PIXELS // PATCH) ** 2
STATISTICS: dict[str, Any] = {
    "libero_spatial": {
        "action": {
            "q01": [-0.5, -0.75, -0.9, 0.0],
            "q99": [0.5, 0.25, 0.9, 1.0],
            "mask": [True, True, True, False],
            "mean": [0.0, 0.0, 0.0, 0.5],
        }
    }
}


def tower(name: str, *, is_dino: bool) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a vision tower of timm, without its prefix."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        "pos_embed": (1, PATCHES, WIDTH),
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
    }
    if is_dino:
        shapes |= {"cls_token": (1, 1, WIDTH), "reg_token": (1, 4, WIDTH)}
    else:
        shapes |= {"attn_pool.latent": (1, 1, WIDTH), "attn_pool.q.weight": (WIDTH, WIDTH)}
    for layer in range(LAYERS):
        block = {
            "norm1.weight": (WIDTH,),
            "norm1.bias": (WIDTH,),
            "attn.qkv.weight": (3 * WIDTH, WIDTH),
            "attn.qkv.bias": (3 * WIDTH,),
            "attn.proj.weight": (WIDTH, WIDTH),
            "attn.proj.bias": (WIDTH,),
            "norm2.weight": (WIDTH,),
            "norm2.bias": (WIDTH,),
            "mlp.fc1.weight": (HIDDEN, WIDTH),
            "mlp.fc1.bias": (HIDDEN,),
            "mlp.fc2.weight": (WIDTH, HIDDEN),
            "mlp.fc2.bias": (WIDTH,),
        }
        if is_dino:
            block |= {"ls1.scale_factor": (WIDTH,), "ls2.scale_factor": (WIDTH,)}
        shapes |= {f"blocks.{layer}.{key}": shape for key, shape in block.items()}
    return {f"{name}.{key}": shape for key, shape in shapes.items()}


def language(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (vocabulary, TEXT),
        "language_model.model.norm.weight": (TEXT,),
        "language_model.lm_head.weight": (vocabulary, TEXT),
        "projector.fc1.weight": (8 * WIDTH, 2 * WIDTH),
        "projector.fc1.bias": (8 * WIDTH,),
        "projector.fc2.weight": (TEXT, 8 * WIDTH),
        "projector.fc2.bias": (TEXT,),
        "projector.fc3.weight": (TEXT, TEXT),
        "projector.fc3.bias": (TEXT,),
    }
    for layer in range(2):
        at = f"language_model.model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (TEXT, TEXT) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (2 * TEXT, TEXT) for name in ("gate", "up")}
        shapes |= {
            f"{at}.mlp.down_proj.weight": (TEXT, 2 * TEXT),
            f"{at}.input_layernorm.weight": (TEXT,),
            f"{at}.post_attention_layernorm.weight": (TEXT,),
        }
    return shapes


def write(folder: Path) -> dict[str, Tensor]:
    """Write the folder; return its weights."""
    folder.mkdir(parents=True)
    words: Any = built_tokenizer()
    words.add_special_tokens({"eos_token": "</s>"})
    words.add_tokens(["\u2581"])
    vocabulary = len(words) + BINS + PADDING
    random = torch.Generator().manual_seed(0)
    shapes = {
        **tower("vision_backbone.featurizer", is_dino=True),
        **tower("vision_backbone.fused_featurizer", is_dino=False),
        **language(vocabulary),
    }
    weights = {
        name: torch.randn(shape, generator=random) * (0.3 if len(shape) > 1 else 0.5)
        + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        for name, shape in shapes.items()
    }
    halves = sorted(weights)[::2]
    save_file({name: weights[name] for name in halves}, folder / "model-00001-of-00002.safetensors")
    rest = {name: weight for name, weight in weights.items() if name not in halves}
    save_file(rest, folder / "model-00002-of-00002.safetensors")
    about = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [PIXELS, PIXELS],
        "n_action_bins": BINS,
        "pad_to_multiple_of": PADDING,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "norm_stats": {"bridge_orig": STATISTICS["libero_spatial"], "another": STATISTICS["libero_spatial"]},
        "text_config": {
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": vocabulary,
            "hidden_size": TEXT,
            "intermediate_size": 2 * TEXT,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    }
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    words.save_pretrained(str(folder))
    return weights
