"""Entry points: what installed packages offer to rlinf under a name.

`importlib.metadata` tells the same, and takes a tenth of the time of `rlinf --help` to be imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, NamedTuple

from rlinf_core.process.import_path import is_unnamed

_FILE: Final = "entry_points.txt"
_METADATA: Final = (".dist-info", ".egg-info")
# What stands between the words of a package's name differs.
_BETWEEN: Final = re.compile(r"[-_.]+")


class EntryPoint(NamedTuple):
    """An object that a package offers: `value` is `module:object`."""

    name: str
    value: str

    @property
    def module(self) -> str:
        """The module of the object."""
        return self.value.partition(":")[0].strip()

    def load(self) -> Any:
        """Import the module, and return the object in it."""
        result = import_module(self.module)
        for name in filter(None, self.value.partition("[")[0].partition(":")[2].strip().split(".")):
            result = getattr(result, name)
        return result


def offered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, of which the first counts. Imports none of them.

    A folder may say in a `NAME.dist-info` that it is an installed package. The mere working folder of a command is not
    believed: see `is_unnamed`.
    """
    points: dict[str, EntryPoint] = {}
    packages: set[str] = set()
    for folder in sys.path:
        if is_unnamed(folder):
            continue
        try:
            changed = os.stat(folder or ".").st_mtime_ns
        except OSError:
            continue
        for package, lines in _packages(folder or ".", changed):
            # A package that is installed twice is imported from the first folder.
            if package not in packages:
                packages.add(package)
                for point in _points(lines, group):
                    points.setdefault(point.name, point)
    return points


@lru_cache(maxsize=256)
def _packages(folder: str, changed: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the installed packages of a folder as it was at a time, each with the lines of its entry points."""
    packages: list[tuple[str, tuple[str, ...]]] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    for name in names:
        if not name.endswith(_METADATA):
            continue
        try:
            with open(os.path.join(folder, name, _FILE), encoding="utf-8") as file:
                lines = tuple(file)
        except (OSError, UnicodeDecodeError):
            lines = ()
        package = name.rpartition(".")[0].partition("-")[0]
        packages.append((_BETWEEN.sub("_", package).lower(), lines))
    return tuple(packages)


def _points(lines: tuple[str, ...], group: str) -> Iterator[EntryPoint]:
    current = ""
    for line in map(str.strip, lines):
        if line.startswith("[") and line.endswith("]"):
            current = line[1:-1].strip()
        elif current == group and not line.startswith(("#", ";")):
            name, equals, value = line.partition("=")
            if equals:
                yield EntryPoint(name.strip(), value.strip())
