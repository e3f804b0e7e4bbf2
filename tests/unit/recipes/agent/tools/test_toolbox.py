from __future__ import annotations

import asyncio
import threading

import pytest

from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.tool import FunctionTool, Tool, ToolUnavailable
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
def test_a_tool_that_hangs_costs_its_time_limit(function: object) -> None:
    tools = box(FunctionTool(function), timeout=0.05)  # type: ignore[arg-type]

    with pytest.raises(ToolUnavailable, match=r"no answer within 0\.05 s"):
        called(tools, function.__name__, "x")  # type: ignore[attr-defined]

    assert tools.failure == f"the tool `{function.__name__}`: no answer within 0.05 s"  # type: ignore[attr-defined]


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
    assert {type(item) for item in hung} == {ToolUnavailable}
    assert isinstance(last, Observation)
    assert last.text == "A"


def test_a_long_observation_is_cut() -> None:
    seen = called(box(FunctionTool(upper)), "upper", "a" * 5000)
    assert seen.text == "A" * 4000 + "..."
