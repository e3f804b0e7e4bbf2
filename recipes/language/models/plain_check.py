"""A start-up check of rows, masks and caches against passes of one sequence at a time.

Engine and trainer would agree if they shared a fault. The reference is therefore a pass of each sequence alone, by
transformers' eager attention, without cache, mask or padding.
"""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from recipes.language.models.packing import RowLayout
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from recipes.language.models.policy import AnswerModel

# The reference of comparisons, for messages.
PLAIN: Final = "transformers' eager attention, one sequence at a time"
# The lengths of the prompt and of its answers, in tokens.
_PROMPT, _ANSWERS = 40, (24, 17)
# The largest difference of a log-probability that rounding explains, in nats.
LIMITS: Final = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


@contextmanager
def plain_attention(model: PreTrainedModel) -> Generator[None, None, None]:
    """Make a model use transformers' eager attention within the block."""
    before: str = cast("Any", model.config)._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_policy(policy: AnswerModel) -> Difference | None:
    """Compare a policy's log-probabilities of packed rows with those of its model, sequence by sequence.

    Collective: all ranks that share the weights call it together.

    Returns:
        The largest difference of a log-probability, in nats; None for a model without memory.

    Raises:
        ConfigError: the log-probabilities differ by more than rounding, or the model's interface is not supported.
    """
    model = policy.causal
    if model.device.type == "meta":
        return None
    vocabulary: int = cast("Any", model.get_input_embeddings()).weight.shape[0]
    row = torch.randint(vocabulary, (_PROMPT + sum(_ANSWERS),), generator=torch.Generator().manual_seed(0))
    answers = row[_PROMPT:].split(list(_ANSWERS))
    sequences = [torch.cat((row[:_PROMPT], answer)).to(model.device) for answer in answers]
    kind = type(model).__name__

    def compared() -> tuple[Tensor, torch.dtype]:
        with plain_attention(model):
            theirs = torch.cat([_plain_logprobs(model, sequence) for sequence in sequences])
        kinds = (True, False) if policy.takes_masks(_PROMPT + max(_ANSWERS)) else (False,)
        apart = [(_row_logprobs(policy, sequences, masks) - theirs).abs().max() for masks in kinds]
        # Read the type here: layers may compute in another type than the stored weights'.
        return torch.stack(apart).max(), cast("Any", model.get_output_embeddings()).weight.dtype

    with refusing(f"`{kind}` is not supported"), torch.no_grad():
        difference, dtype = policy.computing(compared)
    return rounding(f"`{kind}` is computed incorrectly", float(difference), dtype, sum(_ANSWERS))


_REMEDY = "use a model family listed in docs/language-models.md, and report this one"


@contextmanager
def refusing(message: str) -> Generator[None, None, None]:
    """Turn the errors of a model with an unsupported interface into a ConfigError with this message."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError(message, why=why, help=_REMEDY) from error


def rounding(message: str, largest: float, dtype: torch.dtype, tokens: int) -> Difference:
    """Return the largest difference of a log-probability, if rounding explains it.

    Raises:
        ConfigError: the difference exceeds rounding; `message` begins the error.
    """
    limit = LIMITS.get(dtype, max(LIMITS.values()))
    if not largest <= limit:
        raise ConfigError(
            f"{message}: a log-probability differs by {largest:.2g} from {PLAIN}",
            why=f"rounding explains up to {limit:g}",
            help=_REMEDY,
        )
    return Difference(largest, limit, f"{tokens} tokens")


def _row_logprobs(policy: AnswerModel, sequences: list[Tensor], masks: bool) -> Tensor:
    layout = RowLayout([sequence[:-1].tolist() for sequence in sequences], masks=masks)
    predictors = torch.cat([layout.places(number)[_PROMPT - 1 :] for number in range(len(sequences))])
    targets = torch.cat([sequence[_PROMPT:] for sequence in sequences])
    return policy.answers(layout.rows(predictors, targets, targets.device)).logprobs.float()


def _plain_logprobs(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    positions = torch.arange(len(sequence), device=sequence.device)[None]
    logits: Tensor = cast("Any", model)(input_ids=sequence[None], position_ids=positions, use_cache=False).logits
    answer = sequence[_PROMPT:, None]
    return logits[0, _PROMPT - 1 : -1].float().log_softmax(-1).gather(1, answer)[:, 0]
