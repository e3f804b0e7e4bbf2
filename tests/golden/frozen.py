"""Comparison with what an earlier commit froze: lines of text, a fact each.

`make golden` rewrites the files under `frozen/`; their diff is then read and committed with the change that it shows.
`pytest tests/golden` compares, and shows the lines that differ.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

FOLDER: Final = Path(__file__).parent / "frozen"
# Runs of the commit that froze: `first`, two steps of `embodied/cartpole-laptop` with their checkpoint, and `longer`,
# the same job with four steps, without one.
DATA: Final = Path(__file__).parent / "data"
IS_REWRITING: Final = os.environ.get("REWRITE_FROZEN") == "1"
_SHOWN: Final = 60


def read_frozen(name: str) -> list[str]:
    """Return the lines that were frozen under `name`; none where nothing was."""
    path = FOLDER / f"{name}.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def check_frozen(name: str, lines: Iterable[str]) -> None:
    """Fail with the lines that differ from those frozen under `name`; under `make golden` write them instead."""
    new = list(lines)
    old = read_frozen(name)
    if IS_REWRITING:
        path = FOLDER / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in new), encoding="utf-8")
    elif new != old:
        changes = list(difflib.unified_diff(old, new, f"frozen {name}", f"now {name}", lineterm="", n=0))
        rest = [f"... and {len(changes) - _SHOWN} more lines"] if len(changes) > _SHOWN else []
        shown = "\n".join([*changes[:_SHOWN], *rest])
        pytest.fail(f"{name} changed; if that is meant, run `make golden` and read its diff\n{shown}", pytrace=False)


def check_names(part: str, names: Iterable[str]) -> None:
    """Fail where files of `part` are frozen for what is no more; under `make golden` delete them instead."""
    known = set(names)
    files = {
        path.relative_to(FOLDER / part).with_suffix("").as_posix(): path for path in (FOLDER / part).rglob("*.txt")
    }
    left = sorted(name for name in files if name not in known)
    if IS_REWRITING:
        for name in left:
            files[name].unlink()
    elif left:
        pytest.fail(f"{part} has no {', '.join(left)} any more", pytrace=False)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the JSON of every value that holds no objects."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, json_of(value)


def json_of(value: Any) -> str:
    """Return `value` as JSON that does not depend on the order of keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
