"""A worker whose module says which process has imported it."""

from __future__ import annotations

import os

from rlinf_core.worker.worker import Worker

IMPORTER = os.getpid()


class Imported(Worker):
    forked = True

    def importer(self) -> int:
        return IMPORTER
