"""Attention on torch's meta device with the memory of the fused kernel, which never holds all scores."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

_NAME: Final = "rlinf_fused_on_meta"


def fuse_attention(model: nn.Module) -> None:
    """Let the language models in a model attend by the kernel that they have on a device with memory.

    Left alone they look at what a mask holds before they choose it, and on the meta device nothing holds anything.
    """
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            _register()
            module.set_attn_implementation(_NAME)  # pyright: ignore[reportCallIssue]


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    from transformers import masking_utils

    untyped: Any = masking_utils
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return untyped.sdpa_mask(*args, **{**kwargs, **never})


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what `sdpa` of transformers would: [n, length, heads, size]."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    mask = None
    if attention_mask is not None:
        # The kernel takes what is added to scores.
        mask = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scaling
    )[0]
    return found.transpose(1, 2).contiguous(), None
