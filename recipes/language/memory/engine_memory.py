"""Memory of the engine `torch`: keys and values of answers that run at once, and what it takes to draw their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from recipes.language.config import LanguageConfig
from recipes.language.engines.own.kv_cache import PrefillPlan
from recipes.language.engines.sampling import draw
from recipes.language.memory.longest_answers import StepAnswers
from recipes.language.memory.model_memory import META, ModelMemory
from recipes.language.models.attention import NO_PARENT, PackedPlan, Segment
from recipes.language.models.packing import common_prefix
from recipes.training.memory.host_memory import LARGEST_KEPT
from recipes.training.memory.live_memory import LiveMemory

# Unlike prompt tokens of one forward pass, as in the engine.
_PREFILL_TOKENS: Final = 8192
# Bytes of a running row for each token that it may have: the token, its log-probability, the version that drew it.
_ROW_TOKEN: Final = 8 + 4 + 8
# Rows that tokens are drawn for: what one more of them takes is the difference, by row.
_FEW, _MORE = 2, 6


class EngineMemory(NamedTuple):
    """Memory of an engine besides its weights, in bytes.

    Attributes:
        cache: keys and values, and the rows' own numbers.
        activations: what is computed, and what is drawn from, besides.
        kept: of both, what the host's allocator keeps when it is freed.
    """

    cache: int
    activations: int
    kept: int


def engine_memory(config: LanguageConfig, model: ModelMemory, answers: StepAnswers, rows: int) -> EngineMemory:
    """Return the memory of an engine.

    Args:
        config: the whole file.
        model: that it generates by.
        answers: that it may have to draw.
        rows: of them, those that run at once where there is no bound on their tokens.
    """
    width, limit, shape = answers.widest, config.rollout.max_running_tokens, model.shape
    rows = max(1, min(rows, limit // width)) if limit else rows
    # Columns grow by some at a time, and no further than the longest answer may come to.
    token = 2 * shape.layers * shape.heads * shape.dim * model.number
    cache = rows * width * token
    layer = cache // shape.layers
    own = rows * answers.most_new * _ROW_TOKEN
    # While columns are added to a layer its keys, or values, are there twice.
    decoding = cache + max(layer // 2, _forward(model, [(0,)] * rows, rows) + rows * _drawn(config, model.vocabulary))
    unlike = answers.prompts[: max(1, rows // answers.group_size)]
    prompts = _first_wave(unlike)
    prefilling = _forward(model, prompts, rows) + rows * _drawn(config, model.vocabulary)
    begun = rows * min(max(map(len, prompts)) + 64, width) * token
    peak = max(decoding, prefilling + (begun if len(unlike) > len(prompts) else 0), begun + layer)
    kept = peak if layer // 2 <= LARGEST_KEPT else peak - cache
    return EngineMemory(cache + own, peak - cache, kept)


def _first_wave(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return as many prompts as the engine computes in one pass."""
    taken: list[tuple[int, ...]] = []
    tokens = 0
    for each in prompts:
        if taken and tokens + len(each) > _PREFILL_TOKENS:
            break
        taken.append(each)
        tokens += len(each)
    return taken


def _forward(model: ModelMemory, prompts: Sequence[tuple[int, ...]], rows: int) -> int:
    """Return what a pass over prompts takes, their keys and values included, and the last logits of each row."""
    shared = common_prefix(list(dict.fromkeys(prompts))) if len(set(prompts)) > 1 else 0
    segments = [Segment(0, shared)] if shared else []
    begin = shared
    for each in prompts:
        segments.append(Segment(begin, len(each) - shared, 0 if shared else NO_PARENT))
        begin += len(each) - shared
    plan = PrefillPlan(PackedPlan(segments, META), model.shape.layers)
    last = torch.empty(len(prompts), dtype=torch.int64, device=META)
    tokens = torch.empty(1, begin, dtype=torch.int64, device=META)
    peak = model.computing(
        input_ids=tokens, position_ids=plan.positions, use_cache=False, logits_to_keep=last, attention_plan=plan
    )
    alike = max(0, rows - len(prompts)) * model.vocabulary * model.number
    return peak + alike


def _drawn(config: LanguageConfig, vocabulary: int) -> int:
    """Return what it takes to draw a token of one row, besides its logits."""
    params = config.rollout.sampling_params
    found: list[int] = []
    for rows in (_FEW, _MORE):
        logits = torch.zeros(rows, vocabulary)
        uniform = torch.full((rows,), 0.5, dtype=torch.float64)
        tempered = params.temperature != 1
        cut = params.top_k >= 0 or params.top_p < 1
        with LiveMemory() as live:
            draw(
                logits,
                torch.full((rows,), params.temperature) if tempered else None,
                uniform,
                torch.full((rows,), params.top_k) if cut else None,
                torch.full((rows,), params.top_p) if cut else None,
                torch.zeros(rows, vocabulary, dtype=torch.bool) if params.min_new_tokens else None,
            )
        found.append(live.peak)
    return (found[1] - found[0]) // (_MORE - _FEW)
