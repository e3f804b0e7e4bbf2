"""Types of values that several sections share."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from rlinf_core.address import check_name
from rlinf_core.config.sections.hub_names import located
from rlinf_core.errors import InvalidNameError
from rlinf_core.scalars import Float, Int, Text, problem

Count = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Port = Annotated[Int, Field(ge=1, lt=2**16)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
PositiveFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
Precision = Literal["fp32", "bf16", "fp16"]
# The aggregation of token losses, and the level of probability ratios and entropies.
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["token_level", "action_level", "chunk_level"]


def _or_never(value: int) -> int:
    if value < 1 and value != -1:
        raise problem("bad-value", f"must be at least 1, or -1, found `{value}`")
    return value


# A number of steps, or -1 for never, as in related projects.
StepsOrNever = Annotated[
    Int, AfterValidator(_or_never), WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}})
]


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise problem("bad-value", "a path is missing here", help="remove the key or write the path")
    return os.path.expanduser(text)  # no shell does it for a file, nor after the `=` of an argument


def _absolute(text: str) -> str:
    return text if "://" in text else os.path.abspath(text)


# A path as written, but with `~` expanded, for files that only this process reads.
WrittenPath = Annotated[Text, AfterValidator(_path)]
# A relative path is relative to the command's working folder, in files and overrides alike. Workers may run in another
# folder or on other machines, so they get the absolute path.
FilePath = Annotated[WrittenPath, AfterValidator(_absolute)]


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


# An empty text means none, as `null` does.
OptionalPath = Annotated[FilePath | None, BeforeValidator(_none_if_empty)]
# The folder of a model or a tokenizer: a path, or its name in the HuggingFace Hub, `ORG/NAME`; likewise a data set's.
ModelPath = Annotated[WrittenPath, AfterValidator(partial(located, kind="model"))]
OptionalModelPath = Annotated[ModelPath | None, BeforeValidator(_none_if_empty)]
DataPath = Annotated[WrittenPath, AfterValidator(partial(located, kind="dataset"))]
OptionalWrittenPath = Annotated[WrittenPath | None, BeforeValidator(_none_if_empty)]


_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_seconds(text: str) -> float | None:
    """Return the seconds of `90s`, `10m`, `12h` or `7d`; None for other text."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def _duration(text: str) -> str:
    if not duration_seconds(text):
        raise problem("bad-value", f"must be a time such as `90s`, `10m` or `2h`, found `{text}`")
    return text


def _group_name(name: str) -> str:
    try:
        check_name(name)
    except InvalidNameError as error:
        raise problem("bad-value", error.message, help=error.help) from None
    return name


GroupName = Annotated[Text, AfterValidator(_group_name)]
# A positive duration, as written.
Duration = Annotated[Text, AfterValidator(_duration), WithJsonSchema({"type": "string", "pattern": _DURATION.pattern})]
