"""Programs as answers: the program in an answer's text, the tests that it has to pass, and their run in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from recipes.language.answers.exits import Exit
from recipes.language.rewards.matching.rules import Verdict
from recipes.language.rewards.scoring import Item
from recipes.language.sandbox import sandbox
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.suggest import excerpt

# A block of Markdown in three backticks, with or without the name of a language.
_BLOCK: Final = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON: Final = ("", "python", "python3", "py")
# Seconds by the clock that a program may take for each second of processor time: a busy machine shares processors.
_PATIENCE: Final = 6
# Tests of a function: the answer is a module, and each test is run in it. The last line shows that the end was reached.
_FUNCTIONS: Final = """\
answer, tests, end = {parts}
names = {{"__name__": "answer"}}
exec(compile(answer, "<answer>", "exec"), names)
for test in tests:
    exec(compile(test, "<test>", "exec"), names)
print("\\n" + end)
"""
# A test of a whole program: its standard input is a file.
_WHOLE: Final = """\
import os, sys
answer, given = {parts}
with open("/tmp/input", "wb") as file:
    file.write(given.encode())
os.dup2(os.open("/tmp/input", os.O_RDONLY), 0)
sys.stdin = open(0, encoding="utf-8")
del file, given
exec(compile(answer, "<answer>", "exec"), {{"__name__": "__main__"}})
"""


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """The tests that a right answer passes: lines of Python, or pairs of standard input and output.

    Attributes:
        statements: Python, run after the answer in its names; an exception fails.
        pairs: standard input and the standard output that is expected.
    """

    statements: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parsed(cls, text: str) -> ProgramTests:
        """Return the tests in the right answer of a problem.

        Args:
            text: Python; or as JSON a list of such texts, or `{"inputs": [...], "outputs": [...]}`.

        Raises:
            ValueError: it is not one of these.
        """
        written = _json(text)
        if isinstance(written, dict):
            columns = [cast("dict[str, Any]", written).get(name) for name in ("inputs", "outputs")]
            inputs, outputs = (_texts(column) for column in columns)
            if not inputs or outputs is None or len(inputs) != len(outputs):
                raise ValueError("`inputs` and `outputs` are lists of as many texts")
            return cls(pairs=tuple(zip(inputs, outputs, strict=True)))
        statements = (text,) if written is None else _texts(written)
        if not statements or not any(statement.strip() for statement in statements):
            raise ValueError("there are no tests")
        try:
            nodes = [node for statement in statements for node in ast.walk(ast.parse(statement))]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ValueError(f"a test is not Python: {error}") from None
        # Such as `{'inputs': ...}`, which is Python and no JSON: every program would pass it.
        if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in nodes):
            raise ValueError("the tests check nothing: there is no `assert`; JSON has double quotes, and a key once")
        return cls(statements=statements)


def fault_of_tests(text: str) -> str:
    """Return why the right answer of a problem holds no tests; "" where it does."""
    try:
        ProgramTests.parsed(text)
    except ValueError as error:
        return str(error)
    return ""


def program_in(text: str) -> str | None:
    """Return the last block of Python in three backticks in a text; None if there is none that is closed."""
    blocks = [body for language, body in _BLOCK.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


class _Fault(NamedTuple):
    """Why a program fails a test, and the bad end of its run, an `Exit`, where it had one."""

    reason: str
    exit: str = ""


class ProgramJudge:
    """Runs the tests of a problem on the program in an answer, each run in its own sandbox.

    An answer without a program, whose program fails, or takes too long, is wrong. Only a sandbox that cannot be made
    is not a fault of the answer.

    Args:
        seconds: the seconds of processor time of one run.
        memory: bytes of one run.

    Raises:
        ConfigError: this machine has no sandbox.
    """

    def __init__(self, seconds: float, memory: int) -> None:
        sandbox.check()
        self._limits = sandbox.SandboxLimits(seconds=seconds, memory=memory)
        # Runs at a time, by the event loop that waits for them: each group of answers has its own.
        self._room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def result_of(self, item: Item) -> Verdict:
        """Return whether the program in an answer passes all tests; `tests_passed` is the share that it does.

        Raises:
            SandboxError: a sandbox could not be made.
            ValueError: the problem has no tests.
        """
        tests, program = ProgramTests.parsed(item.answer), program_in(item.text)
        if program is None:
            return Verdict(0.0, "no closed block of Python in three backticks", {"tests_passed": 0.0})
        if tests.pairs:
            late: list[_Fault] = []
            faults = await asyncio.gather(*(self._fault_of_pair(program, *pair, late) for pair in tests.pairs))
        else:
            faults = [await self._fault_of_statements(program, tests.statements)]
        passed = sum(fault is None for fault in faults) / len(faults)
        right = f"passed all of {len(tests.pairs or tests.statements)} tests"
        reason, ended = next((fault for fault in faults if fault is not None), _Fault(right))
        return Verdict(float(passed == 1), reason, {"tests_passed": passed}, exit=ended)

    async def _fault_of_statements(self, program: str, statements: Sequence[str]) -> _Fault | None:
        """Return why the program fails tests of its functions; None where it passes."""
        # A program that ends early, whatever its status, has not come to the end.
        end = secrets.token_hex(16)
        result = await self._run(_FUNCTIONS.format(parts=repr((program, tuple(statements), end))), [])
        if isinstance(result, _Fault):
            return result
        return None if result.output.endswith(f"\n{end}\n") else _Fault("the program ended before its tests")

    async def _fault_of_pair(self, program: str, text: str, expected: str, late: list[_Fault]) -> _Fault | None:
        """Return why the program's output for an input is wrong; None where it is right."""
        result = await self._run(_WHOLE.format(parts=repr((program, text))), late)
        if isinstance(result, _Fault):
            return result
        if _lines(result.output) == _lines(expected):
            return None
        return _Fault(f"for the input `{excerpt(text, 40)}` it writes `{excerpt(result.output, 40)}`")

    async def _run(self, program: str, late: list[_Fault]) -> sandbox.ProgramResult | _Fault:
        """Return the result of a run; or why it failed.

        Args:
            program: the program.
            late: takes the first run of the answer that took too long. The others are not waited for: they would hold
                up the answers that share the processors, until these are late themselves.
        """
        limit = _PATIENCE * self._limits.seconds
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:
            self._room = loop, asyncio.Semaphore(os.cpu_count() or 1)
        async with self._room[1]:
            if late:
                return late[0]
            try:
                result = await asyncio.wait_for(sandbox.run(program, self._limits), limit)
            except TimeoutError:
                late.append(_Fault(f"the program took longer than {limit:g} s", Exit.TIME_LIMIT))
                return late[-1]
        if result.flooded:
            return _Fault(f"the program wrote more than {sandbox.OUTPUT_BYTES} bytes", Exit.OUTPUT_LIMIT)
        if result.status == 0:
            return result
        fault = _Fault(sandbox.reason_of(result), _exit_of(result))
        if fault.exit == Exit.TIME_LIMIT:
            late.append(fault)
        return fault


def _exit_of(result: sandbox.ProgramResult) -> str:
    """Return the bad end of a run that failed; "" where the program is only wrong."""
    if result.errors.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return Exit.MEMORY_LIMIT
    number = sandbox.signal_of(result)
    if number is None:
        return ""
    return Exit.TIME_LIMIT if number in (signal.SIGKILL, signal.SIGXCPU) else Exit.CRASH


def _lines(text: str) -> list[str]:
    """Return the lines of an output, without what is blank at their ends and after the last."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _json(text: str) -> object:
    """Return the list or mapping that a JSON text holds; None if it holds neither."""
    try:
        written = load_json(text)
    except ValueError:
        return None
    return cast("object", written) if isinstance(written, list | dict) else None


def _texts(value: object) -> tuple[str, ...] | None:
    """Return a value as a list of texts; None if it is not one."""
    if not isinstance(value, list):
        return None
    texts = cast("list[object]", value)
    return tuple(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
