"""Types of the fields that files of a run folder have, and the reading of such a file into its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinf_core.foreign.files import MOST_BYTES, BadFileError, read_json_object

_LONGEST_VALUE: Final = 60

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
    """Return the content of a file of JSON in a run folder.

    Raises:
        OSError: there is no such file, it cannot be read, or a field has a value that it cannot have; `strerror` names
            the field and the value, and is a sentence without its subject.
    """
    try:
        return model.model_validate(read_json_object(path, most))
    except ValidationError as error:
        raise BadFileError(path, f"has a wrong value: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """Return the first field that a model refused, in words, with its value where it has one."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"]))
    message = fault["msg"].replace("Input should", "it should").replace(" or instance of Attempt", "")
    if not name:
        return f"{message[:1].lower()}{message[1:]}"
    if fault["type"] == "missing":
        return f"`{name}` is missing"
    value = json.dumps(fault["input"], default=str)
    if len(value) > _LONGEST_VALUE:
        value = f"{value[:_LONGEST_VALUE]}..."
    return f"`{name}` is `{value}`, but {message[:1].lower()}{message[1:]}"
