"""Workers of the recipe embodied whose flight recorder a flag switches; see `bench_recorder`."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Any, Final

from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
from recipes.embodied.workers.env_worker import EnvWorker
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from rlinf_core.process.inflight_ops import InflightOps

# A file in the folder of runs, whose first byte says whether the recorder is on.
FLAG: Final = "flag"


def switchable(config: Any) -> None:
    """Let the recorder of this process follow the flag."""
    with Path(config.runner.logger.log_path, FLAG).open("r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    end = InflightOps.end

    def unrecorded(self: Any, serial: int) -> None:
        # As `end`, without the line that records.
        self._current.pop(serial, None)
        if self._attached:
            self._attached.pop(serial, None)
        self._changes += 1
        if not self._current:
            self._quiet_since = time.monotonic()

    def switched(self: Any, serial: int) -> None:
        (end if flag[0] else unrecorded)(self, serial)

    InflightOps.end = switched


class SwitchedActor(EmbodiedFSDPActor):
    """Trains."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        switchable(config)


class SwitchedRollout(MultiStepRolloutWorker):
    """Acts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        switchable(config)


class SwitchedEnv(EnvWorker):
    """Steps environments."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        switchable(config)
