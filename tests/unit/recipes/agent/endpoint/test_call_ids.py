"""Results of functions belong to calls before them, in every protocol, as the official APIs have it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.recipes.agent.endpoint.asking import model, posted

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI: Any = {"role": "user", "content": "x"}


def conversation(path: str, call: Any, result: Any) -> dict[str, Any]:
    """Return a request with one call and one result, of these ids; None: without the field."""

    def named(field: str, value: Any) -> dict[str, Any]:
        return {} if value is None else {field: value}

    if path == CHAT:
        calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}, **named("id", call)}]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"messages": [HI, said, {"role": "tool", "content": "3", **named("tool_call_id", result)}]}
    if path == MESSAGES:
        use = {"type": "tool_use", "name": "add", "input": {}, **named("id", call)}
        answer = {"type": "tool_result", "content": "3", **named("tool_use_id", result)}
        said = {"role": "assistant", "content": [use]}
        return {"model": "m", "max_tokens": 10, "messages": [HI, said, {"role": "user", "content": [answer]}]}
    called = {"type": "function_call", "name": "add", "arguments": "{}", **named("call_id", call)}
    answered = {"type": "function_call_output", "output": "3", **named("call_id", result)}
    return {"input": [HI, called, answered]}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("call", "result", "message"),
    [
        ("one", "other", "`other`: no call before it has this id"),
        ("one", None, "is missing: no call before it has this id"),
        ("one", 1, "is missing: no call before it has this id"),
        (None, None, "needs a name and an id"),
        ("", "", "needs a name and an id"),
    ],
)
def test_result_without_its_call_is_refused(path: str, call: Any, result: Any, message: str) -> None:
    ((status, _, answer),) = posted(model("a"), path, conversation(path, call, result))
    assert status == 400
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_result_of_its_call_is_taken(path: str) -> None:
    ((status, _, _),) = posted(model("a"), path, conversation(path, "one", "one"))
    assert status == 200
