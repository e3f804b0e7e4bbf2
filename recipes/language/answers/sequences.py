"""Requests to generation engines, and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from recipes.language.config.language_config import LanguageConfig


# Logits divided by less may exceed what a float32 holds.
LEAST_TEMPERATURE: Final = 1e-6

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The settings by which the tokens of an answer are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, and others are at least `LEAST_TEMPERATURE`.
        top_k: only that many of the most likely tokens; -1: all.
        top_p: only the most likely tokens that have this probability together.
        max_new_tokens: longest answer, its ending token counted.
        min_new_tokens: no ending token before that many.
        stop_token_ids: tokens that end an answer, besides the tokenizer's own.
        stop: texts that end an answer; they are part of it.
        seed: the seed of the draws.

    Raises:
        ValueError: a value makes no sense.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for wrong, said in (
            (
                self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf,
                f"`temperature` is {self.temperature}; it must be 0 or at least {LEAST_TEMPERATURE:g}",
            ),
            (self.top_k < 1 and self.top_k != -1, f"`top_k` is {self.top_k}; it must be at least 1, or -1 for all"),
            (not 0 < self.top_p <= 1, f"`top_p` is {self.top_p}; it must be above 0 and at most 1"),
            (self.max_new_tokens < 1, f"`max_new_tokens` is {self.max_new_tokens}; it must be at least 1"),
            (
                not 0 <= self.min_new_tokens <= self.max_new_tokens,
                (
                    f"`min_new_tokens` is {self.min_new_tokens}; it must be from 0 to `max_new_tokens`"
                    f" {self.max_new_tokens}"
                ),
            ),
            ("" in self.stop, "`stop` has an empty text, which would end every answer"),
        ):
            if wrong:
                raise ValueError(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The tokens of an answer sampled earlier, as in `Sequence`: the answer continues after them.

    Attributes:
        tokens: token ids, fewer than `max_new_tokens`, and none that ends the answer.
        logprobs: the log-probabilities of each token.
        versions: the versions of the weights that drew each token.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Prompts to answer.

    Attributes:
        request_id: chosen by the caller; comes back with every answer.
        prompt: token ids, at least one.
        params: how tokens are drawn.
        group_size: the number of answers.
        priority: smaller goes first where requests have to wait for room.
        sample_offset: number of the group's first answer, for a request that asks for a part of a group.
        metadata: comes back with every answer.
        begun: the tokens of every answer so far, for engines that continue answers.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    group_size: int = 1
    priority: int = 0
    sample_offset: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begun: Begun = field(default_factory=Begun)

    @property
    def context(self) -> tuple[int, ...]:
        """The context of the next token: the prompt, and the answer so far."""
        return self.prompt + self.begun.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """An answer.

    Attributes:
        request_id: the id of the request.
        sample: its number within the group.
        prompt: token ids.
        tokens: token ids of the answer, its ending token included.
        logprobs: log-probability of each token under the policy that drew it, at the sampling temperature and before
            `top_k` and `top_p`.
        versions: version of the weights that drew each token.
        finish_reason: `stop` by an ending token or text, `length`, or `aborted` before its end.
        seconds: the seconds from the moment at which the engine took the request up to the end of the answer.
        metadata: the metadata of the request.
        trained: which of `tokens` are trained on, where not all are: what a tool said between two turns is not, and
            has log-probability and version 0. Empty: all.
        rewards: the part of the answer's reward that came with each token, before the answer's end; empty: none.
        failure: why the engine gave no whole answer, where that is not a fault of the policy's; it is `aborted` then.
    """

    request_id: str
    sample: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    seconds: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trained: tuple[bool, ...] = ()
    rewards: tuple[float, ...] = ()
    failure: str = ""

    @property
    def failed(self) -> bool:
        """Whether the engine failed to answer: it is not a sample then."""
        return bool(self.failure)

    @property
    def drawn(self) -> int:
        """Number of the tokens that the model drew."""
        return sum(self.trained) if self.trained else len(self.tokens)

    @property
    def drawn_versions(self) -> list[int]:
        """Versions of the weights that drew those tokens."""
        if not self.trained:
            return list(self.versions)
        return [version for version, drawn in zip(self.versions, self.trained, strict=True) if drawn]


def undrawn(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    trained: tuple[bool, ...] = (),
    *,
    sample: int = 0,
    finish_reason: FinishReason = "stop",
    failure: str = "",
) -> Sequence:
    """Return an answer that no engine drew; see `Sequence`."""
    return Sequence(
        request_id="",
        sample=sample,
        prompt=prompt,
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        versions=(0,) * len(tokens),
        finish_reason=finish_reason,
        trained=trained,
        failure=failure,
    )


def sampling_params(config: LanguageConfig, temperature: float, seed: int) -> SamplingParams:
    """Return the sampling parameters of `rollout.sampling_params`, with another temperature.

    Raises:
        ValueError: a value makes no sense; its message begins with the name of the key.
    """
    sampling = config.rollout.sampling_params
    return SamplingParams(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        seed=seed,
    )
