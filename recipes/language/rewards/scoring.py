"""Scoring in processes of their own: an answer that hangs or kills its process costs itself and nothing else."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Any, Final, Self, cast

from recipes.language.rewards.rules import RULES, Verdict
from rlinf_core import ConfigError

# Loading math-verify or a user's module takes seconds on a busy machine, once per process.
_START_SECONDS: Final = 120.0
# The child interrupts what takes too long; it is ended itself when that has had no effect for so long.
_GRACE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An answer to score; everything in it is plain data.

    Attributes:
        prompt: the question.
        text: the answer.
        answer: the right one.
        tokens: ids of the answer.
        row: the problem, as its source has it.
    """

    text: str
    answer: str
    prompt: str = ""
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

    Rules that end for sure run in this process, others in one child. An answer that takes longer than `timeout` is
    interrupted there; where that has no effect, the child is killed and started anew.

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
        timeout: float = 1.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._kind = kind
        self._rewards = incorrect, correct
        self._timeout = timeout
        self._settings = dict(settings or {})
        self._rule = RULES[kind] if kind in RULES and kind != "math" else None
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._concurrent = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def score(self, item: Item) -> Score:
        """Return the reward of an answer; see `score_all`."""
        return self.score_all([item])[0]

    def score_all(self, items: Sequence[Item]) -> list[Score]:
        """Return the rewards of answers; whatever goes wrong is told in them and raises nothing.

        Raises:
            ConfigError: the rule itself cannot be loaded.
        """
        if self._rule is not None:
            rule = self._rule
            return [self._score_of(rule(item.text, item.answer)) for item in items]
        found: dict[int, Score] = {}
        whole = True
        while len(found) < len(items):
            left = [number for number in range(len(items)) if number not in found]
            self._ready()
            # Where an earlier round lost its process, one at a time tells which answer it is that ends it.
            sent = left if self._concurrent and whole else left[:1]
            scores = self._ask([items[number] for number in sent])
            whole = len(scores) == len(sent)
            found |= {sent[index]: score for index, score in scores.items()}
        return [found[number] for number in range(len(items))]

    def _ask(self, items: Sequence[Item]) -> dict[int, Score]:
        """Return the scores of answers that the child judges at the same time, by their numbers.

        Those that were under way when several of them hung or ended the process are left out; a single one is not.
        """
        child = self._ready()
        found: dict[int, Score] = {}
        failure, reason = "timeout", f"scoring took longer than {self._timeout:g} s"
        try:
            stdin = cast("IO[bytes]", child.stdin)
            stdin.write(json.dumps([asdict(each) for each in items], default=str).encode() + b"\n")
            stdin.flush()
            deadline = time.monotonic() + self._timeout + _GRACE_SECONDS
            while len(found) < len(items):
                reply = self._reply(child, deadline)
                if reply is None:
                    self._end()
                    break
                found[reply["number"]] = self._score_in(reply)
        except (BrokenPipeError, EOFError):
            failure, reason = "crash", f"scoring ended its process with exit code {self._end()}"
        if not found and len(items) == 1:
            found[0] = Score(self._rewards[0], reason, failure=failure)
        return found

    def _score_in(self, reply: Mapping[str, Any]) -> Score:
        if "verdict" not in reply:
            return Score(self._rewards[0], reply["reason"], failure=reply["failure"])
        right, reason, parts = reply["verdict"]
        return self._score_of(Verdict(right, reason, parts))

    def _score_of(self, verdict: Verdict) -> Score:
        incorrect, correct = self._rewards
        if not math.isfinite(verdict.right):
            return Score(incorrect, f"the reward is {verdict.right}", failure="error")
        if self._kind in RULES or self._kind == "reasoning_gym":
            return Score(incorrect + verdict.right * (correct - incorrect), verdict.reason, verdict.parts)
        return Score(verdict.right, verdict.reason, verdict.parts)

    def _ready(self) -> subprocess.Popen[bytes]:
        """Return the child, started where there is none."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        command = [sys.executable, "-m", "recipes.language.rewards.child", self._kind, str(self._timeout)]
        command.append(json.dumps(self._settings))
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
        self._concurrent = bool(reply["concurrent"])
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
