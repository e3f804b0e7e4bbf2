"""The forms in which models write function calls, and detection of the form that a chat template teaches."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from recipes.language.text.text_tokens import Spoken
from rlinf_core.foreign.strict_json import BadJsonError, load_json

if TYPE_CHECKING:
    from recipes.language.text.chat_template import ChatTemplate

_NAME, _KEY, _VALUE, _RESULT = "rlinfprobe", "firstkey", "firstvalue", "proberesult"
_SECOND_KEY, _SECOND_VALUE = "secondkey", "secondvalue"
_DECODER: Final = json.JSONDecoder()
# A made-up function to find out which form a template teaches.
PROBE_FUNCTION: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Nothing.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string"}, _SECOND_KEY: {"type": "string"}},
            "required": [_KEY],
        },
    },
}


class FunctionCall(NamedTuple):
    """A call of a function.

    Attributes:
        name: the name of the function.
        arguments: a JSON object, as text.
        call_id: the id of the call in later messages; our own ids have nine letters and digits, as some templates need.
    """

    name: str
    arguments: str
    call_id: str = ""

    def entry(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CallForm(NamedTuple):
    """The form in which a model writes a call.

    Attributes:
        style: `json`, objects with `name` and `arguments` or `parameters`, or a list of them; `split`, a name followed
            by its arguments in JSON; `pairs`, a name followed by keys and values as texts.
        begin: the text before each call; "": a turn with calls consists of calls alone.
        end: the text after each call; "": none.
        middle: the text between name and arguments (`split`), or between the name and the first key (`pairs`).
        key, value, close: the texts before a key, between a key and its value, and after the value (`pairs`).
    """

    style: Literal["json", "split", "pairs"]
    begin: str
    end: str = ""
    middle: str = ""
    key: str = ""
    value: str = ""
    close: str = ""


# The form of Hermes' and Qwen's templates, used for templates that teach no form.
HERMES: Final = CallForm("json", "<tool_call>", "</tool_call>")


def hermes_instructions(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the instructions for calls in the form `HERMES`, for a system message."""
    listed = "\n".join(json.dumps(function["function"], ensure_ascii=False) for function in functions)
    return (
        f"You may call functions. Their signatures, one a line:\n{listed}\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> and end your turn.'
    )


def written_call(call: FunctionCall) -> str:
    """Return a call in the form `HERMES`."""
    return f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>'


def find_calls(
    text: str, form: CallForm, functions: Mapping[str, Mapping[str, Any]], *, thinking: bool = False
) -> tuple[str, tuple[FunctionCall, ...]]:
    """Return the text before the first call, and the calls of known functions.

    A call that cannot be parsed, of an unknown function, or within a thought, is plain text.

    Args:
        text: the text of a turn.
        form: the form in which calls are written.
        functions: the JSON Schemas of the functions' arguments, by name.
        thinking: whether the turn begins within a thought.
    """
    spoken = Spoken(text, thinking=thinking)
    calls: list[FunctionCall] = []
    begins = len(text)
    for start, end, name, arguments in _STYLES[form.style](text, form):
        if not isinstance(name, str) or name not in functions or not isinstance(arguments, dict):
            continue
        # Ask only about parsed calls, as a mark within arguments opens no thought.
        if not spoken.has(start, end):
            continue
        values = cast("dict[str, Any]", arguments)
        if form.style == "pairs":
            values = {key: _typed(value, functions[name], key) for key, value in values.items()}
        written = json.dumps(values, ensure_ascii=False)
        begins = min(begins, start)
        calls.append(FunctionCall(name, written, secrets.token_hex(5)[:9]))
    return text[:begins].rstrip() if calls else text, tuple(calls)


def _json_calls(text: str, form: CallForm) -> Iterator[tuple[int, int, Any, Any]]:
    marks = re.compile(re.escape(form.begin) if form.begin else r"\A(?:<\|python_tag\|>)?|(?<=\})\s*[;\n]\s*(?=\{)")
    for mark in marks.finditer(text):
        value, end = _decoded(text, mark.end())
        # Without marks, words after a call make it part of an answer, but an ending token does not.
        if not form.begin and not re.match(r"\s*(?:[;{]|<\||\Z)", text[end:]):
            return
        for call in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if isinstance(call, dict):
                fields = cast("dict[str, Any]", call)
                arguments = fields.get("arguments", fields.get("parameters", {}))
                # Some models write the arguments as JSON text.
                parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
                yield mark.start(), end, fields.get("name"), parsed


def _split_calls(text: str, form: CallForm) -> Iterator[tuple[int, int, Any, Any]]:
    # Some forms number their calls in this text.
    middle = re.sub(r"\d+", r"\\d+", re.escape(form.middle))
    for mark in re.finditer(rf"{re.escape(form.begin)}\s*([\w.-]+?)\s*{middle}(?=\s*\{{)", text):
        value, end = _decoded(text, mark.end())
        yield mark.start(), end, mark[1], value


def _pair_calls(text: str, form: CallForm) -> Iterator[tuple[int, int, Any, Any]]:
    key, value, close = map(re.escape, (form.key, form.value, form.close))
    pair = re.compile(rf"{key}\s*([^\s<>]+?)\s*{value}\n?(.*?)\n?{close}", re.DOTALL)
    call = rf"{re.escape(form.begin)}\s*([\w.-]+?)\s*{re.escape(form.middle)}(?=[^\w.-])(.*?){re.escape(form.end)}"
    for mark in re.finditer(call, text, re.DOTALL):
        yield mark.start(), mark.end(), mark[1], {field[1]: field[2] for field in pair.finditer(mark[2])}


