"""Scoring in separate processes, so that an answer that hangs or kills its process affects no other."""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Protocol, Self

from recipes.language.answers.sequences import EXIT_OF_SCORING, Cause, Score
from recipes.language.data.problems import Problem
from recipes.language.rewards.matching.rules import RULES, Verdict
from recipes.language.sandbox.line_process import LineProcess
from rlinf_core import ConfigError
from rlinf_core.process.proc import stat

# Loading math-verify or a custom module may take many seconds on a busy machine.
_START_SECONDS: Final = 120.0
# The minimum time limit of the first call of a function, which may load something, such as a judge.
LOADING_SECONDS: Final = 60.0
# The number of first calls that may time out with this limit, in case they never return.
_FIRST_CALLS: Final = 2
# The seconds that the child has to interrupt itself at a limit, before it is killed.
_GRACE_SECONDS: Final = 1.0
# The default seconds for one answer: short for a rule, long for `FUNCTION_SECONDS`, as a function may ask a remote
# model.
RULE_SECONDS: Final = 5.0
# The kind of a scorer that runs tests on programs. Its `timeout` limits the processor time of a run; the wall-clock
# limit is for a group of answers, whose runs share the processors.
PROGRAMS: Final = "code"
_PROGRAMS_SECONDS: Final = 900.0
FUNCTION_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An answer to score, as plain data.

    Attributes:
        prompt: the question.
        text: the answer.
        answer: the reference answer.
        tokens: token ids of the answer.
        row: the problem's row in its source.
        messages: the question as messages, if given so.
        source_answer: the reference answer as its source has it, such as a number; None: the text.
    """

    text: str
    answer: str
    prompt: str = ""
    tokens: Sequence[int] = ()
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, Any]] = ()
    source_answer: Any = None

    @property
    def ground_truth(self) -> Any:
        """The reference answer as functions of verl, TRL and OpenRLHF get it."""
        return self.answer if self.source_answer is None else self.source_answer


def item_of(problem: Problem, text: str, tokens: Sequence[int] = ()) -> Item:
    """Return the item to score for an answer to a problem."""
    return Item(
        text=text,
        answer=problem.answer,
        prompt=problem.prompt,
        tokens=tokens,
        row=problem.row,
        messages=problem.messages,
        source_answer=problem.source_answer,
    )


class _PlainPickler(pickle.Pickler):
    """A pickler of rows for a function that writes subclasses of float and datetime as the plain types."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a subclass of float or datetime to its base."""
        if isinstance(obj, float) and type(obj) is not float:
            return float, (float(obj),)
        if isinstance(obj, datetime) and type(obj) is not datetime:
            return datetime.fromisoformat, (obj.isoformat(),)
        return NotImplemented


class AnswerScorer(Protocol):
    """The interface of scorers: a `Scorer`, or one that asks judges."""

    @property
    def convention(self) -> str: ...
    def start(self) -> object: ...
    def score_all(self, items: Sequence[Item]) -> list[Score]: ...
    def close(self) -> None: ...


