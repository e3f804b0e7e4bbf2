"""Programs as answers: extraction from the answer's text, parsing of tests, and runs in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import builtins
import marshal
import os
import re
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

from recipes.language.answers.sequences import Exit
from recipes.language.rewards.matching.rules import Verdict
from recipes.language.rewards.scoring import Item
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.function_tests import function_tests
from recipes.language.text.text_tokens import without_thought
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.suggest import excerpt

# The opening fence of a Markdown block, also in a list or quotation, or after words if it names its language.
_OPENING: Final = re.compile(
    r"(?P<indent>[ \t>]*(?:(?:[-*+]|[0-9]+[.)])[ \t]+)?|[^`]*(?=```[ \t]*[a-zA-Z]))"
    r"(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^`]*"
)
_PYTHON: Final = ("", "python", "python3", "py")
# The wall-clock seconds of a program per second of processor time, as a busy machine shares processors.
_PATIENCE: Final = 6
# The absolute and relative tolerance of decimals in outputs.
_TOLERANCE: Final = 1e-6
# What LiveCodeBench sets before the program of a function: the limit of recursion, and the modules that it imports with
# all their names.
_DEPTH: Final = 50_000
_IMPORTED: Final = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
_NUMBER: Final = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
# The test of a whole program, whose standard input is a file.
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


class CallTest(NamedTuple):
    """A test of a function: its name, arguments and expected result."""

    function: str
    args: list[Any]
    expected: object


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """The tests that a right answer passes: Python statements, calls, or pairs of standard input and output.

    Attributes:
        statements: Python code, run after the answer in its namespace; an exception is a failure.
        calls: calls of one function, or of a method of the answer's class `Solution`.
        pairs: standard input and expected standard output.
    """

    statements: tuple[str, ...] = ()
    calls: tuple[CallTest, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parsed(cls, text: str) -> ProgramTests:
        """Return the tests in the reference answer of a problem.

        Args:
            text: Python code; or JSON: a list of such texts, or `{"inputs": [...], "outputs": [...]}`; with `fn_name`,
                an input is a list of arguments, or a text with one JSON argument per line.

        Raises:
            ValueError: the text is not one of these, or has no tests.
        """
        written = _json(text)
        if isinstance(written, dict):
            return cls._of_columns(cast("dict[str, Any]", written))
        statements = (text,) if written is None else _texts(written)
        if not statements or not any(statement.strip() for statement in statements):
            raise ValueError("there are no tests")
        try:
            nodes = [node for statement in statements for node in _executed(ast.parse(statement))]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ValueError(f"a test is not Python: {error}") from None
        # Reject `{'inputs': ...}`, which is Python but not JSON: every program would pass it.
        if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in nodes):
            raise ValueError(
                "the tests check nothing: outside of functions there is no `assert` and no call, such as `check(NAME)`"
                " of HumanEval; JSON has double quotes, and a key once"
            )
        return cls(statements=statements)

    @classmethod
    def _of_columns(cls, written: dict[str, Any]) -> ProgramTests:
        inputs, outputs, function = (written.get(name) for name in ("inputs", "outputs", "fn_name"))
        if function is None:
            ins, outs = _texts(inputs), _texts(outputs)
            if not ins or outs is None or len(ins) != len(outs):
                raise ValueError("`inputs` and `outputs` are lists of as many texts")
            return cls(pairs=tuple(zip(ins, outs, strict=True)))
        if not (isinstance(function, str) and function.isidentifier()):
            raise ValueError("`fn_name` is the name of a function")
        rows, results = ([*cast("list[object]", part)] if isinstance(part, list) else [] for part in (inputs, outputs))
        if not rows or len(rows) != len(results):
            raise ValueError("`inputs` and `outputs` are lists of as many calls and results")
        pairs = zip(rows, results, strict=True)
        return cls(calls=tuple(CallTest(function, _arguments(row), _value(expected)) for row, expected in pairs))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a program except those within functions, which run only if they are called."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def fault_of_tests(text: str) -> str:
    """Return why the reference answer of a problem holds no valid tests; "" if it does."""
    try:
        ProgramTests.parsed(text)
    except ValueError as error:
        return str(error)
    return ""


def program_in(text: str) -> str | None:
    """Return the program of an answer, its last closed Python block in a Markdown fence; None if there is none.

    Blocks that name the language take precedence over others, which may be outputs. A block that defines nothing and
    uses a function of an earlier block is a usage example: the earlier block is the program.
    """
    blocks = [(language.lower(), body) for language, body in _blocks(text) if language.lower() in _PYTHON]
    named = [body for language, body in blocks if language] or [body for _, body in blocks]
    readable = [(body, names) for body in named if (names := _names_of(body)) is not None]
    if not readable:
        return named[-1] if named else None
    for index in range(len(readable) - 1, 0, -1):
        _, (defined, used) = readable[index]
        if defined or not any(used & earlier for _, (earlier, _) in readable[:index]):
            return readable[index][0]
    return readable[0][0]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and body of each closed block; the closing fence may follow code on the same line."""
    opened: re.Match[str] | None = None
    body: list[str] = []
    for line in without_thought(text).splitlines():
        if opened is None:
            opened, body = _OPENING.fullmatch(line), []
            continue
        indent, fence = len(opened["indent"]), opened["fence"]
        code = line[indent:] if not line[:indent].strip(" \t>") else line
        closed = code.strip()
        if closed.startswith(fence) and not closed.strip(fence[0]):
            yield opened["language"], "".join(f"{part}\n" for part in body)
            opened = None
        elif fence[0] == "`" and closed.endswith(fence) and not set("`#") & set(closed.removesuffix(fence)):
            yield opened["language"], "".join(f"{part}\n" for part in (*body, code.rstrip().removesuffix(fence)))
            opened = None
        else:
            body.append(code)


