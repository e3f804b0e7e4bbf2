"""Types of values that sections of several recipes share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
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

from recipes.sections.data_files import EVALUATION, TRAINING, files_of_part
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import DataPath, PositiveFloat
from rlinf_core.scalars import problem


def one_or_many(value: Any) -> Any:
    """Return a list unchanged, and any other value as a list of one."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


_SCALAR = ["string", "number", "boolean"]
_FILE_PATHS_SCHEMA = WithJsonSchema({"type": [*_SCALAR, "array"], "items": {"type": _SCALAR}})
# A number or a boolean is read as the text that was written. A name of the hub becomes the files of that part.
TrainFiles = Annotated[
    tuple[DataPath, ...],
    BeforeValidator(one_or_many),
    AfterValidator(partial(files_of_part, words=TRAINING)),
    _FILE_PATHS_SCHEMA,
]
TestFiles = Annotated[
    tuple[DataPath, ...],
    BeforeValidator(one_or_many),
    AfterValidator(partial(files_of_part, words=EVALUATION)),
    _FILE_PATHS_SCHEMA,
]


def as_data(value: Any) -> Any:
    """Return a section as a mapping, and any other value unchanged."""
    return value.model_dump(mode="json") if isinstance(value, ConfigModel) else value


class WeightedFile(ConfigModel):
    """A file among several, with its weight."""

    path: DataPath = Field(description="The file.")
    weight: PositiveFloat | None = Field(
        default=None, description="Share of the training rows relative to other files. Default: its number of rows."
    )


_DATA_PATH: TypeAdapter[str] = TypeAdapter(DataPath)


def _weighted(value: Any) -> str | WeightedFile:
    if isinstance(value, WeightedFile):
        return value
    return WeightedFile.model_validate(value) if isinstance(value, Mapping) else _DATA_PATH.validate_python(value)


def _weighted_files(items: tuple[str | WeightedFile, ...]) -> tuple[str | WeightedFile, ...]:
    """Return the files of training; those of a name of the hub share its weight."""
    listed: list[str | WeightedFile] = []
    for item in items:
        if isinstance(item, str):
            listed += files_of_part((item,), words=TRAINING)
            continue
        files = files_of_part((item.path,), words=TRAINING)
        share = None if item.weight is None else item.weight / len(files)
        listed += [item.model_copy(update={"path": file, "weight": share}) for file in files]
    return tuple(listed)


_WEIGHTED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "weight": {"type": "number", "exclusiveMinimum": 0}},
    "additionalProperties": False,
}
WeightedFiles = Annotated[
    tuple[Annotated[str | WeightedFile, PlainValidator(_weighted), PlainSerializer(as_data)], ...],
    BeforeValidator(one_or_many),
    AfterValidator(_weighted_files),
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
    in its place; `form` is the regular expression of further names, which are taken as they are.
    """

    what: str
    known: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    instead: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    form: str | None = None

    def check(self, text: str) -> str:
        """Return our name for `text`, or `text` where it has the form of an import.

        Raises:
            PydanticCustomError: `unknown-choice`.
        """
        text = self.others.get(text, text)
        if text in self.known or _is_import(text) or (self.form is not None and re.fullmatch(self.form, text)):
            return text
        from rlinf_core.suggest import did_you_mean

        hint = did_you_mean(text, self.known) or "known: " + ", ".join(f"`{name}`" for name in self.known) + ";"
        help = self.instead.get(text, f"{hint} your own: `package.module:name`")
        raise problem("unknown-choice", f"unknown {self.what} `{text}`", help=help)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"}
        formed = [] if self.form is None else [{"type": "string", "pattern": f"^{self.form}$"}]
        return {"anyOf": [{"enum": [*self.known, *self.others]}, own, *formed]}


def _is_import(text: str) -> bool:
    module, separator, name = text.partition(":")
    return bool(separator) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
