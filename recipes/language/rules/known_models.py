"""Types of models that the installed transformers knows, by its tables alone: it takes seconds to import."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

# A table's name, and the file that holds it.
_ALL: Final = ("CONFIG_MAPPING_NAMES", "models/auto/auto_mappings.py")
_WRITING: Final = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "models/auto/modeling_auto.py")


class KnownModels(NamedTuple):
    """Values of `model_type`.

    Attributes:
        all: the types that have a configuration.
        writing: the types that have a causal language model.
    """

    all: frozenset[str]
    writing: frozenset[str]


@cache
def known_model_types() -> KnownModels | None:
    """Return the types; None where transformers is not installed, or holds its tables otherwise."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        every, writing = (_keys(folder / file, name) for name, file in (_ALL, _WRITING))
    except (OSError, ValueError, SyntaxError):
        return None
    # A type that transformers adds to the first table by a statement is in the second.
    return KnownModels(every | writing, writing) if every and writing else None


def _keys(file: Path, name: str) -> frozenset[str]:
    """Return the keys of `NAME = OrderedDict([(key, value), ...])` in a file of Python, which is not run."""
    for statement in ast.parse(file.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and [*map(ast.unparse, statement.targets)] == [name]:
            (pairs,) = cast("ast.Call", statement.value).args
            return frozenset(key for key, _ in cast("list[tuple[str, Any]]", ast.literal_eval(pairs)))
    return frozenset()
