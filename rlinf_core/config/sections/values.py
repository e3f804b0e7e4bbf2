"""Types of values that several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from rlinf_core.scalars import Float, Int, Text, problem

Count = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
PositiveFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
Precision = Literal["fp32", "bf16", "fp16"]
# How the losses of tokens become one, and what a probability ratio or an entropy is taken of.
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["token_level", "action_level", "chunk_level"]


def _or_never(value: int) -> int:
    if value < 1 and value != -1:
        raise problem("bad-value", f"must be at least 1, or -1 for never, found `{value}`")
    return value


# A number of steps, or -1. The seeds' users write -1 where others would leave the key out.
StepsOrNever = Annotated[
    Int, AfterValidator(_or_never), WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}})
]


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise problem("bad-value", "a path is missing here", help="remove the key or write the path")
    return text


FilePath = Annotated[Text, AfterValidator(_path)]


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


# An empty text names nothing, as `null` does.
OptionalPath = Annotated[FilePath | None, BeforeValidator(_none_if_empty)]


def _one_or_many(value: Any) -> Any:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


FilePaths = Annotated[
    tuple[FilePath, ...],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]


@dataclass(frozen=True, slots=True)
class KnownOrOwn:
    """Metadata of a text type: one of our names, or `package.module:name` for something of the user's own.

    `others` are names that related projects use, each read as ours.
    """

    what: str
    known: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def check(self, text: str) -> str:
        """Return our name for `text`, or `text` where it has the form of an import.

        Raises:
            PydanticCustomError: `unknown-choice`.
        """
        text = self.others.get(text, text)
        if text in self.known or _is_import(text):
            return text
        from rlinf_core.suggest import did_you_mean

        hint = did_you_mean(text, self.known) or "known: " + ", ".join(f"`{name}`" for name in self.known) + ";"
        raise problem(
            "unknown-choice",
            f"unknown {self.what} `{text}`",
            help=f"{hint} your own is written `package.module:name`",
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"}
        return {"anyOf": [{"enum": [*self.known, *self.others]}, own]}


def _is_import(text: str) -> bool:
    module, separator, name = text.partition(":")
    return bool(separator) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
