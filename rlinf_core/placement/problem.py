"""Problems of a placement, as values: the runtime raises the first, `rlinf validate` shows them all."""

from __future__ import annotations

from typing import NamedTuple

from rlinf_core.config.ranks import RankMapPart
from rlinf_core.errors import PlacementError


class PlacementProblem(NamedTuple):
    """One mistake.

    Attributes:
        code: the diagnostic code.
        message: what is wrong, naming component or strategy, and what exists.
        help: the nearest fix, or None.
        part: the part of the rank map that is wrong, or None for the map as a whole.
        label: which of the selected labels is wrong, as an index, or None.
    """

    code: str
    message: str
    help: str | None = None
    part: RankMapPart | None = None
    label: int | None = None

    def error(self, where: str) -> PlacementError:
        """Return the mistake as an error at `where`, to which the offending part is added."""
        if self.part is not None and str(self.part) not in where.split("`"):
            where = f"{where}, part `{self.part}`"
        return PlacementError(self.message, where=where, help=self.help)
