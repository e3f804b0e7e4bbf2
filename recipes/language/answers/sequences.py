"""Requests to generation engines, their results, and the scores of answers.

A bad end that the policy can cause gives a sample, graded by the state that was reached, or 0, and counted as
`exit/<status>`. An end that it cannot have caused is left out of its group and of every mean, and counted as
`failed/<cause>`. If the two cannot be distinguished, the work is repeated once on a healthy place; a second failure is
the policy's. The page about rewards lists every end and what precedes its counting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, cast

if TYPE_CHECKING:
    from recipes.language.config.language_config import LanguageConfig


# Logits divided by a smaller temperature may overflow a float32.
LEAST_TEMPERATURE: Final = 1e-6

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of an answer.

    Attributes:
        temperature: the divisor of the logits, 0 (always the most likely token) or at least `LEAST_TEMPERATURE`.
        top_k: how many of the most likely tokens may be drawn; -1: all.
        top_p: the total probability of the most likely tokens that may be drawn.
        max_new_tokens: the longest answer in tokens, with its ending token.
        min_new_tokens: the shortest answer in tokens, with its ending token.
        stop_token_ids: tokens that end an answer, besides the tokenizer's own.
        stop: texts that end an answer and are part of it.
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
            (
                isinstance(cast("object", self.stop), str),
                f"`stop` is the text {self.stop!r}; it must be a tuple of texts",
            ),
            ("" in self.stop, "`stop` has an empty text, which would end every answer"),
        ):
            if wrong:
                raise ValueError(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The tokens of an answer that were sampled earlier, as in `Sequence`; the answer continues after them.

    Attributes:
        tokens: token ids, fewer than `max_new_tokens`, and none that ends the answer.
        logprobs: the log-probability of each token.
        versions: the version of the weights that drew each token.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Prompts to answer.

    Attributes:
        request_id: chosen by the caller, and returned with every answer.
        prompt: token ids, at least one.
        params: the sampling settings.
        group_size: the number of answers.
        priority: the rank among waiting requests; the smallest goes first.
        sample_offset: the number of the first answer, for a request of a part of a group.
        metadata: returned with every answer.
        begun: the tokens so far, the same for every answer, for engines that continue answers.
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
        """The context of the next token: the prompt and the answer so far."""
        return self.prompt + self.begun.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """An answer.

    Attributes:
        request_id: the id of the request.
        sample: the answer's number within the group.
        prompt: token ids.
        tokens: token ids of the answer, with its ending token.
        logprobs: log-probability of each token under the policy that drew it, at the sampling temperature and before
            `top_k` and `top_p`.
        versions: version of the weights that drew each token.
        finish_reason: `stop` at an ending token or text, `length` at a limit, or `aborted`.
        seconds: seconds from the engine's acceptance of the request to the end of the answer.
        metadata: the metadata of the request.
        trained: whether each of `tokens` is trained on; empty: all are. Text of a tool between two turns is not, and
            has log-probability and version 0.
        rewards: the part of the reward that came with each token, before the answer's end; empty: none.
        failure: why the engine, not the policy, failed to finish the answer, which is `aborted`; "" else.
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
        """Whether the engine failed to answer, so that this is no sample."""
        return bool(self.failure)

    @property
    def drawn(self) -> int:
        """Number of tokens that the model drew."""
        return sum(self.trained) if self.trained else len(self.tokens)

    @property
    def drawn_versions(self) -> list[int]:
        """Version of the weights that drew each such token."""
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
    """Return a sequence that no engine drew, with zero log-probabilities and versions."""
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
    written: dict[str, Any] = {**dict(config.rollout.sampling_params), "temperature": temperature, "seed": seed}
    return SamplingParams(**written)


class Exit(StrEnum):
    """A bad end that the policy can cause; the answer is a sample."""

    TURNS = "turns"
    TOKENS = "tokens"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    ERROR = "error"
    CRASH = "crash"
    JUDGE = "judge"


class Cause(StrEnum):
    """A failure that the policy cannot have caused; the answer is no sample."""

    ENGINE = "engine"
    TOOL = "tool"
    ERROR = "error"
    TIMEOUT = "timeout"
    CRASH = "crash"
    JUDGE = "judge"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer: right, wrong, or failed.

    Attributes:
        reward: the reward for training; for an answer that could not be scored, `incorrect_reward`, for display only.
        reason: the explanation of the score.
        parts: further metrics by name.
        failure: the `Cause` why the answer could not be scored; "" else.
        correct: whether the answer is right, regardless of training penalties.
        exit: the `Exit`, a bad end that the policy can have caused; "" else.
    """

    reward: float
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    correct: bool = False
    exit: str = ""

    @property
    def failed(self) -> bool:
        """Whether the answer could not be scored, and so is no sample."""
        return bool(self.failure)


# The exit of an answer whose scoring failed twice, while the scorer works for another answer.
EXIT_OF_SCORING: Final = {
    Cause.TIMEOUT: Exit.TIME_LIMIT,
    Cause.ERROR: Exit.ERROR,
    Cause.CRASH: Exit.CRASH,
}