def _names_of(program: str) -> tuple[set[str], set[str]] | None:
    """Return the top-level functions and classes of a program, and the names that it uses; None if it is not Python."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError):
        return None
    defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return defined, _used_names(tree)


def _used_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _imports_of(program: str) -> dict[str, str]:
    """Return the names in a program that it may use without importing them, each with its module; "": a module."""
    names = _names_of(program)
    known = _known_names()
    return {} if names is None else {name: known[name] for name in names[1] if name in known}


@cache
def _known_names() -> dict[str, str]:
    modules = {name: import_module(name) for name in _IMPORTED}
    known = {
        name: of
        for of, module in modules.items()
        for name in getattr(module, "__all__", vars(module))
        if not name.startswith("_") and not hasattr(builtins, name)
    }
    return {**known, **dict.fromkeys(modules, "")}


class _Fault(NamedTuple):
    """The reason why a program fails a test, and the `Exit` of its run, or ""."""

    reason: str
    exit: str = ""


class ProgramJudge:
    """A judge that runs a problem's tests on the program in an answer, each run in a separate sandbox.

    An answer is wrong if it has no program, or its program fails or takes too long. Only a failure to create a sandbox
    is not the answer's fault.

    Args:
        seconds: the seconds of processor time of one run.
        memory: the memory limit of one run in bytes.

    Raises:
        ConfigError: this machine has no sandbox.
    """

    def __init__(self, seconds: float, memory: int) -> None:
        sandbox.check()
        self._limits = sandbox.SandboxLimits(seconds=seconds, memory=memory)
        # The limit of concurrent runs.
        self._room = asyncio.Semaphore(os.cpu_count() or 1)

    async def result_of(self, item: Item) -> Verdict:
        """Return whether the program in an answer passes all tests; `tests_passed` is the share of passed tests.

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
            faults = [await self._fault_of_functions(program, tests)]
        passed = sum(fault is None for fault in faults) / len(faults)
        right = f"passed all of {len(tests.pairs or tests.calls or tests.statements)} tests"
        reason, ended = next((fault for fault in faults if fault is not None), _Fault(right))
        return Verdict(float(passed == 1), reason, {"tests_passed": passed}, exit=ended)

    async def _fault_of_functions(self, program: str, tests: ProgramTests) -> _Fault | None:
        """Return why the program fails tests of its functions; None if it passes."""
        # A random mark proves that all tests ran: a program may exit early with any status.
        end = secrets.token_hex(16)
        names = sorted(name for statement in tests.statements for name in _used_names(ast.parse(statement)))
        job = {
            "program": program,
            "statements": tests.statements,
            "names": names,
            "calls": tuple(map(tuple, tests.calls)),
            "imports": _imports_of(program) if tests.calls else {},
            "depth": _DEPTH if tests.calls else 0,
            "end": end,
        }
        result = await self._run(function_tests(), [], marshal.dumps(job))
        if isinstance(result, _Fault):
            return result
        return None if result.output == f"\n{end}\n" else _Fault("the program ended before its tests")

    async def _fault_of_pair(self, program: str, text: str, expected: str, late: list[_Fault]) -> _Fault | None:
        """Return why the program's output for an input is wrong; None if it is right."""
        result = await self._run(_WHOLE.format(parts=repr((program, text))), late)
        if isinstance(result, _Fault):
            return result
        if _same_output(result.output, expected):
            return None
        return _Fault(f"for the input `{excerpt(text, 40)}` it writes `{excerpt(result.output, 40)}`")

    async def _run(self, program: str, late: list[_Fault], input: bytes = b"") -> sandbox.ProgramResult | _Fault:
        """Return the result of a run, or why it failed.

        Args:
            program: the program.
            input: its standard input.
            late: receives the answer's first run that took too long. The other runs are skipped, as they would delay
                the answers that share the processors.
        """
        limit = _PATIENCE * self._limits.seconds
        async with self._room:
            if late:
                return late[0]
            try:
                result = await asyncio.wait_for(sandbox.run(program, self._limits, input), limit)
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
    """Return the `Exit` of a failed run; "" if the program is only wrong."""
    if result.out_of_memory or result.errors.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return Exit.MEMORY_LIMIT
    number = sandbox.signal_of(result)
    if number is None:
        return ""
    return Exit.TIME_LIMIT if number in (signal.SIGKILL, signal.SIGXCPU) else Exit.CRASH


