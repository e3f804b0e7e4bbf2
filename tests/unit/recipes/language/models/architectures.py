"""Tiny models of every causal architecture of the installed transformers."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
# Parameters of the largest model that is built.
LARGEST = 50_000_000
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512})
SIZES.update({"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "sliding_window": 8})
SIZES.update({"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2})
SIZES.update({"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1})
SIZES.update({"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8})
# By other names.
SIZES.update({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512})
SIZES.update({"hidden_dim": 64, "ffn_dim": 96, "word_embed_proj_dim": 64})
# Sizes of what sees or hears, beside a language model.
OF_OTHER_PARTS: dict[str, Any] = {
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
OF_OTHER_PARTS.update({"mm_tokens_per_image": 4, "d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2})
OF_OTHER_PARTS.update({"encoder_ffn_dim": 64, "num_global_layers": 1})
# What some families need besides, as by default their parts do not fit tiny ones.
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "cwm": {"bos_token_id": 2},
    "dbrx": {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96}, "attn_config": {"kv_n_heads": 2}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}},
    "emu3_text_model": {"bos_token_id": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY},
    "gemma4_text": {"per_layer_config": {"01": {"head_dim": 32}}, "vocab_size_per_layer_input": VOCABULARY},
    "gemma4_unified_text": {"per_layer_config": {"01": {"head_dim": 32}}},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mllama_text_model": {"bos_token_id": 2},
    "modernbert-decoder": {"bos_token_id": 2},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64},
    "xlnet": {"d_head": 16},
    "zamba": {"layer_types": ["hybrid", "mamba"]},
    "zamba2": {"layer_types": ["hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}
OWN["longcat_flash"] = {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
OWN["longcat_flash"].update({"zero_expert_num": 2, "moe_topk": 2})


class TooLargeError(ValueError):
    """A family whose smallest model here has more than `LARGEST` parameters."""


def architectures() -> dict[str, type[Any]]:
    """Return the configuration class of each model type that has a causal language model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {name: CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}


def tiny(kind: type[Any], **changes: Any) -> Any:
    """Return a causal language model of a configuration class, in float32 and evaluation mode.

    Sizes are taken by the names that the class writes into config.json, or has aliases for.

    Raises:
        TooLargeError: there is no tiny one.
    """
    from transformers import AutoModelForCausalLM

    config = kind(**{**_sizes(kind()), **changes})
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise TooLargeError(f"{count:,} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def _sizes(default: Any) -> dict[str, Any]:
    """Return tiny sizes of a configuration and of those within it, such as that of images."""
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {name: value for name, value in (SIZES | OF_OTHER_PARTS).items() if name in known}
    if "qk_rope_head_dim" in known:
        # Multi-head latent attention has sizes of its own, and a key for each query head.
        sizes |= {"num_key_value_heads": 4, "head_dim": sizes["qk_rope_head_dim"]}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if hasattr(part, "to_dict"):
            sizes[name] = _sizes(part)
    return sizes | OWN.get(default.model_type, {})
