"""Types of values that sections of several recipes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from rlinf_core import ConfigModel, FilePath, PositiveFloat
from rlinf_core.scalars import problem


def one_or_many(value: Any) -> Any:
    """Return a list unchanged, and any other value as a list of one."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


_SCALAR = ["string", "number", "boolean"]
FilePaths = Annotated[
    tuple[FilePath, ...],
    BeforeValidator(one_or_many),
    # A number or a boolean is read as the text that was written.
    WithJsonSchema({"type": [*_SCALAR, "array"], "items": {"type": _SCALAR}}),
]


def as_data(value: Any) -> Any:
    """Return a section as a mapping, and any other value unchanged."""
    return value.model_dump(mode="json") if isinstance(value, ConfigModel) else value


class WeightedFile(ConfigModel):
    """A file among several, with its weight."""

    path: FilePath = Field(description="The file.")
    weight: PositiveFloat | None = Field(
        default=None, description="Share of the training rows relative to other files. Default: its number of rows."
    )


_FILE_PATH: TypeAdapter[str] = TypeAdapter(FilePath)


def _weighted(value: Any) -> str | WeightedFile:
    if isinstance(value, WeightedFile):
        return value
    return WeightedFile.model_validate(value) if isinstance(value, Mapping) else _FILE_PATH.validate_python(value)


_WEIGHTED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "weight": {"type": "number", "exclusiveMinimum": 0}},
    "additionalProperties": False,
}
WeightedFiles = Annotated[
    tuple[Annotated[str | WeightedFile, PlainValidator(_weighted), PlainSerializer(as_data)], ...],
    BeforeValidator(one_or_many),
    WithJsonSchema(
        {
            "type": [*_SCALAR, "object", "array"],
            **{key: value for key, value in _WEIGHTED_SCHEMA.items() if key != "type"},
            "items": {"anyOf": [{"type": _SCALAR}, _WEIGHTED_SCHEMA]},
        }
    ),
]


@dataclass(frozen=True, slots=True)
class KnownOrOwn:
    """Metadata of a text type: one of our names, or `package.module:name` for something of the user's own.

    `others` are names that related projects use, each read as ours; `instead` are such names, each with what there is
    in its place.
    """

    what: str
    known: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    instead: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

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
        help = self.instead.get(text, f"{hint} your own: `package.module:name`")
        raise problem("unknown-choice", f"unknown {self.what} `{text}`", help=help)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"}
        return {"anyOf": [{"enum": [*self.known, *self.others]}, own]}


def _is_import(text: str) -> bool:
    module, separator, name = text.partition(":")
    return bool(separator) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
