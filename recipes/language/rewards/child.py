"""The child process of a scorer: reads batches of answers as JSON lines, writes a verdict for each as a JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from recipes.language.data.problem_sources import ReasoningGym
from recipes.language.rewards.functions import RewardAdapter, load_function
from recipes.language.rewards.rules import RULES, Verdict, prepare_math
from recipes.language.rewards.scoring import Item
from rlinf_core import RLinfError

Rule: TypeAlias = Callable[[Item], Verdict]
Tell: TypeAlias = Callable[[int, dict[str, Any]], None]


class _LimitReached(BaseException):
    """The time limit of an answer, raised by an alarm; not an `Exception`, so that no rule catches it."""


def serve(kind: str, limit: float, settings: dict[str, Any]) -> None:
    """Score lines of standard input until it ends.

    Args:
        kind: see `Scorer`.
        limit: seconds for one answer; the parent ends what outlasts it.
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
        write({"fault": error.message})
        return
    concurrent = isinstance(rule, RewardAdapter) and rule.is_async
    write({"ready": True, "concurrent": concurrent})
    for line in sys.stdin.buffer:
        items = [Item(**each) for each in json.loads(line)]
        if isinstance(rule, RewardAdapter) and rule.is_async:
            asyncio.run(_score_together(rule, items, limit, tell))
        else:
            for number, item in enumerate(items):
                tell(number, _score(rule, item, limit))


def _score(rule: Rule, item: Item, limit: float) -> dict[str, Any]:
    """Return the outcome of one answer. Python code is interrupted at the limit; the parent ends everything else."""

    def stop(*_: Any) -> None:
        raise _LimitReached

    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            verdict = rule(item)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _LimitReached:
        return _timeout(limit)
    except Exception as error:  # noqa: BLE001  a rule may fail in any way; the answer's score says how
        return _error(error)
    return {"verdict": verdict}


async def _score_together(function: RewardAdapter, items: Sequence[Item], limit: float, tell: Tell) -> None:
    """Score answers at the same time: an asynchronous function waits for others, such as a judge behind a network."""

    async def one(number: int, item: Item) -> None:
        try:
            tell(number, {"verdict": await asyncio.wait_for(function.result_of(item), limit)})
        except TimeoutError:
            tell(number, _timeout(limit))
        except Exception as error:  # noqa: BLE001  see `_score`
            tell(number, _error(error))

    await asyncio.gather(*(one(number, item) for number, item in enumerate(items)))


def _timeout(limit: float) -> dict[str, Any]:
    return {"failure": "timeout", "reason": f"scoring took longer than {limit:g} s"}


def _error(error: Exception) -> dict[str, Any]:
    return {"failure": "error", "reason": f"{type(error).__name__}: {error}"[:200]}


def _rule(kind: str, settings: dict[str, Any]) -> Rule:
    """Return the rule, ready to score: whatever it loads is loaded here, outside the limit of an answer."""
    if kind == "reasoning_gym":
        task = ReasoningGym(settings["task"], 1, 0, settings.get("task_config"))
        return lambda item: Verdict(task.score(item.text, item.row), "by reasoning-gym")
    if kind in RULES:
        prepare_math()
        return lambda item: RULES[kind](item.text, item.answer)
    return RewardAdapter(load_function(kind))


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