def _same_output(output: str, expected: str) -> bool:
    """Return whether an output equals the expected one, line by line and word by word; numbers compare by value."""
    lines, wanted = _lines(output), _lines(expected)
    if lines == wanted:
        return True
    pairs = [(line.split(), words.split()) for line, words in zip(lines, wanted, strict=False)]
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others)) for words, others in pairs
    )


def _same_word(word: str, expected: str) -> bool:
    """Return whether two words are equal, or numbers of one value: decimals within a tolerance, integers exactly."""
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    value, wanted = Fraction(word), Fraction(expected)
    is_decimal = not expected.lstrip("+-").isdecimal()
    return value == wanted or (is_decimal and abs(value - wanted) <= Fraction(_TOLERANCE) * max(1, abs(wanted)))


def _lines(text: str) -> list[str]:
    """Return the lines of an output, without trailing blanks and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _json(text: str) -> object:
    """Return the list or mapping that a JSON text holds; None if it holds neither."""
    try:
        written = load_json(text)
    except ValueError:
        return None
    return cast("object", written) if isinstance(written, list | dict) else None


def _arguments(row: object) -> list[Any]:
    """Return the arguments of a call, given as a list, or as a text with one JSON argument per line.

    Raises:
        ValueError: the row is neither, or a line is not JSON.
    """
    if isinstance(row, str):
        return [load_json(line) for line in row.splitlines() if line.strip()]
    if not isinstance(row, list):
        raise ValueError("an input of `fn_name` is a list of arguments, or a text with one in JSON a line")
    return cast("list[Any]", row)


def _value(expected: object) -> object:
    """Return the expected result of a call, parsed if it is a JSON text."""
    if not isinstance(expected, str):
        return expected
    try:
        return load_json(expected)
    except ValueError:
        return expected


def _texts(value: object) -> tuple[str, ...] | None:
    """Return a value as a list of texts; None if it is not one."""
    if not isinstance(value, list):
        return None
    texts = cast("list[object]", value)
    return tuple(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
