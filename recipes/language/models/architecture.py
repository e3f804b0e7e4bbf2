"""Facts about the attention and the positions of a language model, by its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_exact_attention(model: PreTrainedModel) -> None:
    """Let a model compute its attention by a kernel that leaves nothing out of it.

    Torch's own has no cap of scores (Gemma 2).
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


def takes_masks(model: PreTrainedModel) -> bool:
    """Return whether a model computes as a mask of all pairs of tokens and their positions say.

    Models do whose attention is torch's kernel, and whose positions are neither those of columns nor recurrent.
    """
    made = cast("Any", model)
    parameters = inspect.signature(made.get_decoder().forward).parameters
    is_torch = made.config._attn_implementation == "sdpa"
    return is_torch and made._supports_attention_backend and "position_ids" in parameters


def sees_all_before(config: Any, length: int) -> bool:
    """Return whether each token attends to all tokens before it in sequences of a length.

    Args:
        config: the configuration of a text model of transformers.
        length: tokens of the longest sequence.
    """
    kinds = cast("Sequence[str]", getattr(config, "layer_types", None) or ())
    if set(kinds) - {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return False
    windows = [getattr(config, name, None) for name in ("sliding_window", "window_size")]
    return all(not window or window >= length for window in windows)


def longest_exact(config: Any) -> int | None:
    """Return the maximum sequence length for which a model's rotary angles depend only on positions; None: unlimited.

    `longrope` (Phi-3) changes its angles where a sequence is longer than the original length, and `dynamic` where it is
    longer than `max_position_embeddings`. In a batch, and while an answer grows, one length would decide for all.

    Args:
        config: the configuration of a text model of transformers.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(cast("dict[str, Any]", part) for part in rope.values() if isinstance(part, dict))]
    kinds = {part.get("rope_type") for part in parts}
    limits: list[int] = []
    if "longrope" in kinds:
        original = rope.get("original_max_position_embeddings")
        limits.append(
            original or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        )
    if "dynamic" in kinds:
        limits.append(config.max_position_embeddings)
    return min(limits, default=None)
