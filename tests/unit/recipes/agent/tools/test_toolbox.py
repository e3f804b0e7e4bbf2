from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.tool import CallLost, FunctionTool, Tool, ToolUnavailable
from recipes.agent.tools.toolbox import Observation, Toolbox, ToolCall

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


def test_a_tool_at_which_nobody_ever_listened_is_unavailable() -> None:
    tools = box(FunctionTool(moody))
    with pytest.raises(ToolUnavailable, match="nobody listens"):
        called(tools, "moody", "refused")


def test_a_computation_that_hangs_is_an_observation() -> None:
    hanging = FunctionTool(sleeps)
    hanging.computes = True
    tools = box(hanging, timeout=0.05)

    seen = called(tools, "sleeps", "x")

    assert (seen.failure, seen.text) == ("timeout", "error: no answer within 0.05 s")
    assert (tools.figures["agent/tool_timeouts"], tools.failure) == (1, "")


def test_tools_that_hang_leave_room_for_others() -> None:
    """More of them than any pool has threads."""
    tools = box(FunctionTool(hangs), FunctionTool(upper), timeout=0.2)

    async def all_of_them() -> list[Observation | BaseException]:
        calls = (*(tools.call("hangs", "") for _ in range(100)), tools.call("upper", "a"))
        return await asyncio.gather(*calls, return_exceptions=True)

    *hung, last = asyncio.run(all_of_them())
    assert {item.failure for item in hung if isinstance(item, Observation)} == {"timeout"}
    assert len(hung) == 100
    assert isinstance(last, Observation)
    assert last.text == "A"


def test_a_long_observation_is_cut() -> None:
    seen = called(box(FunctionTool(upper)), "upper", "a" * 5000)
    assert seen.text == "A" * 4000 + "..."
