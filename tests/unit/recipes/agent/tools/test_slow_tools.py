from __future__ import annotations

from recipes.agent.loop.agent_runner import SlowTools


def test_a_tool_that_takes_most_of_a_run_is_told_once() -> None:
    output: list[str] = []
    slow = SlowTools(output.append)
    slow.look({"agent/seconds": 4.0, "agent/tool_seconds/search": 1.9, "agent/tool_seconds/calculator": 0.0})
    assert output == []
    for _ in range(2):
        slow.look({"agent/seconds": 4.0, "agent/tool_seconds/search": 3.0, "agent/tool_seconds/calculator": 0.0})
    assert output == ["agents spend 3 s of the 4 s of a run in the tool `search`"]


def test_what_takes_little_is_not_slow() -> None:
    output: list[str] = []
    SlowTools(output.append).look({"agent/seconds": 0.05, "agent/tool_seconds/search": 0.04})
    SlowTools(output.append).look({"agent/tool_seconds/search": 4.0})
    assert output == []
