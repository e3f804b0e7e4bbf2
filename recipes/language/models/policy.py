"""Causal language models as policies and critics, without a tensor of tokens x vocabulary, and their start-up check.

Engine and trainer would agree if they shared a fault. The check's reference is therefore a pass of each sequence alone,
by transformers' eager attention, without cache, mask or padding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType] - a part has no type

from recipes.language.models.architecture import longest_exact, sees_all_before, takes_masks, use_exact_attention
from recipes.language.models.packing import PackedRows, RowLayout
from recipes.training.huggingface import checkpoint_layers
from recipes.training.weight_sources import WeightSource
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CHUNK_NUMBERS = 1 << 25
# Methods besides `forward` that compute with the weights.
METHODS = ("computing",)
Result = TypeVar("Result")


class LogitRule(NamedTuple):
    """The steps from the product of hidden states and output matrix to a model's logits.

    Attributes:
        factor: the factor of the product (Cohere), or the inverse of a divisor (Granite).
        softcap: the bound of softcap * tanh(x / softcap) for logits x (Gemma); None: no bound.
    """

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Return the rule of a model's configuration."""
        factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        return cls(factor, getattr(config, "final_logit_softcapping", None))

    def logits(self, product: Tensor) -> Tensor:
        """Return the logits, with the shape and type of the product."""
        scaled = product if self.factor == 1 else product * self.factor
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


class AnswerEval(NamedTuple):
    """A policy's log-probabilities and entropies of answer tokens; both float32 [A].

    Attributes:
        logprobs: log-probability of each token.
        entropy: entropy of the distribution of each token; None if not requested.
    """

    logprobs: Tensor
    entropy: Tensor | None


class AnswerModel(nn.Module):
    """A causal language model that returns the last hidden states before answer tokens.

    Args:
        model: the model from transformers, possibly wrapped by peft for LoRA.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        causal = cast("Callable[[], PreTrainedModel]", getattr(model, "get_base_model", lambda: model))()
        use_exact_attention(causal)
        config = cast("Any", causal.config).get_text_config()
        self._longest = longest_exact(config)
        self._rule = LogitRule.of(config)
        self._causal = [causal]  # in a list: it is part of `model` already

    @property
    def causal(self) -> PreTrainedModel:
        """The model from transformers, without a LoRA wrapper."""
        return self._causal[0]

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers: the units of gathering shards, each of which computes in one type."""
        return decoder_layers(self.causal)

    def computing(self, function: Callable[[], Result]) -> Result:
        """Call a function that computes with the weights without `forward`; FSDP2 gathers them for it."""
        return function()

    def takes_masks(self, longest: int) -> bool:
        """Return whether rows of tokens may have a mask, see `RowLayout`.

        Args:
            longest: the length of the longest sequence in tokens.
        """
        return takes_masks(self.causal) and sees_all_before(cast("Any", self.causal.config).get_text_config(), longest)

    def states(self, rows: PackedRows) -> Tensor:
        """Return the hidden state from which each answer token is predicted, [A, W]."""
        if self._longest is not None and rows.longest > self._longest:
            raise ConfigError(
                f"a sequence has {rows.longest} tokens; beyond {self._longest} the model's rotary angles depend on"
                " the sequence length",
                help=f"write `runner.seq_length: {self._longest}` or less",
            )
        decoder = cast("Any", self.causal.get_decoder())
        masked: dict[str, Any] = {}
        if rows.mask is not None:
            if not self.takes_masks(rows.longest):
                raise ValueError(f"`{type(self.causal).__name__}` cannot compute rows with a mask")
            masked = {"attention_mask": rows.mask, "position_ids": rows.positions}
        hidden: Tensor = decoder(input_ids=rows.tokens, use_cache=False, **masked).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, rows.predictors)

    def answers(self, rows: PackedRows, temperature: float = 1.0, *, entropy: bool = False) -> AnswerEval:
        head = cast("nn.Linear", self.causal.get_output_embeddings())
        logprobs, entropies = chunked_logprobs(
            self.states(rows), head, rows.targets, temperature, entropy=entropy, rule=self._rule
        )
        return AnswerEval(logprobs, entropies)


