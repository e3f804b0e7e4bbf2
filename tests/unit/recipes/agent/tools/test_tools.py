"""Tools of agents: the calculator, the search, the index that processes share, and the box of all of them."""

from __future__ import annotations

import asyncio
import math
import operator
import threading
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.agent.tools.computing_tools import BM25, Calculator, Search, calculate, read_corpus, words
from recipes.agent.tools.tool import (
    CallLost,
    FunctionTool,
    Observation,
    Tool,
    Toolbox,
    ToolCall,
    ToolError,
    ToolUnavailable,
)
from recipes.agent.workers.index_worker import IndexSearch
from rlinf_core import ConfigError, WorkerDiedError, WorkerGroupError

NUMBERS = st.integers(-999, 999)


@given(NUMBERS, st.sampled_from("+-*"), NUMBERS, st.sampled_from("+-*"), NUMBERS)
def test_arithmetic_is_right(first: int, one: str, second: int, two: str, third: int) -> None:
    apply = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    assert calculate(f"(({first}) {one} ({second})) {two} ({third})") == str(
        apply[two](apply[one](first, second), third)
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [("7//2", "3"), ("7 % 4", "3"), ("1/3", "0.333333333333"), ("2**10", "1024"), ("-3", "-3"), ("2**-1", "0.5")],
)
def test_operators_are_those_of_python(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("__import__('os').system('true')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("[1 for _ in range(9)]", "only numbers"),
        ("True", "only numbers"),
        ("'1' * 9", "only numbers"),
        ("1 < 2", "only numbers"),
        ("1j * 1j", "only numbers"),
        ("x", "only numbers"),
        ("1 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1\x00", "not an arithmetic expression"),
        ("(" * 150, "not an arithmetic expression"),
        ("1/0", "division by zero"),
        ("9**9**9**9", "too large"),
        ("10.0**400", "too large"),
        ("1e308*10", "too large"),
        ("10**300 % 0.5 + 10**309", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("1" * 201, "longer than 200 characters"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%.() e", max_size=60))
def test_any_text_has_a_finite_value_or_a_reason(expression: str) -> None:
    try:
        value = calculate(expression)
    except ToolError as error:
        assert str(error)  # noqa: PT017 - either outcome is right, any other exception is not
    else:
        assert math.isfinite(Fraction(value))


DOCUMENTS = ["home kobu tarn", "home mila tarn", "river tarn oder", "a long text of many words about the home of kobu"]


def test_words_are_found_whatever_their_case_and_script() -> None:
    assert words("Straße, ÉTÉ-42!") == ["strasse", "été", "42"]


def test_scores_are_those_of_the_formula() -> None:
    index = BM25(["a b b", "a c"])

    ((number, score),) = index.search("b", 5)

    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert number == 0
    assert score == pytest.approx(rarity * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 3 / 2.5)))


def test_rare_words_and_short_documents_come_first() -> None:
    results = [number for number, _ in BM25(DOCUMENTS).search("home kobu", 3)]
    assert results == [0, 3, 1]


def test_no_documents_are_an_index_that_finds_nothing() -> None:
    assert BM25([]).search("home", 3) == []


def test_the_tool_shows_the_best_documents() -> None:
    assert asyncio.run(Search(DOCUMENTS, 2).call("river tarn")) == "river tarn oder\nhome kobu tarn"
    with pytest.raises(ToolError, match="nothing found"):
        Search(DOCUMENTS).find("zzz ?")


def test_a_corpus_is_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_bytes("one\n\n  two \r\nthree\u2028\x0cthree\rfour".encode())
    assert read_corpus(str(file)) == ["one", "two", "three\u2028\x0cthree", "four"]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no documents"):
        read_corpus(str(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_corpus(str(file))
    file.write_text("one", "utf-16-le")
    with pytest.raises(ConfigError, match="is UTF-16 text, not UTF-8"):
        read_corpus(str(file))
    file.write_text("one", "utf-8-sig")
    assert read_corpus(str(file)) == ["one"]
    with pytest.raises(ConfigError, match="No such file"):
        read_corpus(str(tmp_path / "none"))


BLOCKED = threading.Event()


def hangs(argument: str) -> str:
    """Wait for an event that never comes."""
    BLOCKED.wait()
    return argument


async def sleeps(argument: str) -> str:
    await asyncio.Event().wait()
    return argument


def fails(argument: str) -> str:
    raise ValueError(f"bad {argument}")


def upper(argument: str) -> str:
    """Write in capitals.

    More than the model is told.
    """
    return argument.upper()


def box(*tools: Tool, timeout: float = 30.0) -> Toolbox:
    return Toolbox(tools, timeout)


def called(tools: Toolbox, name: str, argument: str) -> Observation:
    return asyncio.run(tools.call(name, argument))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<calculator>1+1</calculator>", ToolCall("calculator", "1+1")),
        ("I compute: <calculator>1+1</calculator>\n", ToolCall("calculator", "1+1")),
        ("<calculator>9<calculator>1\n+1</calculator>", ToolCall("calculator", "1\n+1")),
        ("<upper>a</upper> then <calculator>2</calculator>", ToolCall("calculator", "2")),
        ("<calculator>1+1</calculator> is 2", None),
        ("<calculator>1+1</upper>", None),
        ("<other>1</other>", None),
        ("4", None),
    ],
)
def test_a_call_is_what_a_turn_ends_with(text: str, call: ToolCall | None) -> None:
    assert box(Calculator(), FunctionTool(upper)).find_call(text) == call


def test_without_tools_nothing_is_a_call() -> None:
    tools = box()
    assert tools.find_call("<calculator>1</calculator>") is None
    assert tools.stop == ()
    assert tools.instructions == ""


def test_a_function_is_a_tool_with_its_name_and_its_first_line() -> None:
    tools = box(FunctionTool(upper))
    assert tools.instructions.endswith("<upper>...</upper> Write in capitals.")
    assert called(tools, "upper", "a").text == "A"
    assert tools.written(called(tools, "upper", "a")) == "<result>A</result>"


class Shouts:
    def __call__(self, argument: str) -> str:
        return argument.upper()


def pair(first: str, second: str) -> str:
    """Write two texts."""
    return first + second


def by_name(*, argument: str) -> str:
    return argument


def counts(number: int) -> str:
    return str(number)


def chooses(argument: Literal["a", "b"]) -> str:
    return argument


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda: "", "its arguments are `()`: too many positional arguments"),
        (pair, "missing a required argument: 'second'"),
        (by_name, "cannot be called with a text"),
        (counts, "takes `number: int`, and would get a text"),
        (chooses, "takes `argument: Literal['a', 'b']`, and would get a text"),
        (Shouts, "is a class, not a function"),
    ],
)
def test_a_function_that_takes_no_text_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=r"tool `my\.tools:own`") as error:
        FunctionTool(function, "my.tools:own")
    assert why in f"{error.value.message} {error.value.why}"


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


