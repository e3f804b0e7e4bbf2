"""Translation of pydantic's errors into our codes, messages and remedies."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlinf_core.config.secrets import MASK
from rlinf_core.config.tree import Node, ScalarNode
from rlinf_core.scalars import WrittenScalar, YamlBool, kind_of
from rlinf_core.suggest import did_you_mean, quoted

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_EXPECTED: Final = {
    "string_type": "text",
    "string_sub_type": "text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "iterable_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "none_required": "nothing",
    "path_type": "a path",
    "ip_any_address": "an IP address",
    "ip_v4_address": "an IPv4 address",
    "ip_v6_address": "an IPv6 address",
}
_PLAIN: Final = re.compile(r"[\w./-](?:[\w./+@=-]|:(?=\S)| (?=[\w./]))*")
_QUOTED: Final = re.compile("`([^`]+)`")
_OUR_CODE: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+\Z")


class Words(NamedTuple):
    """Code, message and remedy of one pydantic error."""

    code: str
    message: str
    help: str | None = None

    def without(self, node: Node | None) -> Words:
        """Return the words without quotations from a secret value."""
        if not isinstance(node, ScalarNode):
            return self

        def hide(quoted: re.Match[str]) -> str:
            return f"`{MASK}`" if quoted[1].rstrip("…") in node.raw else quoted[0]

        return self._replace(message=_QUOTED.sub(hide, self.message), help=self.help and _QUOTED.sub(hide, self.help))


def words_for(error: ErrorDetails, subject: str, field: FieldInfo | None = None, holds: Sequence[str] = ()) -> Words:
    """Return the words for one entry of `ValidationError.errors()`, except for unknown and missing keys
    (`key_findings`).

    Args:
        error: the entry.
        subject: the name of the value in messages.
        field: the field of the value.
        holds: the required keys of a mapping that would be valid there.
    """
    kind = error["type"]
    context = error.get("ctx") or {}
    value: object = error["input"]
    if kind == "wrong-type":
        return _wrong_type(subject, str(context.get("what", "another value")), value, str(context.get("found", "")))
    if is_our_code(kind):
        help_text = context.get("help")
        message = str(error["msg"])
        if message.startswith("must "):
            message = f"{subject} {message}"
        return Words(kind, message, str(help_text) if help_text else None)
    if kind in _EXPECTED:
        if kind.startswith("ip_") and isinstance(value, str):
            return Words("bad-value", f"{subject}: `{value}` is not {_EXPECTED[kind]}", _near_address(value))
        words = _wrong_type(subject, _EXPECTED[kind], value)
        zero = _ZERO.search(field.description) if field is not None and field.description else None
        if kind == "finite_number" and zero:
            return words._replace(help=f"write 0 for none ({zero[1]})")
        of_one_key = _EXPECTED[kind] == "a mapping" and len(holds) == 1 and not words.help
        if of_one_key and isinstance(value, str | int | float):
            return words._replace(help=f"write `{{{holds[0]}: {_in_flow(value)}}}`")
        return words
    if kind in ("literal_error", "enum"):
        return _not_a_choice(subject, str(context.get("expected", "")), value)
    of_text = f"string_{kind}"
    bound = _BOUNDS.get(of_text if isinstance(value, str | int | float) and of_text in _BOUNDS else kind)
    if bound is not None:
        return Words("bad-value", f"{subject} {bound(context)}, found {shown(value)}")
    if kind in ("value_error", "assertion_error"):
        return Words("bad-value", f"{subject}: {context.get('error', error['msg'])}")
    text = str(error["msg"])
    return Words("bad-value", f"{subject}: {text[:1].lower()}{text[1:]}")


def refusals(error: ValidationError, section: str = "") -> list[str]:
    """Return a sentence for each value that a model rejected; `section` holds its keys, as in `env.options`."""
    sentences: list[str] = []
    for detail in error.errors(include_url=False):
        subject = f"`{'.'.join(map(str, (section, *detail['loc']) if section else detail['loc'])) or 'the file'}`"
        if detail["type"] in _OF_KEYS:
            sentences.append(f"{subject} {_OF_KEYS[detail['type']]}")
        else:
            sentences.append(words_for(detail, subject).message)
    return sentences


_OF_KEYS: Final = {
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "unexpected_keyword_argument": "is unknown",
}


def is_our_code(kind: str) -> bool:
    """Return whether an error's type is a diagnostic code: kebab case, while pydantic's own types have underscores."""
    return _OUR_CODE.match(kind) is not None


def wrong_kind(subject: str, expected: list[str], value: object) -> Words:
    """Return the words for a value that no member of a union accepts."""
    kinds = list(dict.fromkeys(_EXPECTED.get(kind, "") or kind for kind in expected))
    text = kinds[0] if len(kinds) == 1 else ", ".join(kinds[:-1]) + " or " + kinds[-1]
    return _wrong_type(subject, text, value)


def _wrong_type(subject: str, expected: str, value: object, kind: str = "") -> Words:
    """Return the words for a value of the wrong type; `kind`, if given, describes the found value."""
    if kind == "null" or (value is None and not kind):
        return Words("wrong-type", f"{subject} is empty; expected {expected}", _EMPTY_HELP)
    kind = kind or _found_kind(value)
    return Words("wrong-type", f"{subject}: expected {expected}, found {kind}", _how_to_write(expected, kind, value))


def _how_to_write(expected: str, kind: str, value: object) -> str | None:
    """Return the remedy for a common mistake behind a value of the wrong kind, if recognised."""
    if expected == "a list" and kind == "a mapping":
        return "start each item of a list with `- `"
    if expected == "a list" and isinstance(value, str | int | float) and len(written := _in_flow(value)) <= 40:
        return f"write it as a list: `[{written}]`"
    if expected == "true or false" and kind == "an integer" and value in (0, 1):
        return f"write `{'true' if value else 'false'}`"
    if isinstance(value, str):
        if expected in _NUMBERS_EXPECTED:
            return _how_to_write_number(expected, value)
        if expected == "true or false" and value.lower() in _YES | _NO:
            return f"write `{'true' if value.lower() in _YES else 'false'}`"
        if expected == "a mapping" and (glued := _GLUED.match(value)):
            return f"write a space after each `:`, as in `{glued[1]}: {glued[2]}`"
    return None


def _how_to_write_number(expected: str, value: str) -> str | None:
    if _GROUPED.fullmatch(value):
        return f"write `{value.replace('_', '').replace(',', '')}`"
    if (_INTEGER if expected == "an integer" else _NUMBER).fullmatch(value):
        return "remove the quotes"
    if number := _WITH_UNIT.fullmatch(value):
        return f"write the number alone: `{number[1]}`"
    if _NUMBERS.fullmatch(value):
        return "write one of them; `rlinf train` trains with each"
    return None


_NUMBERS_EXPECTED: Final = ("an integer", "a number", "a finite number")
_YES: Final = {"yes", "on", "y"}
_NO: Final = {"no", "off", "n"}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_NUMBERS: Final = re.compile(r"[-+0-9.eE]+(,[-+0-9.eE]+)+", re.ASCII)
_WITH_UNIT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*[A-Za-z%/]+", re.ASCII)
# Digits in groups, as Python and people write them.
_GROUPED: Final = re.compile(r"[-+]?[0-9]{1,3}([_,][0-9]{3})+", re.ASCII)
# `key:value`, which YAML reads as one word.
_GLUED: Final = re.compile(r"([A-Za-z_][\w.,-]*)[:：]([^\s:/]\S*)")
# The meaning of 0 in a description.
_ZERO: Final = re.compile(r"\b0: ([^;.]+)")
_EMPTY_HELP: Final = "give it a value or remove the key"


def _not_a_choice(subject: str, expected: str, value: object) -> Words:
    choices = [choice.strip("'\"") for choice in re.split(r", | or ", expected)]
    guess = did_you_mean(value, choices) if isinstance(value, str) else None
    listed = quoted(choices)
    return Words("bad-value", f"{subject} must be one of {listed}, found {shown(value)}", guess)


def _near_address(text: str) -> str | None:
    host, _, port = text.partition(":")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "write it as in `10.10.10.1`"
    return f"leave the port out: `{host}`" if port.isdecimal() else None


def _found_kind(value: object) -> str:
    """Return the kind of a value in words; `nothing` for null, booleans as written."""
    if value is None:
        return "nothing"
    if isinstance(value, YamlBool | bool):
        return f"`{'true' if value else 'false'}`"
    return kind_of(value)


def _written(value: str | int | float) -> str:
    return value.raw if isinstance(value, WrittenScalar) else str(value)


def _in_flow(value: str | int | float) -> str:
    """Return a scalar as an item within brackets, quoted where YAML would read a mark in it."""
    text = _written(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def shown(value: object) -> str:
    """Return a value as quoted in messages: as written, truncated if long."""
    if not isinstance(value, str | int | float):
        return _found_kind(value)
    text = _written(value)
    return f"`{text if len(text) <= 60 else text[:59] + '…'}`"


def _length(words: str) -> Callable[[dict[str, Any]], str]:
    def text(context: dict[str, Any]) -> str:
        number = context.get("min_length", context.get("max_length"))
        return words.format(number, "" if number == 1 else "s")

    return text


_BOUNDS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "greater_than": lambda c: f"must be greater than {c['gt']}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']}",
    "less_than": lambda c: f"must be less than {c['lt']}",
    "less_than_equal": lambda c: f"must be at most {c['le']}",
    "multiple_of": lambda c: f"must be a multiple of {c['multiple_of']}",
    "string_pattern_mismatch": lambda c: f"must match `{c['pattern']}`",
    "string_too_short": _length("must have at least {} character{}"),
    "string_too_long": _length("must have at most {} character{}"),
    "too_short": _length("must have at least {} item{}"),
    "too_long": _length("must have at most {} item{}"),
}
