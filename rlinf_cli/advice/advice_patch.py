"""A placement as a file that extends the job's, and as overrides."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rlinf_cli.console.outfile import write_whole
from rlinf_core.config.shipped import shipped_config
from rlinf_core.errors import RLinfError

if TYPE_CHECKING:
    from rlinf_cli.advice.advising import Advice
    from rlinf_core.advice.arrangements import Arrangement, DeviceSpan

_MADE_BY: Final = "# Made by `rlinf inspect placement --advise`"


def changes_of(advice: Advice, arrangement: Arrangement) -> dict[str, Any]:
    """Return the values that a file needs for an arrangement, by key; those that it has already are left out."""
    changed: dict[str, Any] = {}
    for name, seats in arrangement.seats:
        now = advice.devices.seats[name]
        if seats == now or seats.kind is None:
            continue
        changed[f"cluster.component_placement.{name}"] = {"placement": ranks_of(seats), "node_group": seats.kind}
    return {**changed, **advice.flow.changes(arrangement)}


def ranks_of(seats: DeviceSpan) -> str:
    """Return `0-3`, or `2`."""
    last = seats.first + seats.size - 1
    return str(seats.first) if seats.size == 1 else f"{seats.first}-{last}"


def as_overrides(advice: Advice, arrangement: Arrangement) -> list[str]:
    """Return an arrangement as arguments of the command line."""
    words: list[str] = []
    for name, seats in arrangement.seats:
        if seats.kind is not None:
            entry = {"placement": ranks_of(seats), "node_group": seats.kind}
            words.append(f"cluster.component_placement.{name}={json.dumps(entry)}")
    return words + [f"{key}={json.dumps(value)}" for key, value in advice.flow.changes(arrangement).items()]


def write_patch(file: Path, base: str, overrides: Sequence[str], changes: Mapping[str, Any], about: str) -> None:
    """Write a file that `rlinf train` takes: the job's, the overrides given, and the changes.

    Args:
        file: the file; one that this has written before is replaced.
        base: the file of the job, or the name of a shipped one.
        overrides: `KEY=VALUE` arguments that the advice was asked for with.
        changes: values by key.
        about: a line on what it brings.

    Raises:
        RLinfError: another file is in the way, or it cannot be written.
        ValueError: an override is one that a file cannot have, as it deletes a key.
    """
    lines = [*_extends(file, base), *_tree(overrides, changes)]
    if file.is_file() and not _is_advice(file):
        help = "name another one: `--patch FILE`"
        raise RLinfError("the advice is not written over another file", where=str(file), help=help)
    write_whole(file, "\n".join((f"{_MADE_BY}: {about}", *lines)) + "\n")


def _is_advice(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as content:
        return content.read(len(_MADE_BY)) == _MADE_BY.encode()
    return False


def _extends(file: Path, base: str) -> list[str]:
    if base.startswith("recipe="):
        return [f"recipe: {json.dumps(base.partition('=')[2])}"]
    is_file = os.path.isfile(base)
    if not is_file and shipped_config(base) is not None:
        return [f"extends: {base}"]
    return [f"extends: {json.dumps(os.path.relpath(base, file.absolute().parent))}"]


def _tree(overrides: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    tree: dict[str, Any] = {}
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in overrides]
    for key, text in [*pairs, *((key, json.dumps(value)) for key, value in changes.items())]:
        if key.startswith(("~", "+")) or "[" in key or '"' in key:
            raise ValueError(f"a file that extends another cannot have the override `{key}`")
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            below = node.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ValueError(f"`{key}` changes a part of another override")
            node = cast("dict[str, Any]", below)
        node[last] = text
    return _lines(tree, "")


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_lines(cast("dict[str, Any]", value), f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {value}")
    return lines
