"""Validation of external engines' answers before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from recipes.language.answers.sequences import FinishReason, Sequence
from recipes.language.engines.request_queue import Answer, StopTexts
from rlinf_core import RLinfError

# A log-probability up to this much above 0 is rounding.
_ROUNDING: Final = 1e-3
_SHOWN: Final = 40
_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    # vLLM's reasons for requests that it gave up.
    "abort": "aborted",
    "error": "aborted",
}


class EngineAnswerError(RLinfError):
    """An engine's answer that cannot be trained on; `help` is set if a setting is wrong."""


def checked_together(
    checks: Iterable[tuple[Answer, Callable[[], Sequence]]], *, worked: bool = False
) -> list[Sequence]:
    """Return answers that arrived together; an invalid answer fails without affecting the others.

    Args:
        checks: the requested answers, each with a function that validates it.
        worked: whether the engine has given valid answers before.

    Raises:
        EngineAnswerError: a setting is wrong, or no answer was ever valid.
    """
    sequences: list[Sequence] = []
    wrong: EngineAnswerError | None = None
    for answer, check in checks:
        try:
            sequences.append(check())
        except EngineAnswerError as error:
            if error.help:
                raise
            wrong = error
            sequences.append(answer.sequence(failure=f"{error.message}: {error.why}"))
    if wrong is not None and not worked and all(sequence.failed for sequence in sequences):
        raise wrong
    return sequences


def checked_sequence(
    answer: Answer,
    tokens: Any,
    logprobs: Any,
    reason: Any,
    version: int,
    stop_texts: StopTexts | None,
    engine: str,
    vocabulary: int,
) -> Sequence:
    """Validate an external engine's answer and convert it; tokens after a stop text are cut off.

    Args:
        answer: the requested answer.
        tokens, logprobs: the engine's tokens and log-probabilities.
        reason: the engine's finish reason, `stop`, `length`, `abort` or `error`.
        version: the version of the engine's weights.
        stop_texts: a finder of stop texts.
        engine: the engine's name in errors.
        vocabulary: the size of the model's vocabulary; 0: unknown.

    Raises:
        EngineAnswerError: there are too few or too many tokens, or values are not token ids or log-probabilities.
    """
    request, params = answer.request, answer.request.params

    def wrong(why: str, help: str = "") -> EngineAnswerError:
        return EngineAnswerError(
            f"{engine} returned an unusable answer to request `{request.request_id}`",
            why=why,
            help=help,
        )

    if not isinstance(tokens, list) or not all(
        type(token) is int and token >= 0 for token in cast("list[Any]", tokens)
    ):
        raise wrong("its tokens are not a list of integers", "the engine must return token ids")
    tokens = cast("list[int]", tokens)
    if vocabulary and tokens and max(tokens) >= vocabulary:
        raise wrong(
            f"it has the token {max(tokens)}; the model's tokens are 0 to {vocabulary - 1}",
            "the engine must serve the model of `actor.model.model_path`",
        )
    if not isinstance(logprobs, list) or len(cast("list[Any]", logprobs)) != len(tokens):
        count = len(cast("list[Any]", logprobs)) if isinstance(logprobs, list) else "no"
        raise wrong(f"{len(tokens)} tokens have {count} log-probabilities")
    logprobs = cast("list[Any]", logprobs)
    if not all(type(logprob) in (int, float) and -math.inf < logprob <= _ROUNDING for logprob in logprobs):
        raise wrong("a log-probability is missing, above 0, or not a finite number")
    if not isinstance(reason, str) or reason not in _REASONS:
        raise wrong(f"its finish reason is {repr(reason)[:_SHOWN]}, not stop or length")
    if len(tokens) > params.max_new_tokens:
        raise wrong(f"it has {len(tokens)} tokens; at most {params.max_new_tokens} were requested")
    finish = _REASONS[reason]
    if params.stop and stop_texts is not None:
        for count in range(max(1, params.min_new_tokens), len(tokens) + 1):
            if stop_texts.ended(tokens[:count], params.stop):
                tokens, logprobs, finish = tokens[:count], logprobs[:count], "stop"
                break
    least = {"stop": max(1, params.min_new_tokens), "length": params.max_new_tokens, "aborted": 0}[finish]
    if len(tokens) < least:
        raise wrong(
            f"it ended ({finish}) after {len(tokens)} tokens; at least {least} were requested",
            "the engine's own sequence limit may be lower than `runner.seq_length`" if finish == "length" else "",
        )
    failure = f"{engine} ended it for the reason {reason!r}" if finish == "aborted" else ""
    return answer.sequence(tuple(tokens), tuple(map(float, logprobs)), (version,) * len(tokens), finish, failure)
