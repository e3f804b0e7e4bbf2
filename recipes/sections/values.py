"""Types of values that sections of several recipes share, and sections `options`.

Options are settings that only one function, engine or source reads, each kept as a mapping of those that a file sets
and validated by the pydantic model of the one that reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
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

from rlinf_core import ConfigModel, IgnoredKeys
from rlinf_core.config.model import Finding, several
from rlinf_core.config.sections.values import DataPath, HubPath, PositiveFloat
from rlinf_core.scalars import problem
from rlinf_core.suggest import did_you_mean, quoted

# Words in file names that mark the files of a part, in the order of preference.
TRAINING: Final = ("train",)
EVALUATION: Final = ("test", "valid", "val", "dev", "eval")
# Patterns of row files; a data set is read in the first form that it has.
_FORMS: Final = ("**/*.parquet", "**/*.jsonl*", "**/*.json")
_DESCRIPTIONS: Final = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_NAMED_FOLDERS: Final = 4


def files_of_part(paths: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Return paths with each folder of a data set of the hub replaced by its files of one part.

    Args:
        paths: the paths in a key.
        words: `TRAINING` or `EVALUATION`.

    Raises:
        PydanticCustomError: `bad-value`: a data set has no such files, or has them in several folders.
    """
    return tuple(file for path in paths for file in _files(path, words))


def _files(path: str, words: tuple[str, ...]) -> list[str]:
    if not isinstance(path, HubPath) or not os.path.isdir(path):
        return [path]
    root = Path(path)
    listed: list[str] = []
    for form in _FORMS:
        rows = [file for file in sorted(root.glob(form)) if file.name not in _DESCRIPTIONS]
        listed = listed or [file.relative_to(root).as_posix() for file in rows]
    first = next((word for word in words if any(word in name.lower() for name in listed)), None)
    chosen = [name for name in listed if first is not None and first in name.lower()]
    parts = any(word in name.lower() for name in listed for word in (*TRAINING, *EVALUATION))
    if not chosen and not parts and words == TRAINING:
        chosen = listed
    if not chosen:
        raise problem(
            "bad-value",
            f"`{path.written}` has no files of rows for {words[0]}: no Parquet or JSON file with one of the words"
            f" {', '.join(words)} in its name",
            help="name a file of it, as in `hf://datasets/ORG/NAME/FILE`",
        )
    folders = sorted({name.rpartition("/")[0] for name in chosen})
    if len(folders) > 1:
        shown = ", ".join(f"`{folder or '.'}`" for folder in folders[:_NAMED_FOLDERS])
        raise problem(
            "bad-value",
            f"`{path.written}` has rows for {words[0]} in {len(folders)} folders: {shown}",
            help=f"name one, as in `hf://datasets/{path.name}/{folders[0] or folders[1]}`",
        )
    inner = f"{path.inner}/" if path.inner else ""
    revision = path.commit or path.revision
    return [HubPath(path.written, path.kind, path.name, revision, inner + name) for name in chosen]


def one_or_many(value: Any) -> Any:
    """Return a list or a tuple unchanged, and any other value as a list of one."""
    return cast("list[Any]", value) if isinstance(value, list | tuple) else [value]


_SCALAR = ["string", "number", "boolean"]
_FILE_PATHS_SCHEMA = WithJsonSchema({"type": [*_SCALAR, "array"], "items": {"type": _SCALAR}})
# A number or a boolean is read as the text that was written. A name on the hub becomes the files of the part.
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
    """Return the training files; the files of a data set of the hub share its weight."""
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
    """Metadata of a text type: one of our names, or `package.module:name` for a custom component.

    `others` maps names of related projects to ours; `instead` maps further names to the advice on what to write; `form`
    is a regular expression of names that are kept as they are.
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


M = TypeVar("M", bound=BaseModel)


def check_names(
    at: str, written: Iterable[str], known: Collection[str], of: str, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse options that nothing reads.

    Args:
        at: the key of the options in its section, as in `engine_options`.
        written: the names of the options that the file sets.
        known: the names of those that are read.
        of: what reads them, for the error.
        others: options of other readers, with these.

    Raises:
        ValidationError: an option is unknown; paths are relative to the section.
    """
    unknown = [name for name in written if name not in known]
    if unknown:
        raise several(_unknown(at, name, known, of, others) for name in unknown)


def _unknown(at: str, name: str, known: Collection[str], of: str, others: Mapping[str, str]) -> Finding:
    if name in others:
        help = f"it is an option of {others[name]}: remove it"
    else:
        help = did_you_mean(name, known) or f"known options: {quoted(known)}"
    return (at, name, "[key]"), problem("unknown-key", f"`{name}` is no option of {of}", help=help), None


def unread_options(
    at: str, key: str, readers: Mapping[str, type[BaseModel]], aliases: Mapping[str, str] = MappingProxyType({})
) -> tuple[IgnoredKeys, ...]:
    """Return a rule for each option that some values of a key do not read; values that are not listed may read any.

    Args:
        at: the key of the options, as in `engine_options`.
        key: the key beside it that chooses the reader.
        readers: the model of the options that each value of the key reads.
        aliases: other names of these values.
    """

    def rule(name: str) -> IgnoredKeys:
        reads = {value: name in model.model_fields for value, model in readers.items()}

        def chosen(section: Any) -> str:
            value = getattr(section, key)
            return aliases.get(value, value)

        return IgnoredKeys(
            (f"{at}.{name}",),
            lambda section, sizes: not reads.get(chosen(section), True),
            lambda section: f"`{key}: {chosen(section)}` does not read it",
            "remove it, or write " + " or ".join(f"`{key}: {value}`" for value, is_read in reads.items() if is_read),
            because=(key,),
        )

    names = dict.fromkeys(name for model in readers.values() for name in model.model_fields)
    return tuple(rule(name) for name in names if not all(name in model.model_fields for model in readers.values()))


def read_options(model: type[M], written: Mapping[str, Any]) -> M:
    """Return the options that a model has, with the defaults of those that the file does not set."""
    return model.model_validate({name: value for name, value in written.items() if name in model.model_fields})
