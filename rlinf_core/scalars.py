"""Scalar types for configuration models, and the base class of those models.

A YAML reader turns `4090`, `0322142001230` and `2.50` into numbers even if they are meant as a label, a serial and an
environment value. So the reader returns numbers and booleans as subclasses that keep their text, and the types below
select what a field takes:

* `Text` takes any scalar as written;
* `Int`, `Float`, `Bool` take only numbers and booleans (never `true` for an int), and yield plain Python values;
* `Data` takes anything and yields plain Python values.
"""

from __future__ import annotations

import math
import types
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    LiteralString,
    Self,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

# Digits that fit into a 64-bit integer.
_LONGEST_INT = 18
# Up to here every integer is exactly representable as a float.
_EXACT = 2**53


class WrittenScalar:
    """A number or boolean that was written as `raw`."""

    raw: str

    def __new__(cls, value: float, raw: str) -> Self:
        self = cast("Any", super()).__new__(cls, value)
        self.raw = raw
        return cast("Self", self)


class YamlInt(WrittenScalar, int):
    """An int with its text."""


class YamlFloat(WrittenScalar, float):
    """A float with its text."""


class YamlBool(WrittenScalar, int):
    """A boolean with its text. An int, because bool cannot be subclassed; pydantic accepts 0 and 1 as booleans."""

    def __repr__(self) -> str:
        return "True" if self else "False"


def plain(value: Any) -> Any:
    """Return `value` as plain Python values, recursively."""
    if isinstance(value, YamlBool):
        return bool(value)
    if isinstance(value, YamlInt):
        return int(value)
    if isinstance(value, YamlFloat):
        return float(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        return {key: plain(item) for key, item in items.items()}
    if isinstance(value, list):
        return [plain(item) for item in cast("list[Any]", value)]
    return value


def problem(
    code: LiteralString, message: str, *, help: str | None = None, start: int | None = None, end: int | None = None
) -> PydanticCustomError:
    """Return the error for an invalid value, to be reported under the diagnostic `code`.

    Its `ctx` has `start` and `end`, the offsets of the wrong part in the raw text, and `help`, if given.
    """
    context = {"message": message, "help": help, "start": start, "end": end}
    return PydanticCustomError(code, "{message}", {name: value for name, value in context.items() if value is not None})


def kind_of(value: object) -> str:
    """Return the kind of a configuration value in words, as in `an integer`."""
    if value is None:
        return "null"
    if isinstance(value, YamlBool | bool):
        return "a boolean"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity"
    for type_, name in ((int, "an integer"), (float, "a number"), (str, "text"), (list, "a list"), (dict, "a mapping")):
        if isinstance(value, type_):
            return name
    return type(value).__name__


def expected(what: str, value: Any) -> PydanticCustomError:
    """Return the error for a value of the wrong kind."""
    return PydanticCustomError("wrong-type", "expected {what}, found {found}", {"what": what, "found": kind_of(value)})


def text_of(value: Any, what: str = "text") -> str:
    """Return the text of a scalar as written; `what` describes the expected value in the error.

    Raises:
        PydanticCustomError: `value` is null, a list or a mapping.
    """
    raw = getattr(value, "raw", value)
    if isinstance(raw, str):
        return raw
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, int | float):
        return str(raw)
    raise expected(what, value)


def _text(value: Any) -> str:
    return text_of(value)


def _int(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)  # `1e6` and `10.0` are integers, as they are to JSON Schema
    if isinstance(value, bool | YamlBool) or not isinstance(value, int):
        raise expected("an integer", value)
    if abs(value) >= 10**_LONGEST_INT:
        raise problem("bad-value", f"must be an integer of at most {_LONGEST_INT} digits")
    return int(value)


def _float(value: Any) -> Any:
    if isinstance(value, bool | YamlBool) or not isinstance(value, int | float):
        raise expected("a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # `.inf` is explicit; digits that overflow are a mistake.
    if math.isinf(number) and (not isinstance(value, float) or getattr(value, "raw", "")[-1:].isdigit()):
        raise problem("bad-value", "must be a number below 1.8e308")
    return number


def _bool(value: Any) -> Any:
    if isinstance(value, bool | YamlBool):
        return bool(value)
    raise expected("true or false", value)


def impossible_address(text: str) -> str | None:
    """Return why no machine can have the IP address `text`, or None."""
    # Imported here: most files hold no address.
    from ipaddress import IPv4Network, ip_address

    try:
        address = ip_address(text)
    except ValueError:
        return f"`{text}` is not an IP address"
    if address.is_unspecified or (address.version == 4 and address in IPv4Network("0.0.0.0/8")):
        return f"`{text}` does not name a particular machine"
    if address.is_multicast or text == "255.255.255.255":
        return f"`{text}` is a multicast or broadcast address"
    return None


Text = Annotated[str, BeforeValidator(_text), WithJsonSchema({"type": ["string", "number", "boolean"]})]
Int = Annotated[int, BeforeValidator(_int)]
Float = Annotated[float, BeforeValidator(_float)]
Bool = Annotated[bool, BeforeValidator(_bool)]
Data = Annotated[Any, BeforeValidator(plain)]


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass

    @dataclass_transform(eq_default=False, kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
    class _FrozenModel(ModelMetaclass):
        """Metaclass of models whose fields are frozen for type checkers, so that a subclass may narrow their types."""

else:
    _FrozenModel = type(BaseModel)


class StrictModel(BaseModel, metaclass=_FrozenModel):
    """A mapping of a configuration file: immutable, without unknown keys.

    `null` means the default of a key that has one, unless `null` is a valid value of the key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    _null_is_default: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the description of a field for which a subclass only changes the default."""
        for base in cls.__mro__[1:]:
            if not issubclass(base, StrictModel):
                continue
            for name, inherited in base.model_fields.items():
                field = cls.model_fields[name]
                if field.description is None:
                    field.description = inherited.description
        cls._null_is_default = frozenset(
            name
            for name, field in cls.model_fields.items()
            if not field.is_required() and not _takes_null(field.annotation)
        )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        entries = cast("dict[str, Any]", value)
        return {key: item for key, item in entries.items() if item is not None or key not in cls._null_is_default}


def _takes_null(annotation: object) -> bool:
    if get_origin(annotation) is Annotated:
        return _takes_null(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_takes_null(member) for member in get_args(annotation))
    return annotation in (None, types.NoneType, Any)
