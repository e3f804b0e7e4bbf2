"""Entry points: what installed packages offer to rlinf under a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_core.process.import_path import is_unnamed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, of which the first counts. Imports none of them.

    A folder may say in a `NAME.dist-info` that it is an installed package. The mere working folder of a command is not
    believed: see `is_unnamed`.
    """
    # Imported here: many a command needs no entry points.
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.dist is None or not is_unnamed(str(point.dist.locate_file(""))):
            points.setdefault(point.name, point)
    return points