def mute(argument: str) -> str:
    raise MuteError


async def leaves(argument: str) -> str:
    raise SystemExit(argument)


async def capitals(argument: str) -> str:
    return argument.upper()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (Shouts(), "A"),
        (partial(pair, "b"), "ba"),
        (lambda argument: capitals(argument), "A"),
        (lambda argument: 2.5, "2.5"),
        (lambda argument: np.int64(2), "2"),
        (lambda argument: Fraction(1, 2), "1/2"),
        (lambda argument: None, "error: TypeError: own returned NoneType, not a text or a number"),
        (lambda argument: b"a", "error: TypeError: own returned bytes, not a text or a number"),
        (lambda argument: {"a": 1}, "error: TypeError: own returned dict, not a text or a number"),
        (lambda argument: next(iter(())), "error: RuntimeError: coroutine raised StopIteration"),
        (lambda argument: exit(argument), "error: RuntimeError: SystemExit: a"),
        (leaves, "error: SystemExit: a"),
        (mute, "error: MuteError: (its message cannot be shown: ValueError)"),
    ],
)
def test_what_a_function_returns_or_raises_is_told(function: Any, text: str) -> None:
    assert called(box(FunctionTool(function, "my.tools:own")), "own", "a").text == text


def test_a_partial_function_is_described_by_its_own_words() -> None:
    assert FunctionTool(partial(pair, "b"), "my.tools:own").description == "Write two texts."


def test_what_goes_wrong_is_an_observation_and_is_counted() -> None:
    output: list[tuple[ToolCall, Observation]] = []
    tools = Toolbox([Calculator(), FunctionTool(fails)], 30.0, lambda call, seen: output.append((call, seen)))

    results = [
        called(tools, *item) for item in (("calculator", "1/0"), ("fails", "x"), ("none", ""), ("calculator", "2"))
    ]

    assert [(result.text, result.failure) for result in results] == [
        ("error: division by zero", "error"),
        ("error: ValueError: bad x", "error"),
        ("error: unknown tool none; known: calculator, fails", "error"),
        ("2", ""),
    ]
    assert [seen for _, seen in output] == results
    assert tools.figures["agent/tool_calls"] == 4
    assert tools.figures["agent/tool_errors"] == 3
    assert tools.figures["agent/tool_timeouts"] == 0
    assert tools.figures["agent/tool_seconds/calculator"] == pytest.approx(results[0].seconds + results[3].seconds)


