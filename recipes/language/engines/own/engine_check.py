"""A start-up check of the built-in engine against transformers' own attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.models.plain_check import plain_attention, refusing, rounding
from recipes.training.typed_tensors import integers
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Prompts of different lengths with a common prefix, two of them with two answers, cover prefill, shared prefixes,
# prompts that are stored once, and ragged decoding.
_LENGTHS, _GROUPS, _COMMON, _TOKENS = (9, 31, 20), (1, 2, 2), 8, 12


def check_engine(model: PreTrainedModel) -> Difference:
    """Compare greedy answers of the engine with forward passes of the model, sequence by sequence.

    Returns:
        The largest difference of a log-probability, in nats.

    Raises:
        ConfigError: log-probabilities differ by more than rounding, or a token is not the likeliest.
    """
    kind = type(model).__name__
    vocabulary: int = cast("Any", model.get_input_embeddings()).weight.shape[0]
    tokens = integers(torch.randint(vocabulary, (max(_LENGTHS),), generator=torch.Generator().manual_seed(0)))
    params = SamplingParams(temperature=0.0, max_new_tokens=_TOKENS)
    largest = 0.0
    with refusing(f"the engine `torch` cannot sample from `{kind}`"):
        engine = TorchEngine(model, min_saved=1)
        for length, group in zip(_LENGTHS, _GROUPS, strict=True):
            # A common prefix, then different tokens.
            prompt = (*tokens[:_COMMON], *tokens[_COMMON:length][::-1])
            engine.submit(Request(request_id=str(length), prompt=prompt, params=params, group_size=group))
        answers = list(engine.results())
        with torch.no_grad(), plain_attention(model):
            for answer in answers:
                prompt, drawn = list(answer.prompt), list(answer.tokens)
                row = torch.tensor([[*prompt, *drawn]], device=model.device)
                positions = torch.arange(row.shape[1], device=model.device)[None]
                logits = cast("Any", model)(input_ids=row, position_ids=positions, use_cache=False).logits
                logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                theirs = logprobs.gather(1, row[0, len(prompt) :, None])[:, 0]
                ours = torch.tensor(answer.logprobs, device=model.device)
                # How far a drawn token is below the likeliest.
                missed = (logprobs.max(dim=-1).values - theirs).max()
                largest = max(largest, float((ours - theirs).abs().max()), float(missed))
    drawn_tokens = sum(len(answer.tokens) for answer in answers)
    return rounding(f"the engine `torch` samples incorrectly from `{kind}`", largest, model.dtype, drawn_tokens)
