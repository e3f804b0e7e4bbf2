"""The child process of a scorer, which reads batches of answers with a time limit as pickled lines, and writes a
verdict for each answer as a JSON line.
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
from recipes.language.rewards.functions import RewardAdapter, load_function, to_verdict
from recipes.language.rewards.matching.rules import RULES, Verdict, prepare_math
from recipes.language.rewards.programs import ProgramJudge
from recipes.language.rewards.right_answers import GOLDS, gold_verdict
from recipes.language.rewards.scoring import PROGRAMS, Item
from recipes.language.text.text_tokens import without_thought
from rlinf_core import RLinfError

Rule: TypeAlias = Callable[[Item], Verdict]
Send: TypeAlias = Callable[[int, dict[str, Any]], None]


# The delay after which an alarm that came during an import is repeated.
_AGAIN_SECONDS: Final = 0.05


class Judging(Protocol):
    """A rule that scores several answers concurrently."""

    async def result_of(self, item: Item, /) -> Verdict: ...


class _LimitReached(BaseException):
    """The end of an answer's time, raised by an alarm; not an `Exception`, so that no rule catches it."""


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Score batches from standard input until it ends.

    Args:
        kind: see `Scorer`.
        settings: see `Scorer`.
    """
    # Keep the output of a rule out of the verdicts, and the batches from it and the programs that it runs.
    answers, batches = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

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
    # Clients and semaphores of a function's module belong to one event loop.
    runner = asyncio.Runner()
    for line in batches:
        batch: tuple[list[Item], float] = pickle.loads(base64.b64decode(line))  # noqa: S301 - pickled by the scorer
        items, limit = batch
        if isinstance(rule, RewardAdapter) and rule.takes_lists:
            _score_lists(rule, items, tell)
        elif isinstance(rule, ProgramJudge) or (isinstance(rule, RewardAdapter) and rule.is_async):
            runner.run(_score_together(rule, items, limit, tell))
        else:
            for number, item in enumerate(items):
                # The parent ends a user's function with its process: an exception in the middle, such as in an import,
                # would leave a broken state.
                tell(number, _score(rule, item, None if isinstance(rule, RewardAdapter) else limit))


def _score(rule: Rule, item: Item, limit: float | None) -> dict[str, Any]:
    """Return the outcome of one answer. A limit interrupts Python code; the parent ends anything else."""

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
    """Score answers with one call; if it fails, one by one, so that a bad answer affects only itself."""
    try:
        results = function.results(items)
    except Exception as error:  # noqa: BLE001  see `_score`
        if len(items) == 1:
            send(0, _error(error))
            return
        for number, item in enumerate(items):
            send(number, _score(function, item, None))
        return
    for number, result in enumerate(results):
        # One by one, a function that compares answers would give others.
        try:
            outcome: dict[str, Any] = {"verdict": to_verdict(result)}
        except (TypeError, ValueError) as error:
            outcome = _error(error)
        send(number, outcome)


async def _score_together(function: Judging, items: Sequence[Item], limit: float, send: Send) -> None:
    """Score answers concurrently, as an asynchronous function waits for something else, such as a remote judge."""

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
    """Return the rule, with everything loaded that it needs, so that loading does not count as scoring time."""
    if kind == "reasoning_gym":
        task = ReasoningGym(settings["task"], 1, 0, settings.get("task_config"))
        return lambda item: Verdict(task.score(without_thought(item.text), item.row), "by reasoning-gym")
    if kind == PROGRAMS:
        return ProgramJudge(settings["seconds"], settings.get("memory", 256 << 20))
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
