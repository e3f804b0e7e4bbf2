"""Sampling of tokens that depends only on seed, prompt, sample and position."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_BLOCK = 256


def _mix(value: int) -> int:
    """Return 64 well mixed bits of an integer, by the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def prompt_key(seed: int, prompt: Sequence[int]) -> int:
    """Return the base of the random keys of all answers to a prompt, 64 bits."""
    text = array("Q", (seed & _MASK, *prompt)).tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def stream_key(prompt: int, sample: int) -> int:
    """Return the key of an answer's draws, 63 bits.

    Args:
        prompt: see `prompt_key`.
        sample: the number of the answer.
    """
    return _mix(prompt ^ (sample << 1 | 1)) >> 1


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64 [n], one for each key (int64 [n]) and position (int64 [n])."""
    value = keys ^ _mixed(positions)
    return (_mixed(value) >> 11 & ((1 << 53) - 1)).double() * 2.0**-53


def _mixed(value: Tensor) -> Tensor:
    """Return `_mix` of each element, int64 tensors, which wrap around like unsigned integers."""

    def shifted(bits: Tensor, by: int) -> Tensor:
        return bits >> by & ((1 << (64 - by)) - 1)

    value = value + (0x9E3779B97F4A7C15 - (1 << 64))
    value = (value ^ shifted(value, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    value = (value ^ shifted(value, 27)) * (0x94D049BB133111EB - (1 << 64))
    return value ^ shifted(value, 31)


def draw(
    logits: Tensor,
    temperature: Tensor | None,
    uniform: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    banned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the token of each row and its log-probability.

    The search for a cumulative probability starts with blocks of tokens, which in large vocabularies is many times as
    fast as `torch.multinomial`.

    Args:
        logits: float [n, V].
        temperature: float [n]; 0 selects the most likely token, with its log-probability at temperature 1. None: 1 for
            every row.
        uniform: float64 [n], in [0, 1).
        top_k: int64 [n], -1 for all; None: all for every row.
        top_p: float [n]; None: 1 for every row.
        banned: bool [n, V], tokens that must not be drawn.

    Returns:
        int64 [n] and float32 [n]; log-probabilities are those of softmax(logits / temperature), before `top_k`, `top_p`
            and `banned`. A row without finite probabilities, or with all tokens banned, has a log-probability of NaN or
            infinity and a meaningless token.
    """
    logits = logits.float()
    greedy = None if temperature is None else temperature == 0
    if temperature is not None and greedy is not None and bool((temperature != 1).any()):
        logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    choices = logits if banned is None else logits.masked_fill(banned, -torch.inf)
    if greedy is not None and bool(greedy.all()):
        tokens = choices.argmax(dim=-1)
        return tokens, choices.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
    highest = logits.amax(dim=-1, keepdim=True)
    weights = (logits - highest).exp()
    blocks = _block_sums(weights)
    total = blocks.sum(dim=-1, dtype=torch.float64)
    normalizer = highest[:, 0] + total.log().float()
    if banned is not None:
        # Relative to a banned token, all others may underflow a float32, so scale by the likeliest allowed token.
        weights = (choices - choices.amax(dim=-1, keepdim=True)).exp()
        blocks = _block_sums(weights)
    if top_k is not None or top_p is not None:
        weights = _truncated(weights / total[:, None].float(), top_k, top_p)
        blocks = _block_sums(weights)
    tokens = _by_share(weights, blocks, uniform)
    if greedy is not None and bool(greedy.any()):
        tokens = torch.where(greedy, choices.argmax(dim=-1), tokens)
    return tokens, choices.gather(1, tokens[:, None])[:, 0] - normalizer


def _block_sums(weights: Tensor) -> Tensor:
    """Return the sums of weights, [n, V], over blocks of `_BLOCK` tokens, [n, B]; the last block may be shorter."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    blocks = cast("Tensor", weights[:, :whole].unflatten(1, (-1, _BLOCK))) if whole else weights[:, :0, None]
    sums = blocks.sum(dim=2)
    return sums if whole == weights.shape[1] else torch.cat((sums, weights[:, whole:].sum(dim=1, keepdim=True)), dim=1)


def _by_share(weights: Tensor, blocks: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which the cumulative weight exceeds a share of the total, by blocks, then within one.

    Args:
        weights: float32 [n, V], none negative.
        blocks: see `_block_sums`.
        uniform: float64 [n], shares in [0, 1).

    Returns:
        int64 [n]; never the index of a zero weight, but any index if a row's weights are NaN or all 0.
    """
    if blocks.shape[1] == 1:
        own = weights.double().cumsum(dim=1)
        target = uniform * own[:, -1] * (1 - 1e-12)
        return torch.searchsorted(own, target[:, None], right=True)[:, 0].clamp(max=weights.shape[1] - 1)
    cumulative = blocks.double().cumsum(dim=1)
    target = uniform.double() * cumulative[:, -1]
    block = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=blocks.shape[1] - 1)
    before = (cumulative - blocks).gather(1, block)
    places = block * _BLOCK + torch.arange(min(_BLOCK, weights.shape[1]), device=weights.device)
    inside = places < weights.shape[1]
    own = torch.where(inside, weights.gather(1, places.clamp(max=weights.shape[1] - 1)), 0).double().cumsum(dim=1)
    # Two sums of a block differ by rounding; a target beyond the sum falls to the block's last nonzero weight.
    left = torch.minimum(target[:, None] - before, own[:, -1:] * (1 - 1e-12))
    index = torch.searchsorted(own, left, right=True).clamp(max=places.shape[1] - 1)
    return places.gather(1, index)[:, 0].clamp(max=weights.shape[1] - 1)


def _truncated(probabilities: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    ordered, order = probabilities.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        keep = (rank[None] < top_k[:, None]) | (top_k[:, None] < 0)
        # `top_p` is a share of what `top_k` leaves, as in transformers and vLLM.
        ordered = torch.where(keep, ordered, 0)
    if top_p is not None:
        # A token is kept if the likelier tokens do not reach the share, as is true of the likeliest.
        keep &= ordered.cumsum(dim=-1) - ordered < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
        # Keep the likeliest token even if the share underflows a float32.
        keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(keep, ordered, 0))
