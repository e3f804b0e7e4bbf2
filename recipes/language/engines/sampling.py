"""Draws of tokens that depend on nothing but the seed, the prompt, the sample and the position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """Return 64 well mixed bits of an integer, by the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Return the key of an answer's draws, 63 bits."""
    key = _mix(seed & _MASK)
    for token in prompt:
        key = _mix(key ^ token)
    return _mix(key ^ (sample << 1 | 1)) >> 1


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64 [n], one for each key (int64 [n]) and position (int64 [n])."""
    value = keys ^ _mixed(positions)
    return (_mixed(value) >> 11 & ((1 << 53) - 1)).double() * 2.0**-53


def _mixed(value: Tensor) -> Tensor:
    """As `_mix`, of int64 tensors, which wrap around as unsigned ones do."""

    def shifted(bits: Tensor, by: int) -> Tensor:
        return bits >> by & ((1 << (64 - by)) - 1)

    value = value + (0x9E3779B97F4A7C15 - (1 << 64))
    value = (value ^ shifted(value, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    value = (value ^ shifted(value, 27)) * (0x94D049BB133111EB - (1 << 64))
    return value ^ shifted(value, 31)


def draw(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the token of each row and its log-probability.

    A token is found by its cumulative probability, which is faster than `torch.multinomial` over large vocabularies.

    Args:
        logits: float [n, V].
        temperature: float [n]; 0 takes the most likely token, and gives its log-probability at temperature 1.
        uniform: float64 [n], in [0, 1).
        top_k: int64 [n], -1 for all; None: all for every row.
        top_p: float [n]; None: 1 for every row.

    Returns:
        int64 [n] and float32 [n]; log-probabilities are those of softmax(logits / temperature), whatever `top_k` and
        `top_p` leave out.
    """
    greedy = temperature == 0
    logits = logits.float()
    if bool((temperature != 1).any()):
        logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    normalizer = torch.logsumexp(logits, dim=-1)
    if bool(greedy.all()):
        tokens = logits.argmax(dim=-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - normalizer
    probabilities = (logits - normalizer[:, None]).exp()
    if top_k is not None or top_p is not None:
        probabilities = _truncated(probabilities, top_k, top_p)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64 if logits.shape[-1] > 4096 else torch.float32)
    targets = uniform.to(cumulative.dtype) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - normalizer


def _truncated(probabilities: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    ordered, order = probabilities.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        keep &= (rank[None] < top_k[:, None]) | (top_k[:, None] < 0)
    if top_p is not None:
        # A token is kept when those before it do not reach the share: the most likely one always is.
        keep &= ordered.cumsum(dim=-1) - ordered < top_p[:, None]
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(keep, ordered, 0))
