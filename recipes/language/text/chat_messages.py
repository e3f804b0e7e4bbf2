"""Parsing of chat messages and tools, from rows of files and requests of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from rlinf_core import ConfigError
from rlinf_core.foreign.strict_json import BadJsonError, load_json
from rlinf_core.suggest import excerpt

Message = Mapping[str, Any]
_FUNCTION: Final = "function"
# Structs in a Parquet column have one shape: a key that a row lacked is null.
ALIGNED_SUFFIX: Final = ".parquet"


def read_messages(value: object, place: str, key: str, *, aligned: bool = False) -> tuple[Message, ...]:
    """Return the messages of a row, each with `role`, `content` as one text, and arguments of calls as objects.

    Args:
        value: a list, or its JSON text.
        place: the place of the row, such as `FILE:12`.
        key: the key of the messages in the row.
        aligned: whether a null at any depth stands for a missing key, as in Parquet.

    Raises:
        ConfigError: the value is not a list of messages.
    """
    help = 'write [{"role": "user", "content": "..."}, ...]'
    listed = _listed(value or None, place, key, " of messages", help, aligned=aligned)
    return tuple(_message(item, place, number) for number, item in enumerate(listed))


def read_tools(value: object, place: str, *, aligned: bool = False) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a row, with their parameters as objects; see `read_messages` for the arguments.

    Raises:
        ConfigError: the value is not a list of functions.
    """
    listed = _listed(value or [], place, "tools", " of functions", "write functions as JSON Schema", aligned=aligned)
    return tuple(_tool(item, place) for item in listed)


def object_of(value: object) -> dict[str, Any] | None:
    """Return the arguments of a call, given as an object or its JSON text; None for anything else.

    An empty text, which some servers write for a function without parameters, is an empty object.

    Raises:
        BadJsonError: the value is a text, but not JSON.
    """
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def joined_text(content: object, types: Mapping[str, str]) -> str | None:
    """Return the text of a message's content, a text or a list of parts; None if a part is no text.

    Args:
        content: the content.
        types: the types of text parts, with the key of the text.
    """
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts: list[str] = []
    for part in cast("list[object]", content):
        fields = cast("dict[str, object]", part) if isinstance(part, dict) else {}
        text = fields.get(types.get(str(fields.get("type")), ""))
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def without_nulls(value: Any) -> Any:
    """Return a value without null keys of mappings, at any depth; nulls in lists stay."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: without_nulls(item) for key, item in fields.items() if item is not None}
    return [without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a value with plain floats, as a `WrittenFloat` would show its spelling to the chat template."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    return float(value) if isinstance(value, float) else value


def _listed(value: object, place: str, key: str, of: str, help: str, *, aligned: bool) -> Sequence[Any]:
    value = _parsed(without_nulls(value) if aligned else value, place, f"`{key}`")
    if not isinstance(value, list):
        raise ConfigError(f"{place}: `{key}` is not a list{of}", help=help)
    return cast("list[Any]", _plain(value))


def _parsed(value: object, place: str, what: str) -> Any:
    """Return a value, parsed if it is a JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except BadJsonError as error:
        raise ConfigError(
            f"{place}: {what} is a text that holds no JSON list", why=f"it {error}", help="write a list"
        ) from None


def _message(item: object, place: str, number: int) -> Message:
    if not isinstance(item, dict):
        raise ConfigError(f"{place}: message {number} is not an object", help="write role and content")
    message = {str(key): value for key, value in cast("dict[Any, Any]", item).items() if value is not None}
    role, calls = message.get("role"), message.pop("tool_calls", None)
    if not isinstance(role, str):
        remedy = "rename `from` to `role` and `value` to `content`" if "from" in message else "add `role`"
        raise ConfigError(f"{place}: message {number} has no role", help=remedy)
    if calls:
        message["tool_calls"] = _calls(calls, place, number)
    # A message of calls alone has no text, and a tool's result may be empty.
    content = message.get("content", "" if role in ("assistant", "tool") else None)
    text = joined_text(content, {"text": "text"})
    if text is None:
        raise ConfigError(
            f"{place}: the content of message {number} is not text",
            why="there is none" if content is None else "pictures and other parts are not supported",
            help="write the content as one text",
        )
    return {**message, "content": text}


def _calls(value: object, place: str, number: int) -> list[dict[str, Any]]:
    listed = _parsed(value, place, f"`tool_calls` of message {number}")
    calls = cast("list[Any]", listed) if isinstance(listed, list) else [listed]
    return [_call(call, place, number) for call in calls]


def _call(entry: object, place: str, number: int) -> dict[str, Any]:
    """Return a call with its arguments as an object; name and arguments may be nested under `function`."""
    call = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    inner: Any = call.get(_FUNCTION, call)
    function = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
    name: Any = function.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            f"{place}: a call in message {number} has no name",
            help='write {"type": "function", "function": {"name": ..., "arguments": {...}}}',
        )
    written: Any = function.get("arguments") or ""
    why = "they are no object"
    try:
        arguments = object_of(written)
    except BadJsonError as error:
        arguments, why = None, f"the text {error}"
    if arguments is None:
        raise ConfigError(
            f"{place}: the arguments of the call of `{name}` in message {number} are not a JSON object",
            why=f"{why}: {excerpt(repr(written), 40)}",
            help="correct the row, or remove it",
        )
    named: dict[str, Any] = {**function, "arguments": arguments}
    return {**call, _FUNCTION: named} if _FUNCTION in call else named


def _tool(item: object, place: str) -> dict[str, Any]:
    tool = _parsed(item, place, "a function of `tools`")
    if not isinstance(tool, dict):
        raise ConfigError(f"{place}: an entry of `tools` is not an object", help="write functions as JSON Schema")
    fields = cast("dict[str, Any]", tool)
    function: Any = fields.get(_FUNCTION, fields)
    if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("parameters"), str):
        return fields
    described = cast("dict[str, Any]", function)
    described = {**described, "parameters": _parsed(described["parameters"], place, "`parameters` of a function")}
    return {**fields, _FUNCTION: described} if _FUNCTION in fields else described
