"""The resolved configuration with the origin of each value, as YAML and as data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from rlinf_cli.command import Result
from rlinf_cli.job.job_file import SoundJob
from rlinf_core.config.composing.origins import Nested, Origin, lines_of, nested_of, origins, says_something
from rlinf_core.config.secrets import mask
from rlinf_core.config.tree import format_path
from rlinf_core.scalars import plain

SCHEMA = "rlinf.config/1"
# Origins are aligned in one column, except after longer values.
_COLUMN = 56


def config_result(job: SoundJob, *, every_value: bool = False) -> Result:
    """Return the configuration of a job with secrets masked; without `every_value` the text omits empty defaults."""
    tree = mask(job.tree, job.secret)
    values = list(origins(tree, job.model))
    shown = [origin for origin in values if every_value or says_something(origin)]
    return Result(partial(config_text, shown), partial(config_record, values))


def config_text(origins: Iterable[Origin]) -> str:
    """Return YAML that loads to the same values, with each value's origin as a comment."""
    lines = list(lines_of(nested_of(origins)))
    column = max((len(text) for text, origin in lines if origin and len(text) < _COLUMN), default=0)
    return "\n".join(f"{text.ljust(column)}  # {_where(origin)}" if origin else text for text, origin in lines)


def config_record(origins: Iterable[Origin]) -> dict[str, Any]:
    """Return the format `rlinf.config/1`: the data as a whole, and every value by its path.

    A number in a text field is the text as written, as is a number that JSON cannot express.
    """
    values = [(origin, _value(origin)) for origin in origins]
    nested = nested_of(origin for origin, _ in values)
    data = {origin.path: value for origin, value in values}
    return {
        "schema": SCHEMA,
        "config": _data(nested, data),
        "values": [_record(origin, value) for origin, value in values],
    }


def _where(origin: Origin) -> str:
    """Return an origin without the column, as in `job.yaml:9`."""
    if origin.span is None or origin.kind == "override":
        return origin.where
    return f"{origin.span.source.name}:{origin.span.begin.line}"


def _value(origin: Origin) -> Any:
    value = origin.value
    infinite = isinstance(value, float) and not math.isfinite(value)
    return origin.text if infinite or (origin.is_text and isinstance(value, int | float)) else plain(value)


def _data(nested: Nested, values: dict[Any, Any]) -> Any:
    if isinstance(nested, Origin):
        return values[nested.path]
    if nested and all(isinstance(key, int) for key in nested):
        return [_data(value, values) for value in nested.values()]
    return {str(key): _data(value, values) for key, value in nested.items()}


def _record(origin: Origin, value: Any) -> dict[str, Any]:
    begin = origin.span.begin if origin.span else None
    return {
        "path": format_path(origin.path),
        "value": value,
        "origin": origin.kind,
        "file": origin.span.source.name if origin.span else None,
        "line": begin.line if begin else None,
        "column": begin.column if begin else None,
    }
