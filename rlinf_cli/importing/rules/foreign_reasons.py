"""Why a key of another project becomes nothing here, by patterns of its path: the table `foreign_reasons.toml`."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from functools import cache
from pathlib import Path as FilePath
from typing import Final

from rlinf_cli.importing.outcomes import LeftOut
from rlinf_cli.importing.projects import Project
from rlinf_core.config.tree import Path, format_path

TABLE: Final = FilePath(__file__).with_suffix(".toml")
# Whether nothing is lost by a key, by the table that names it.
_QUIET: Final = {"not_needed": True, "not_available": False}


@cache
def _patterns(project: str) -> list[tuple[re.Pattern[str], str, bool]]:
    """Return patterns with their reasons, the longest first."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))[project]
    rows = [(pattern, why, quiet) for kind, quiet in _QUIET.items() for pattern, why in tables.get(kind, {}).items()]
    rows.sort(key=lambda row: len(row[0]), reverse=True)
    return [(re.compile(fnmatch.translate(pattern)), why, quiet) for pattern, why, quiet in rows]


def reason_of(project: Project, path: Path) -> LeftOut:
    """Return why a key that no rule and no section knows is left out."""
    name = format_path(tuple(segment for segment in path if not isinstance(segment, int)))
    pattern = next(row for row in _patterns(str(project)) if row[0].match(name))
    return LeftOut(pattern[1], quiet=pattern[2])
