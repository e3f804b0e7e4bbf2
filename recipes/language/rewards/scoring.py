"""Scoring in processes of their own: an answer that hangs or kills its process costs itself and nothing else."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self, cast

from recipes.language.rewards.rules import RULES, Verdict
from rlinf_core.errors import ConfigError

# Loading math-verify or a user's module takes seconds on a busy machine, once per process.
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An answer to score; everything in it is plain data.

    Attributes:
        text: the answer.
        answer: the right one.
        tokens: ids of the answer.
        row: the problem, as its source has it.
    """

    text: str
    answer: str
    tokens: Sequence[int] = ()
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of an answer.

    Attributes:
        reward: number that is learned from.
        reason: what it was judged by.
        parts: further figures by name.
        failure: `timeout`, `error` or `crash` where it could not be scored; "" else.
    """

    reward: float
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str = ""


class Scorer:
    """Scores answers by a rule, a task of reasoning-gym, or a function of the user's.

    Rules that end for sure run in this process; others in one child, which is killed and started anew when an answer
    takes longer than `timeout`.

    Args:
        kind: name of a rule, `reasoning_gym`, or `package.module:function`.
        correct: reward of a right answer.
        incorrect: reward of any other, and of one that could not be scored.
        timeout: seconds for one answer.
        settings: of the kind: `task` and `task_config` of reasoning-gym.
    """

    def __init__(
        self,
        kind: str,
        *,
        correct: float = 1.0,
        incorrect: float = 0.0,
        timeout: float = 5.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._kind = kind
        self._rewards = incorrect, correct
        self._timeout = timeout
        self._settings = dict(settings or {})
        self._rule = RULES[kind] if kind in RULES and kind != "math" else None
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def score(self, item: Item) -> Score:
        """Return the reward of an answer; whatever goes wrong is told in it and raises nothing.

        Raises:
            ConfigError: the rule itself cannot be loaded.
        """
        if self._rule is not None:
            return self._score_of(self._rule(item.text, item.answer))
        reply = self._ask(item)
        if "verdict" in reply:
            right, reason, parts = reply["verdict"]
            return self._score_of(Verdict(right, reason, parts))
        return Score(self._rewards[0], reply["reason"], failure=reply["failure"])

    def _score_of(self, verdict: Verdict) -> Score:
        incorrect, correct = self._rewards
        if not math.isfinite(verdict.right):
            return Score(incorrect, f"the reward is {verdict.right}", failure="error")
        if self._kind in RULES or self._kind == "reasoning_gym":
            return Score(incorrect + verdict.right * (correct - incorrect), verdict.reason, verdict.parts)
        return Score(verdict.right, verdict.reason, verdict.parts)

    def _ask(self, item: Item) -> dict[str, Any]:
        child = self._ready()
        assert child.stdin is not None  # both ends are pipes
        question = {"text": item.text, "answer": item.answer, "tokens": list(item.tokens), "row": _plain(item.row)}
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            reply = self._reply(child, time.monotonic() + self._timeout)
        except (BrokenPipeError, EOFError):
            code = self._end()
            return {"failure": "crash", "reason": f"scoring ended its process with exit code {code}"}
        if reply is None:
            self._end()
            return {"failure": "timeout", "reason": f"scoring took longer than {self._timeout:g} s"}
        return reply

    def _ready(self) -> subprocess.Popen[bytes]:
        """Return the child, started where there is none."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        command = [sys.executable, "-m", "recipes.language.rewards.child", self._kind, json.dumps(self._settings)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            reply = self._reply(self._child, time.monotonic() + _START_SECONDS)
        except EOFError:
            code = self._end()
            raise ConfigError(f"`reward_type: {self._kind}` cannot be loaded", why=f"exit code {code}") from None
        if reply is None or "fault" in reply:
            self._end()
            why = reply["fault"] if reply else f"it was not ready within {_START_SECONDS:g} s"
            raise ConfigError(f"`reward_type: {self._kind}` cannot be loaded", why=why)
        return self._child

    def _reply(self, child: subprocess.Popen[bytes], deadline: float) -> dict[str, Any] | None:
        """Return the child's next line as data; None at the deadline.

        Raises:
            EOFError: the child has ended.
        """
        output = cast("IO[bytes]", child.stdout)
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                return None
            piece = os.read(output.fileno(), 1 << 16)
            if not piece:
                raise EOFError
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _end(self) -> int | None:
        """Kill the child with all that it started, and return its exit code."""
        child, self._child, self._rest = self._child, None, b""
        if child is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return child.wait()

    def close(self) -> None:
        """End the child. May be called twice."""
        self._end()


def load_function(name: str) -> Callable[..., Any]:
    """Return the reward function that `package.module:function` names.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the reward function `{name}` cannot be imported", why=str(error)) from None
    if not callable(found):
        raise ConfigError(f"`{name}` is no function", help="give `package.module:function`")
    return cast("Callable[..., Any]", found)


def call_function(function: Callable[..., Any], item: Item) -> Verdict:
    """Return the verdict of a user's function.

    It is called with those of `prompt_row`, `text`, `answer`, `tokens` and `row` that it names, and returns a number,
    or a mapping with `reward` and further numbers, which become metrics.

    Raises:
        TypeError: it returns something else.
    """
    offered = {"text": item.text, "answer": item.answer, "tokens": list(item.tokens), "row": item.row}
    parameters = inspect.signature(function).parameters
    named = {name: value for name, value in offered.items() if name in parameters}
    result = function(**named) if named else function(item.text, item.answer)
    if inspect.iscoroutine(result):
        import asyncio

        result = asyncio.run(result)
    if isinstance(result, Mapping):
        figures = {str(name): float(value) for name, value in cast("Mapping[Any, Any]", result).items()}
        if "reward" not in figures:
            raise TypeError("the mapping that the reward function returned has no `reward`")
        return Verdict(figures.pop("reward"), "by the function", figures)
    return Verdict(float(result), "by the function")


def _plain(row: Mapping[str, Any]) -> Any:
    """Return a row as JSON can carry it; what it cannot becomes text."""
    return json.loads(json.dumps(row, default=str))