_STYLES: Final = {"json": _json_calls, "split": _split_calls, "pairs": _pair_calls}


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that starts at an index, and the index after it; None and the index if there is none."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        end = _DECODER.raw_decode(text, start)[1]
        # Refuses what others cannot read back, such as NaN.
        return load_json(text[start:end]), end
    except (ValueError, RecursionError):
        return None, start


def _parsed(text: str, otherwise: Any = None) -> Any:
    """Return the value of a whole JSON text; `otherwise` if it is none."""
    try:
        return load_json(text)
    except BadJsonError:
        return otherwise


def _typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Convert a value that was written as text to the type in its JSON Schema."""
    properties: Any = schema.get("properties")
    wanted: Any = cast("Mapping[str, Any]", properties).get(key) if isinstance(properties, dict) else None
    kinds = _kinds(wanted)
    if "string" in kinds and kinds <= {"string", "null"}:
        return None if "null" in kinds and text.strip() == "null" else text
    return _parsed(text, text)


def _kinds(schema: Any) -> set[str]:
    """Return the types that a JSON Schema names, also as alternatives."""
    fields = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    named, others = fields.get("type", []), fields.get("anyOf", fields.get("oneOf"))
    kinds = {str(kind) for kind in cast("list[Any]", named if isinstance(named, list) else [named])}
    return kinds.union(*map(_kinds, cast("list[Any]", others) if isinstance(others, list) else []))


def taught_form(template: ChatTemplate) -> CallForm | None:
    """Return the form of calls that a chat template teaches; None if it knows no functions.

    The form is read from the template's rendering of calls of a made-up function.
    """
    from recipes.language.text.chat_template import TemplateRefusalError

    tool = PROBE_FUNCTION
    asked = [{"role": "user", "content": "?"}]
    try:
        before = template.render(asked, [tool])
    except TemplateRefusalError:
        return None
    if _NAME not in before:
        return None
    for count in (2, 1):
        calls = [_probe_call(number) for number in range(count)]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [{"role": "tool", "name": _NAME, "tool_call_id": call["id"], "content": _RESULT} for call in calls]
        try:
            whole = template.render([*asked, turn, *results], [tool])
        except TemplateRefusalError:
            continue
        same = _shared(whole, before)
        return _form_of(whole[same : whole.find(_RESULT, same)])
    return None


def _probe_call(number: int) -> dict[str, Any]:
    arguments = {_KEY: _VALUE, _SECOND_KEY: _SECOND_VALUE}
    # The id is as long as our own ids.
    return {"id": f"probeid0{number}", "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _form_of(text: str) -> CallForm | None:
    """Return the form of the calls in a template's rendering."""
    name = text.find(_NAME)
    for start in (match.start() for match in re.finditer(r"[\[{]", text[:name] if name >= 0 else "")):
        value, end = _decoded(text, start)
        if isinstance(value, dict | list) and _NAME in text[start:end]:
            second = text.find("{", end) if _NAME in text[end:] else -1
            begin, after = _marks(text, start, end, second)
            return CallForm("json", begin, "" if isinstance(value, list) else after)
    if name < 0:
        return None
    arguments = text.find("{", name)
    value, end = _decoded(text, arguments) if arguments >= 0 else (None, 0)
    if isinstance(value, dict) and _KEY in text[arguments:end]:
        begin, after = _marks(text, name, end, text.find(_NAME, end))
        return CallForm("split", begin, after, text[name + len(_NAME) : arguments].strip())
    return _pairs_of(text, name)


def _pairs_of(text: str, name: int) -> CallForm | None:
    parts = re.search(rf"{_NAME}(.*?){_KEY}(.*?){_VALUE}(.*?){_SECOND_KEY}.*?{_SECOND_VALUE}", text, re.DOTALL)
    if parts is None:
        return None
    key = _common_end(parts[1], parts[3]).strip()
    close = parts[3].strip().removesuffix(key).strip()
    begin, after = _marks(text, name, parts.end(), text.find(_NAME, parts.end()))
    middle, end = parts[1].strip().removesuffix(key).strip(), after.removeprefix(close).strip()
    return CallForm("pairs", begin, end, middle, key, parts[2].strip(), close) if key and close and end else None


def _marks(text: str, start: int, end: int, following: int) -> tuple[str, str]:
    """Return the texts before and after each call; the first call is at `start` to `end`, the next at `following`."""
    before = text[:start]
    if not before.strip():
        return "", ""
    if following < 0:
        # With one call only, ignore other text before it, such as empty thoughts.
        return (before.split() or [""])[-1], (text[end:].split() or [""])[0]
    between = text[end:following]
    begin = _common_end(before, between)
    return begin.strip(), between.removesuffix(begin).strip()


def _common_end(first: str, second: str) -> str:
    """Return the mark that two texts both end with."""
    common = first[len(first) - _shared(first[::-1], second[::-1]) :]
    # The common text may begin with the end of another mark.
    begin = re.search(r"[<\[]", common)
    return common[begin.start() :] if begin else common


def _shared(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))
