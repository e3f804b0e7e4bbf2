"""Sizes of mixtures of experts, by config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

# The names that families give the number of experts, and how many of them a token gets.
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "moe_topk", "moe_k")


class ExpertSizes(NamedTuple):
    """Sizes of a mixture of experts.

    Attributes:
        layers: the number of layers of the model, those without experts included.
        experts: the experts of a layer that its router scores.
        chosen: the experts that a token gets.
    """

    layers: int
    experts: int
    chosen: int


def expert_sizes(text: Mapping[str, Any]) -> ExpertSizes | None:
    """Return the sizes of the mixture that a text model's config.json describes; None: it has no experts."""
    experts = next((text[name] for name in _EXPERTS if text.get(name)), None)
    chosen = next((text[name] for name in _CHOSEN if text.get(name)), None)
    layers = text.get("num_hidden_layers") or text.get("num_layers")
    if not (isinstance(experts, int) and isinstance(chosen, int) and isinstance(layers, int)) or chosen >= experts:
        return None
    return ExpertSizes(layers, experts + int(text.get("zero_expert_num") or 0), chosen)