class Scorer:
    """A scorer of answers by a rule, a task of reasoning-gym, or a custom function.

    Rules that always terminate run in this process, others in one child. An answer that takes longer than `timeout`
    fails; built-in rules are interrupted, while a function's child is killed and restarted. The first call of a child,
    which may load something, has `loading` seconds. An answer whose scoring fails is scored once more. If that fails,
    too, an answer that was scored before (or else the reference answer) decides: if it can be scored now, the failed
    answer is wrong, else it could not be scored. Programs run in separate sandboxes, and a failure outside of these is
    never their fault.

    Args:
        kind: the name of a rule, `reasoning_gym`, `code`, or `package.module:function`.
        correct: the reward of a right answer.
        incorrect: the reward of any other answer.
        timeout: seconds for one answer; for `code`, processor seconds of a run. None: `RULE_SECONDS` or
            `FUNCTION_SECONDS`.
        loading: the minimum seconds for the first call of a function.
        settings: the settings of the kind: `task` and `task_config` of reasoning-gym, `memory` of `code`.

    Attributes:
        convention: the convention by which a function is called, once it is loaded; "" for rules.
    """

    def __init__(
        self,
        kind: str,
        *,
        correct: float = 1.0,
        incorrect: float = 0.0,
        timeout: float | None = None,
        loading: float = LOADING_SECONDS,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._kind = kind
        self._rewards = incorrect, correct
        self._is_function = ":" in kind
        self._runs_programs = kind == PROGRAMS
        self._timeout = timeout or (FUNCTION_SECONDS if self._is_function else RULE_SECONDS)
        self._loading_limit = loading
        self._settings = dict(settings or {})
        if self._runs_programs:
            self._settings["seconds"], self._timeout = self._timeout, _PROGRAMS_SECONDS
        self._rule = RULES[kind] if kind in RULES and kind != "math" else None
        self._child: LineProcess | None = None
        self._together = self._is_async = False
        self.convention = ""
        # Whether the child has not scored yet, how many first calls timed out, and the longest successful first call.
        self._is_first = True
        self._slow_starts = 0
        self._loading: float | None = None
        # An answer that was scored successfully.
        self._scored: Item | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def score(self, item: Item) -> Score:
        """Return the score of an answer; see `score_all`."""
        return self.score_all([item])[0]

    def score_all(self, items: Sequence[Item]) -> list[Score]:
        """Return the scores of answers, which also report failures to score.

        Raises:
            ConfigError: the rule itself cannot be loaded.
        """
        if self._rule is not None:
            rule = self._rule
            return [self._score_of(rule(item.text, item.answer)) for item in items]
        scores: dict[int, Score] = {}
        again: set[int] = set()
        is_complete = True
        while len(scores) < len(items):
            left = [number for number in range(len(items)) if number not in scores]
            self._started()
            # If an earlier round lost its process, scoring one at a time identifies the fatal answer.
            sent = left if self._together and is_complete else left[:1]
            judged, loss = self._ask([items[number] for number in sent])
            is_complete = len(judged) == len(sent)
            outcomes = {sent[index]: score for index, score in judged.items()}
            if loss is not None and len(sent) == 1:
                outcomes[sent[0]] = loss
            for number, score in outcomes.items():
                # Retry once: a remote judge may be down, or the process killed by something else.
                if score.failure and number not in again:
                    again.add(number)
                else:
                    scores[number] = score
        self._scored = next((items[number] for number in scores if not scores[number].failure), self._scored)
        failed = [number for number in range(len(items)) if scores[number].failure]
        if failed and not self._runs_programs and self._works(items[failed[0]]):
            for number in failed:
                score = scores[number]
                scores[number] = Score(score.reward, score.reason, exit=EXIT_OF_SCORING[Cause(score.failure)])
        return [scores[number] for number in range(len(items))]

    def _works(self, failed: Item) -> bool:
        """Return whether another answer than the failed one can be scored now."""
        known = self._scored or replace(failed, text=failed.answer, tokens=())
        judged, loss = self._ask([known])
        return loss is None and not judged[0].failure

    def _ask(self, items: Sequence[Item]) -> tuple[dict[int, Score], Score | None]:
        """Return the scores by number of answers that the child judges together; if the child was lost, also the
        failure that an answer judged alone gets.
        """
        child = self._started()
        scores: dict[int, Score] = {}
        limit = self._limit(len(items))
        written = io.BytesIO()
        _PlainPickler(written).dump((list(items), limit))
        line = base64.b64encode(written.getvalue())
        began = time.monotonic()
        deadline = began + limit + (_GRACE_SECONDS if self._interrupts else 0.0)
        try:
            child.send(line, deadline)
            while len(scores) < len(items):
                reply = child.reply(deadline)
                scores[reply["number"]] = self._score_in(reply)
        except TimeoutError:
            stopped = stat(child.process.pid).is_stopped
            self._slow_starts += self._is_first
            self._end()
            if stopped:
                return scores, self._failed("crash", "the process that scored it was stopped")
            return scores, self._failed("timeout", f"scoring took longer than {limit:g} s")
        except EOFError:
            return scores, self._failed("crash", f"scoring ended its process with exit code {self._end()}")
        if self._is_first:
            self._is_first = False
            self._loading = max(self._loading or 0.0, time.monotonic() - began)
        return scores, None

    @property
    def _interrupts(self) -> bool:
        """Whether the child process itself enforces the time limit of an answer."""
        return self._is_async or not self._is_function

    def _limit(self, count: int) -> float:
        """Return the time limit for `count` answers that the child judges together."""
        limit = self._timeout * (count if self._together and not self._is_async else 1)
        if not (self._is_first and self._is_function):
            return limit
        if self._loading is not None:
            return limit + 2 * self._loading
        return max(limit, self._loading_limit) if self._slow_starts < _FIRST_CALLS else limit

    def _failed(self, failure: str, reason: str) -> Score:
        return Score(self._rewards[0], reason, failure=failure)

    def _score_in(self, reply: Mapping[str, Any]) -> Score:
        if "verdict" not in reply:
            return self._failed(reply["failure"], reply["reason"])
        return self._score_of(Verdict(*reply["verdict"]))

    def _score_of(self, verdict: Verdict) -> Score:
        incorrect, correct = self._rewards
        if not math.isfinite(verdict.right):
            return self._failed("error", f"the reward is {verdict.right}")
        if not self._is_function:
            reward = incorrect + verdict.right * (correct - incorrect)
            return Score(reward, verdict.reason, verdict.parts, correct=verdict.right >= 1, exit=verdict.exit)
        is_right = verdict.right >= correct if verdict.correct is None else verdict.correct
        return Score(verdict.right, verdict.reason, verdict.parts, correct=is_right)

    def start(self) -> subprocess.Popen[bytes] | None:
        """Return the child process, started if needed; None if rules run in this process.

        Raises:
            ConfigError: the rule or function cannot be loaded or called.
        """
        return None if self._rule is not None else self._started().process

    def _started(self) -> LineProcess:
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self._end()
        self._child = LineProcess("recipes.language.rewards.child", self._kind, json.dumps(self._settings))
        try:
            reply = self._child.reply(time.monotonic() + _START_SECONDS)
        except EOFError:
            reply = {"fault": f"exit code {self._end()}"}
        except TimeoutError:
            reply = {"fault": f"it was not ready within {_START_SECONDS:g} s"}
        if "fault" in reply:
            self._end()
            why = ": ".join(filter(None, (reply["fault"], reply.get("why"))))
            raise ConfigError(f"`reward_type: {self._kind}` cannot be loaded", why=why, help=reply.get("help"))
        self._together, self._is_async = bool(reply["together"]), bool(reply["async"])
        self.convention = reply["convention"]
        self._is_first = True
        return self._child

    def _end(self) -> int | None:
        """Kill the child with its descendants, and return its exit code."""
        child, self._child = self._child, None
        return child and child.end()

    def close(self) -> None:
        """End the child. May be called twice."""
        self._end()


class StandInScorer:
    """A scorer that gives different rewards within a group, so that all answers are trained on."""

    convention = ""

    def start(self) -> None:
        """Do nothing."""

    def score_all(self, items: Sequence[Item]) -> list[Score]:
        """Return one score for each answer."""
        seen = Counter[str]()
        scores: list[Score] = []
        for item in items:
            scores.append(Score(float(seen[item.prompt] % 2), "a rehearsal"))
            seen[item.prompt] += 1
        return scores

    def close(self) -> None:
        """Do nothing."""
