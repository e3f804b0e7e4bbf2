"""Tiny models of every causal architecture of the installed transformers."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "hidden_dim": 64,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
}


def architectures() -> dict[str, type[Any]]:
    """Return the configuration class of each model type that has a causal language model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {name: CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}


def tiny(kind: type[Any], **changes: Any) -> Any:
    """Return a causal language model of a configuration class, in float32 and evaluation mode.

    Sizes are taken by the attributes that the class has by default: no two name all of them alike.
    """
    from transformers import AutoModelForCausalLM

    default = kind()
    wanted = {**SIZES, **changes}
    if hasattr(default, "qk_rope_head_dim"):
        # Multi-head latent attention has sizes of its own, and a key for each query head.
        wanted = {**wanted, "num_key_value_heads": 4, "head_dim": wanted["qk_rope_head_dim"]}
    sizes = {name: value for name, value in wanted.items() if hasattr(default, name)}
    config = kind(**sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()
