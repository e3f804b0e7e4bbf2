"""Settings of Python under which Ray does not start."""

from __future__ import annotations

import os

from rlinf_core.errors import ClusterError

_OPTIMIZE = "PYTHONOPTIMIZE"


def refuse_stripped_docstrings() -> None:
    """Refuse to start Ray where the environment strips docstrings, which Ray's agents need.

    Raises:
        ClusterError: `PYTHONOPTIMIZE` is 2 or more.
    """
    level = os.environ.get(_OPTIMIZE, "")
    # Python takes a word for 1.
    if level.isdecimal() and int(level[:6]) >= 2:
        raise ClusterError(
            f"Ray does not start with {_OPTIMIZE}={level[:6]}",
            why="it strips docstrings, and Ray's agents add to theirs",
            help=f"unset {_OPTIMIZE}",
        )
