"""The rows of `foreign.toml`: what keys of other projects become, and why others become nothing."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isfunction
from typing import Any, Final

from rlinf_cli.importing.foreign_names import foreign_table
from rlinf_cli.importing.outcomes import LeftOut
from rlinf_cli.importing.projects import Project
from rlinf_cli.importing.rules import rlinf, shared, verl
from rlinf_cli.importing.rules.shared import Rule, Table, drop, to
from rlinf_core.config.tree import Path, format_path

# What the rows name: a rule, or a function that returns one for the words of the row.
FUNCTIONS: Final[Mapping[str, Any]] = {
    name: function
    for module in (shared, rlinf, verl)
    for name, function in vars(module).items()
    if isfunction(function) and function.__module__ == module.__name__
}
_ALTERNATIVES: Final = re.compile(r"\{([^{}]*)\}")


def rules_of(*kinds: str) -> Table:
    """Return the rules for files of some kinds; those of a later one hold."""
    rows = (item for kind in kinds for item in foreign_table()["rules"][kind].items())
    return {key: _rule(row) for keys, row in rows for key in _expanded(keys)}


def _expanded(keys: str) -> Iterator[str]:
    match = _ALTERNATIVES.search(keys)
    for name in match[1].split(",") if match else [""]:
        yield f"{keys[: match.start()]}{name}{keys[match.end() :]}" if match else keys


def _rule(row: str | dict[str, Any]) -> Rule:
    if isinstance(row, str):
        return to(row)
    if "why" in row:
        return drop(row["why"], quiet=row.get("quiet", False))
    words = {key: value for key, value in row.items() if key != "by"}
    function = FUNCTIONS[row.get("by", "to")]
    return function(**words) if words else function


@cache
def _patterns(project: str) -> list[tuple[re.Pattern[str], LeftOut]]:
    """Return patterns with their reasons, the longest first."""
    rows = [
        (pattern, LeftOut(row["why"], quiet=row.get("quiet", False)))
        for row in foreign_table()["reasons"]
        for pattern in row.get(project, ())
    ]
    rows.sort(key=lambda row: len(row[0]), reverse=True)
    return [(re.compile(fnmatch.translate(pattern)), reason) for pattern, reason in rows]


def reason_of(project: Project, path: Path) -> LeftOut:
    """Return why a key that no rule and no section knows is left out."""
    name = format_path(tuple(segment for segment in path if not isinstance(segment, int)))
    return next(reason for pattern, reason in _patterns(str(project)) if pattern.match(name))
