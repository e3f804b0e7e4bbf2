"""The comparison of a model's own attention here with transformers' own, once, before anything depends on it.

An engine and a trainer that share a fault agree with each other. The reference is therefore a pass of each sequence by
itself, by transformers' eager attention.
"""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from recipes.language.models.attention import ATTENTION, PackedPlan, Segment
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from recipes.language.models.policy import AnswerModel

# What a model of transformers is compared with.
PLAIN: Final = "transformers' eager attention, one sequence at a time"
# Two answers to one prompt, as tokens.
_PROMPT, _ANSWER = 40, 24
# Largest difference of one log-probability that rounding explains.
LIMITS: Final = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


@contextmanager
def plain_attention(model: PreTrainedModel) -> Generator[None, None, None]:
    """Let a model that `use_plans` has prepared compute by transformers' eager attention in here."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)


def check_policy(policy: AnswerModel) -> Difference | None:
    """Compare a policy's log-probabilities of a packed row with those of its model, sequence by sequence.

    All ranks that share the weights call it together.

    Returns:
        The largest difference of a log-probability, in nats; None for a model without memory.

    Raises:
        ConfigError: they differ by more than rounding explains, or the model cannot be called so.
    """
    model = policy.causal
    if model.device.type == "meta":
        return None
    vocabulary: int = cast("Any", model.get_input_embeddings()).weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(vocabulary, (_PROMPT + 2 * _ANSWER,), generator=generator).to(model.device)
    prompt, answers = row[:_PROMPT], row[_PROMPT:].view(2, _ANSWER)
    kind = type(model).__name__

    def compared() -> tuple[Tensor, torch.dtype]:
        ours = _packed_logprobs(policy, row).view(2, _ANSWER)
        with plain_attention(model):
            theirs = torch.stack([_plain_logprobs(model, prompt, answer) for answer in answers])
        # Layers may compute in another type than that of the weights.
        return (ours - theirs).abs().max(), cast("Any", model.get_output_embeddings()).weight.dtype

    try:
        with torch.no_grad():
            difference, dtype = policy.computing(compared)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError(f"`{kind}` is not supported", why=why, help=_REMEDY) from error
    largest = float(difference)
    limit = LIMITS.get(dtype, max(LIMITS.values()))
    if not largest <= limit:
        raise ConfigError(
            f"`{kind}` is computed incorrectly: a log-probability differs by {largest:.2g} from {PLAIN}",
            why=f"rounding explains up to {limit:g}",
            help=_REMEDY,
        )
    return Difference(largest, limit, f"{2 * _ANSWER} tokens")


_REMEDY = "use a model family listed in docs/language-models.md, and report this one"


def _packed_logprobs(policy: AnswerModel, row: Tensor) -> Tensor:
    from recipes.language.models.packing import PackedRow

    first, second = _PROMPT, _PROMPT + _ANSWER
    plan = PackedPlan([Segment(0, _PROMPT), Segment(first, _ANSWER, 0), Segment(second, _ANSWER, 0)], row.device)
    before = [[_PROMPT - 1, *range(start, start + _ANSWER - 1)] for start in (first, second)]
    predictors = torch.tensor([place for answer in before for place in answer], device=row.device)
    return policy.answers(PackedRow(row[None], plan, predictors, row[_PROMPT:])).logprobs.float()


def _plain_logprobs(model: PreTrainedModel, prompt: Tensor, answer: Tensor) -> Tensor:
    tokens = torch.cat((prompt, answer))[None]
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    logits: Tensor = cast("Any", model)(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, answer[:, None])[:, 0]
