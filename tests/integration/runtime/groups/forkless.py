"""A module after whose import the server of a forked group can fork no process."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rlinf_core.worker.worker import Worker


def _refuse() -> NoReturn:
    raise OSError(11, "no room for a process")


if sys.argv[0].endswith("fork_server.py"):
    os.fork = _refuse


class Forkless(Worker):
    forked = True
