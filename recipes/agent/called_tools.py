"""Tools of clients of the chat completions API, as texts: how the model is told of them, and the calls it writes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

from recipes.agent.conversation.turn_messages import ChatMessage

# As chat models write calls that follow the templates of Hermes and Qwen.
_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_INSTRUCTIONS: Final = (
    "You may call functions. Their signatures, one a line:\n{tools}\n"
    'To call one, write <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call> and end your turn.'
)


class FunctionCall(NamedTuple):
    """A call of a client's function.

    Attributes:
        call_id: names the call in later messages.
        name: of the function.
        arguments: as JSON.
    """

    call_id: str
    name: str
    arguments: str

    def entry(self) -> dict[str, Any]:
        """Return it as an entry of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


def function_names(tools: Sequence[Any]) -> list[str]:
    """Return the names of the functions that a request brings.

    Raises:
        ValueError: an entry is no function with a name.
    """
    names: list[str] = []
    for each in tools:
        function = as_mapping(as_mapping(each).get("function"))
        name = function.get("name")
        if as_mapping(each).get("type") != "function" or not isinstance(name, str) or not name:
            raise ValueError("an entry of `tools` is `type: function` with a `function` that has a `name`")
        names.append(name)
    return names


def with_instructions(messages: Sequence[ChatMessage], tools: Sequence[Any]) -> tuple[ChatMessage, ...]:
    """Return messages whose system message tells how functions are called; there is one then."""
    told = _INSTRUCTIONS.format(tools="\n".join(json.dumps(each["function"], ensure_ascii=False) for each in tools))
    first, rest = messages[0], messages[1:]
    if first.role != "system":
        return (ChatMessage("system", told), *messages)
    return (first._replace(text=f"{first.text}\n\n{told}"), *rest)


def find_calls(text: str, names: Sequence[str]) -> tuple[str, tuple[FunctionCall, ...]]:
    """Return what the model says before its calls, and the calls of functions that there are.

    A call that is no JSON, or of another function, is text like any other.
    """
    found: list[FunctionCall] = []
    begins: int | None = None
    for each in _CALL.finditer(text):
        try:
            call = as_mapping(json.loads(each.group(1)))
        except ValueError:
            continue
        name, arguments = call.get("name"), call.get("arguments", {})
        if name in names and isinstance(arguments, dict):
            written = json.dumps(arguments, ensure_ascii=False)
            found.append(FunctionCall(f"call_{secrets.token_hex(8)}", str(name), written))
            begins = each.start() if begins is None else begins
    return text[:begins].rstrip() if found else text, tuple(found)


def call_ids(message: Any) -> list[str]:
    """Return the ids of the calls in a message of the assistant."""
    return [str(each.get("id")) for each in _entries(message)]


def calls_as_text(message: Any) -> str:
    """Return the calls in a message of the assistant as a model would have written them."""
    lines: list[str] = []
    for each in _entries(message):
        function = as_mapping(each.get("function"))
        name = json.dumps(function.get("name"))
        lines.append(f'<tool_call>{{"name": {name}, "arguments": {function.get("arguments")}}}</tool_call>')
    return "".join(lines)


def _entries(message: Any) -> list[dict[str, Any]]:
    entries: Any = as_mapping(message).get("tool_calls")
    return [as_mapping(each) for each in cast("list[Any]", entries)] if isinstance(entries, list) else []


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object, an empty one in the place of anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
