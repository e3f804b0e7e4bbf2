"""Properties of a language model's attention and positions, from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_exact_attention(model: PreTrainedModel) -> None:
    """Make a model use an attention kernel that supports all of its features.

    Torch's kernel lacks the soft cap of scores (Gemma 2).
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


def takes_masks(model: PreTrainedModel) -> bool:
    """Return whether a model obeys an arbitrary mask of token pairs and positions.

    A model does if its attention is torch's kernel, and it takes `position_ids` instead of counting columns.
    """
    made = cast("Any", model)
    parameters = inspect.signature(made.get_decoder().forward).parameters
    is_torch = made.config._attn_implementation == "sdpa"
    return is_torch and made._supports_attention_backend and "position_ids" in parameters


def sees_all_before(config: Any, length: int) -> bool:
    """Return whether each token attends to all earlier tokens in sequences of up to `length` tokens.

    Args:
        config: the configuration of a text model from transformers.
        length: the length of the longest sequence in tokens.
    """
    kinds = cast("Sequence[str]", getattr(config, "layer_types", None) or ())
    if set(kinds) - {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return False
    windows = [getattr(config, name, None) for name in ("sliding_window", "window_size")]
    return all(not window or window >= length for window in windows)


def stretched(positions: int, rope: object) -> int:
    """Return the maximum sequence length of a model.

    Args:
        positions: its `max_position_embeddings`, which in Qwen's folders leave the factor of `yarn` out.
        rope: the settings of its rotary angles, `rope_parameters` or `rope_scaling`; the types `yarn` and `linear`
            stretch the positions by a factor.
    """
    settings = cast("dict[str, Any]", rope) if isinstance(rope, dict) else {}
    factor, original = settings.get("factor"), settings.get("original_max_position_embeddings") or positions
    stretches = settings.get("rope_type", settings.get("type")) in ("yarn", "linear")
    if stretches and isinstance(factor, int | float) and isinstance(original, int):
        return max(positions, int(factor * original))
    return positions


def longest_exact(config: Any) -> int | None:
    """Return the maximum sequence length for which a model's rotary angles depend only on positions; None: unlimited.

    `longrope` (Phi-3) changes its angles for sequences beyond the original length, and `dynamic` beyond
    `max_position_embeddings`, so the longest sequence of a batch would decide for all.

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
