"""Types of the fields that files of a run folder have, and the reading of such a file into its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinf_core.foreign.files import MOST_BYTES, BadFileError, read_json_object

_LONGEST_VALUE: Final = 60
# Words of pydantic, and those of a file's reader.
_PLAIN_WORDS: Final = (
    ("a valid dictionary", "a mapping"),
    ("a valid string", "a text"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid list", "a list"),
    ("a valid boolean", "true or false"),
)

Moment = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
"""Seconds since 1970, before the year 5000."""
Step = Annotated[int, Field(ge=0, lt=2**53)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class FileModel(BaseModel):
    """A file of a run folder, or a part of one. No value is converted; fields of later versions are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


M = TypeVar("M", bound=FileModel)


def read_model(path: Path, model: type[M], most: int = MOST_BYTES) -> M:
    """Return the content of a JSON file in a run folder.

    Raises:
        OSError: there is no such file, it cannot be read, or a field has an invalid value; `strerror` names
            the field and the value, and is a sentence without its subject.
    """
    try:
        return model.model_validate(read_json_object(path, most))
    except ValidationError as error:
        raise BadFileError(path, f"has an invalid value: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """Return the first field that a model refused, in words, with its value where it has one."""
    fault = error.errors(include_url=False)[0]
    place = [*map(str, fault["loc"])]
    message = fault["msg"].removeprefix("Value error, ").replace(" or instance of Attempt", "")
    message = message.replace("Input should", "it should")
    for word, plain in _PLAIN_WORDS:
        message = message.replace(word, plain)
    if not place:
        return f"{message[:1].lower()}{message[1:]}"
    if place[-1] == "[key]":
        name, field = f"the key {_shown(fault['input'])}", ".".join(place[:-2])
        return f"`{field}` has {name}, but {message[:1].lower()}{message[1:]}"
    name = ".".join(place)
    if fault["type"] == "missing":
        return f"`{name}` is missing"
    return f"`{name}` is {_shown(fault['input'])}, but {message[:1].lower()}{message[1:]}"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return f"`{text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + '...'}`"
