"""The child process of a scorer: reads answers as JSON lines, writes verdicts as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from recipes.language.data.sources import ReasoningGym
from recipes.language.rewards.rules import RULES, Verdict
from recipes.language.rewards.scoring import Item, call_function, load_function
from rlinf_core.errors import RLinfError


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Score lines of standard input until it ends."""
    # What a rule prints must not come between the verdicts.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**data: Any) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    try:
        score = _rule(kind, settings)
    except RLinfError as error:
        tell(fault=error.message)
        return
    tell(ready=True)
    for line in sys.stdin.buffer:
        item = Item(**json.loads(line))
        try:
            tell(verdict=score(item))
        except Exception as error:  # noqa: BLE001  a rule may fail in any way; the answer's score says how
            tell(failure="error", reason=f"{type(error).__name__}: {error}"[:200])


def _rule(kind: str, settings: dict[str, Any]) -> Callable[[Item], Verdict]:
    if kind == "reasoning_gym":
        task = ReasoningGym(settings["task"], 1, 0, settings.get("task_config"))
        return lambda item: Verdict(task.score(item.text, item.row), "by reasoning-gym")
    if kind in RULES:
        return lambda item: RULES[kind](item.text, item.answer)
    function = load_function(kind)
    return lambda item: call_function(function, item)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
