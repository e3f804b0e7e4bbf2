"""The child process of a scorer: reads batches of answers with their time limit as pickled lines, and writes a verdict
for each answer as a JSON line.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Protocol, TypeAlias

from recipes.language.data.problem_sources import ReasoningGym
from recipes.language.data.text_tokens import without_thought
from recipes.language.rewards.functions import RewardAdapter, load_function
from recipes.language.rewards.matching.rules import RULES, Verdict, prepare_math
from recipes.language.rewards.programs import ProgramJudge
from recipes.language.rewards.right_answers import GOLDS, gold_verdict
from recipes.language.rewards.scoring import PROGRAMS, Item
from rlinf_core import RLinfError

Rule: TypeAlias = Callable[[Item], Verdict]
Send: TypeAlias = Callable[[int, dict[str, Any]], None]


# When an alarm that came during an import rings again.
_AGAIN_SECONDS: Final = 0.05


class Judging(Protocol):
    """Something that scores an answer while it waits for others."""

    async def result_of(self, item: Item, /) -> Verdict: ...


class _LimitReached(BaseException):
    """The time limit of an answer, raised by an alarm; not an `Exception`, so that no rule catches it."""


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Score lines of standard input until it ends.

    Args:
        kind: see `Scorer`.
        settings: see `Scorer`.
    """
    # What a rule prints must not come between the verdicts.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    def tell(number: int, outcome: dict[str, Any]) -> None:
        write({"number": number, **outcome})

    try:
        rule = _rule(kind, settings)
    except RLinfError as error:
        write({"fault": error.message, "why": error.why, "help": error.help})
        return
    lists = isinstance(rule, RewardAdapter) and rule.takes_lists
    is_async = isinstance(rule, ProgramJudge) or (isinstance(rule, RewardAdapter) and rule.is_async and not lists)
    convention = rule.convention if isinstance(rule, RewardAdapter) else ""
    write({"ready": True, "together": lists or is_async, "async": is_async, "convention": convention})
    for line in sys.stdin.buffer:
        batch: tuple[list[Item], float] = pickle.loads(base64.b64decode(line))  # noqa: S301 - pickled by the scorer
        items, limit = batch
        if isinstance(rule, RewardAdapter) and rule.takes_lists:
            _score_lists(rule, items, tell)
        elif isinstance(rule, ProgramJudge) or (isinstance(rule, RewardAdapter) and rule.is_async):
            asyncio.run(_score_together(rule, items, limit, tell))
        else:
            for number, item in enumerate(items):
                # A user's function is ended with its process: an exception in the middle of what it does, such
                # as an import, would leave half of it behind.
                tell(number, _score(rule, item, None if isinstance(rule, RewardAdapter) else limit))


def _score(rule: Rule, item: Item, limit: float | None) -> dict[str, Any]:
    """Return the outcome of one answer. With a limit, Python code is interrupted there; the parent ends the rest."""

    def stop(_signal: int, frame: FrameType | None) -> None:
        if _imports(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            raise _LimitReached

    try:
        if limit is not None:
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            verdict = rule(item)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _LimitReached:
        return _timeout(limit or 0.0)
    except Exception as error:  # noqa: BLE001  a rule may fail in any way; the answer's score says how
        return _error(error)
    return {"verdict": verdict}


def _imports(frame: FrameType | None) -> bool:
    """Return whether an import is in progress in a frame or one of its callers."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _score_lists(function: RewardAdapter, items: Sequence[Item], send: Send) -> None:
    """Score answers with one call; on failure, one by one, so that a bad answer affects only itself."""
    try:
        for number, verdict in enumerate(function.judged(items)):
            send(number, {"verdict": verdict})
    except Exception as error:  # noqa: BLE001  see `_score`
        if len(items) == 1:
            send(0, _error(error))
            return
        for number, item in enumerate(items):
            send(number, _score(function, item, None))


async def _score_together(function: Judging, items: Sequence[Item], limit: float, send: Send) -> None:
    """Score answers at the same time: an asynchronous function waits for others, such as a judge behind a network."""

    async def one(number: int, item: Item) -> None:
        try:
            send(number, {"verdict": await asyncio.wait_for(function.result_of(item), limit)})
        except TimeoutError:
            send(number, _timeout(limit))
        except Exception as error:  # noqa: BLE001  see `_score`
            send(number, _error(error))

    await asyncio.gather(*(one(number, item) for number, item in enumerate(items)))


def _timeout(limit: float) -> dict[str, Any]:
    return {"failure": "timeout", "reason": f"scoring took longer than {limit:g} s"}


def _error(error: Exception) -> dict[str, Any]:
    return {"failure": "error", "reason": f"{type(error).__name__}: {error}"[:200]}


def _rule(kind: str, settings: dict[str, Any]) -> Rule | ProgramJudge:
    """Return the rule, ready to score: whatever it loads is loaded here, outside the limit of an answer."""
    if kind == "reasoning_gym":
        task = ReasoningGym(settings["task"], 1, 0, settings.get("task_config"))
        return lambda item: Verdict(task.score(without_thought(item.text), item.row), "by reasoning-gym")
    if kind == PROGRAMS:
        return ProgramJudge(settings["seconds"], settings["memory"])
    if kind in RULES:
        prepare_math()
        return lambda item: RULES[kind](item.text, item.answer)
    if kind == GOLDS:
        if settings["rule"] == "math":
            prepare_math()
        return lambda item: gold_verdict(settings["rule"], item.answer)
    return RewardAdapter(load_function(kind), kind)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
