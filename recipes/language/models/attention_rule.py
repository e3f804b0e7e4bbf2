"""The rule of a layer's attention: which keys a query sees, and how scores become weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class AttentionRule(NamedTuple):
    """The non-tensor arguments of a transformers attention function.

    Attributes:
        scale: factor of the products of queries and keys.
        window: how many keys a query sees at most, its own included; None: all before it.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2); None: they stay.
        sinks: float [H], a score of each head that takes part in the softmax and has no value (GPT-OSS); None: none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether scores become weights by a softmax alone, as the fused kernels have it."""
        return self.softcap is None and self.sinks is None

    def hides(self, length: int) -> bool:
        """Return whether the last of this many tokens is out of reach of the first."""
        return self.window is not None and length > self.window


def band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of the last `queries` of `keys` tokens of a sequence: bool [queries, keys]."""
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = torch.arange(keys, device=device)[None]
    mask = seen <= last
    return mask if window is None else mask & (last - seen < window)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: AttentionRule, *, causal: bool = False
) -> Tensor:
    """Return attention of queries [B, H, L, D] to keys [B, G, S, D] and values [B, G, S, E], as [B, H, L, E].

    Each key head serves H / G query heads. On the meta device, where memory is forecast, torch would take products with
    a matrix of all scores: there its kernel is called by name.

    Args:
        queries, keys, values: see above.
        mask: bool, true where a query sees a key, of a shape that [B, H, L, S] broadcasts; None: all see all.
        rule: the window in it is the caller's, as part of the mask.
        causal: instead of a mask: each of L = S tokens sees those before it and itself.
    """
    if not rule.is_plain:
        mask = band(queries.shape[2], keys.shape[2], None, queries.device) if causal else mask
        return _explicit(queries, keys, values, mask, rule)
    if not queries.is_meta:
        shares = keys.shape[1] != queries.shape[1]
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=rule.scale, enable_gqa=shares
        )
    added = None if mask is None else torch.zeros(mask.shape, dtype=queries.dtype, device=queries.device)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(queries, keys, values, 0.0, causal, attn_mask=added, scale=rule.scale)[0]
    return result


def attention_and_normalizers(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Return `attention` to a part of the keys, and by how much it counts beside other parts; without gradients.

    Args:
        queries, keys, values: the queries, keys and values, as of `attention`, with as many heads of queries as of
            keys.
        mask: the mask, as of `attention`. A query that sees none of the keys gets finite numbers that count for
            nothing.
        rule: its sinks are the caller's, as their own part.

    Returns:
        Attention, [B, H, L, E], and the logarithm of the sum of exponentials of each query's scores, float32 [B, H, L].
    """
    if rule.softcap is None and queries.device.type == "cpu" and queries.shape[-1] == values.shape[-1]:
        added = None
        if mask is not None:
            lowest = torch.finfo(queries.dtype).min
            added = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, lowest)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, normalizers = kernel(queries, keys, values, 0.0, False, attn_mask=added, scale=rule.scale)
        return result, normalizers
    scores = _capped(_products(queries, keys) * rule.scale, rule)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    normalizers = scores.logsumexp(dim=-1)
    return (scores - normalizers[..., None]).exp().to(values.dtype) @ values, normalizers


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return products of queries [B, H, L, D] and keys [B, H, S, D] in float32, [B, H, L, S]."""
    if queries.dtype is torch.float32 or queries.device.type != "cuda":
        return queries.float() @ keys.float().transpose(-1, -2)
    # Keys in half precision are read as they are, and sums keep the precision in which they are formed.
    flat = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
    return flat.reshape(*queries.shape[:3], keys.shape[2])


def _capped(scores: Tensor, rule: AttentionRule) -> Tensor:
    return scores if rule.softcap is None else torch.tanh(scores / rule.softcap) * rule.softcap


def _explicit(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """Compute `attention` with the full score matrix: no fused kernel supports caps and sinks."""
    batch, heads, length, dim = queries.shape
    groups, count = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, groups, heads // groups, length, dim)
    scores = _capped(grouped @ keys[:, :, None].transpose(-1, -2) * rule.scale, rule)
    if mask is not None:
        seen = mask.expand(batch, heads, length, count).reshape(scores.shape)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if rule.sinks is None:
        weights = scores.softmax(dim=-1, dtype=torch.float32)
    else:
        sinks = rule.sinks.to(scores.dtype).reshape(1, groups, heads // groups, 1, 1)
        sinks = sinks.expand(batch, -1, -1, length, -1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
    return (weights.to(values.dtype) @ values[:, :, None]).reshape(batch, heads, length, values.shape[-1])