@pytest.mark.parametrize("function", [hangs, sleeps])
def test_an_argument_that_a_tool_hangs_at_is_an_observation(function: Any) -> None:
    tools = box(FunctionTool(function), timeout=0.05)

    for _ in range(4):
        seen = called(tools, function.__name__, "x")
        assert (seen.failure, seen.text) == ("timeout", "error: no answer within 0.05 s")
    assert tools.failure == ""


def moody(argument: str) -> str:
    """Answer one argument, and break in a way of their own at others."""
    broken: dict[str, Exception] = {
        "refused": ConnectionRefusedError("nobody listens"),
        "reset": ConnectionResetError("the other side has gone"),
        "lost": CallLost("the server has exited"),
        "late": TimeoutError(),
    }
    if argument.rstrip("123") in broken:
        raise broken[argument.rstrip("123")]
    return "an answer"


@pytest.mark.parametrize("argument", ["refused", "reset", "lost", "late"])
def test_what_breaks_a_tool_that_answers_others_is_an_error(argument: str) -> None:
    tools = box(FunctionTool(moody))
    for _ in range(3):
        assert called(tools, "moody", "hello").text == "an answer"
        assert called(tools, "moody", argument).failure in ("error", "timeout")
    assert (tools.failure, tools.figures["agent/tool_calls"]) == ("", 6.0)


@pytest.mark.parametrize("argument", ["reset", "lost", "late"])
def test_a_tool_that_answers_none_of_three_is_unavailable(argument: str) -> None:
    tools = box(FunctionTool(moody))
    assert [called(tools, "moody", f"{argument}{number}").failure for number in (1, 2, 1)] != [""] * 3
    with pytest.raises(ToolUnavailable):
        called(tools, "moody", f"{argument}3")
    # One answer, and it is the arguments' fault again.
    assert called(tools, "moody", "hello").text == "an answer"
    assert called(tools, "moody", f"{argument}1").failure


async def test_tools_that_hang_leave_room_for_others() -> None:
    """More of them than any pool has threads."""
    tools = box(FunctionTool(hangs), FunctionTool(upper), timeout=0.2)
    calls = (*(tools.call("hangs", "") for _ in range(100)), tools.call("upper", "a"))
    *hung, last = await asyncio.gather(*calls, return_exceptions=True)
    assert {item.failure for item in hung if isinstance(item, Observation)} == {"timeout"}
    assert len(hung) == 100
    assert isinstance(last, Observation)
    assert last.text == "A"


def test_a_long_observation_is_cut() -> None:
    seen = called(box(FunctionTool(upper)), "upper", "a" * 5000)
    assert seen.text == "A" * 4000 + "..."


class Index:
    """An index in this process; one that is dead raises what a group call raises."""

    def __init__(self, documents: list[str]) -> None:
        self._documents = {document.partition(" ")[0]: document for document in documents}
        self.calls: list[list[str]] = []
        self.dead = False

    def search(self, queries: list[str]) -> Any:
        self.calls.append(queries)
        return self

    async def async_wait(self) -> list[list[str | None]]:
        if self.dead:
            raise WorkerGroupError("IndexGroup", "search", {0: WorkerDiedError("IndexGroup:0")}, 1)
        return [[self._documents.get(call) for call in self.calls[-1]]]


def answers_of(tools: Toolbox, *queries: str) -> list[tuple[str, str]]:
    async def run() -> list[tuple[str, str]]:
        seen = await asyncio.gather(*(tools.call("search", query) for query in queries))
        return [(item.text, item.failure) for item in seen]

    return asyncio.run(run())


def test_searches_at_the_same_time_are_one_call() -> None:
    index = Index(["one 1", "two 2"])
    tools = Toolbox([IndexSearch(index, print)], 30.0)
    assert answers_of(tools, "one", "three", "two") == [("one 1", ""), ("error: nothing found", "error"), ("two 2", "")]
    assert index.calls == [["one", "three", "two"]]


def test_a_dead_index_is_told_once_and_fails_the_runs() -> None:
    index, warnings = Index(["one 1"]), list[str]()
    index.dead = True
    tools = Toolbox([IndexSearch(index, warnings.append)], 30.0)
    for queries in (("one", "one"), ("one",)):
        with pytest.raises(ToolUnavailable, match="the index is unreachable: "):
            answers_of(tools, *queries)
    assert len(warnings) == 1
    assert "IndexGroup" in warnings[0]