class LanguagePolicy(AnswerModel):
    """A causal language model as a policy."""

    def forward(self, rows: PackedRows, temperature: float = 1.0, *, entropy: bool = False) -> AnswerEval:
        """Return the log-probabilities of the answers in packed rows.

        Args:
            rows: the sequences.
            temperature: the sampling temperature, by which logits are divided.
            entropy: whether to compute entropies, with gradients.
        """
        return self.answers(rows, temperature, entropy=entropy)


class ValueModel(AnswerModel):
    """A causal language model with a linear value head instead of logits. Initial values are 0.

    The head has float32 weights, and the learning rate `optim.value_lr` if set.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        causal = cast("Any", self.causal)
        config, head = causal.config, causal.get_output_embeddings()
        if head.weight is not causal.get_input_embeddings().weight:
            head.requires_grad_(False)
        self.value_head = nn.Linear(config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def blocks(self) -> list[nn.Module]:
        """See `AnswerModel`; also the value head."""
        return [*super().blocks, self.value_head]

    def forward(self, rows: PackedRows) -> Tensor:
        """Return the value before each answer token of packed rows, float32 [A]."""
        # Copy: FSDP2 does not support views of the outputs of its modules.
        return self.value_head(self.states(rows).float())[:, 0].clone()


def checkpoint_decoder(model: AnswerModel) -> None:
    """Make a model's layers recompute their activations in the backward pass instead of keeping them.

    Raises:
        ConfigError: the model's layers do not support this.
    """
    checkpoint_layers(decoder_layers(model.causal), type(model.causal).__name__)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model, a list in its decoder of as many modules as the configuration has layers.

    Raises:
        ConfigError: the model has no such list.
    """
    count: int = cast("Any", model.config).get_text_config().num_hidden_layers
    decoder = cast("nn.Module", cast("Any", model).get_decoder())
    for part in decoder.children():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return list(part)
    raise ConfigError(
        f"the decoder of `{type(model).__name__}` has no list of its {count} layers",
        help="use a model family listed in docs/language-models.md",
    )


def chunked_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    rule: LogitRule | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of tokens, and entropies, in chunks whose logits fit in 128 MB of float32.

    The backward pass recomputes logits if there are several chunks.

    Args:
        hidden: float [A, W].
        head: maps hidden states to logits [A, V].
        targets: int64 [A].
        temperature: the divisor of the logits; 0 counts as 1.
        entropy: whether to compute entropies.
        rule: the steps from the head's product to logits; None: no steps.

    Returns:
        log-probabilities, float32 [A], and entropies, float32 [A] or None.
    """
    weight = cast("Tensor", head.weight)
    size = max(1, CHUNK_NUMBERS // weight.shape[0])
    scale = temperature or 1.0

    def part(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = (rule or LogitRule()).logits(cast("Tensor", head(states))).float() / scale
        normalizer = logits.logsumexp(dim=-1)
        selected = logits.gather(1, wanted[:, None])[:, 0] - normalizer
        if not entropy:
            return selected, selected
        return selected, normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)

    pieces: list[tuple[Tensor, Tensor]] = []
    grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    for start in range(0, len(targets), size):
        states, wanted = hidden[start : start + size], targets[start : start + size]
        if grad and len(targets) > size:
            pieces.append(cast("tuple[Tensor, Tensor]", checkpoint(part, states, wanted, use_reentrant=False)))
        else:
            pieces.append(part(states, wanted))
    if not pieces:
        nothing = hidden.sum(dim=-1).float()
        return nothing, nothing if entropy else None
    logprobs = torch.cat([piece[0] for piece in pieces])
    return logprobs, torch.cat([piece[1] for piece in pieces]) if entropy else None


# The number of trained scalars.
_WIDTH = 8


class StandInLanguagePolicy(LanguagePolicy):
    """A policy with frozen weights of a model, and a few scalars that are trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.requires_grad_(False)
        self.base = nn.Parameter(torch.zeros(_WIDTH))

    @property
    def blocks(self) -> list[nn.Module]:
        """See `AnswerModel`: none, as no layer computes."""
        return []

    def forward(self, rows: PackedRows, temperature: float = 1.0, *, entropy: bool = False) -> AnswerEval:
        logprobs = self.base.float().mean() - torch.ones(len(rows.targets), device=self.base.device)
        return AnswerEval(logprobs, logprobs.detach().neg() if entropy else None)


class Zeros(WeightSource):
    """A source of zero weights."""

    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        return torch.zeros((count, *like.shape[1:]) if like.dim() else (), dtype=like.dtype)

    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        return None


# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


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
