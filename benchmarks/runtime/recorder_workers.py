"""Workers of the recipes embodied and math whose flight recorder a flag switches; see `bench_recorder`."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
from recipes.embodied.workers.env_worker import EnvWorker
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.language.workers.actor_worker import LanguageActor
from recipes.language.workers.reward_worker import RewardWorker
from recipes.language.workers.rollout_worker import LanguageRolloutWorker
from rlinf_core import Worker
from rlinf_core.process.activity import InflightOps

# A file in the folder of runs, whose first byte says whether the recorder is on.
FLAG: Final = "flag"
# Files beside it, one for each process: the number of its thread that answers the manager.
SUPERVISED: Final = "supervised-"


def switchable(config: Any) -> None:
    """Let the recorder of this process follow the flag."""
    folder = Path(config.runner.logger.log_path)
    with Path(folder, FLAG).open("r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    threads = [str(thread.native_id) for thread in threading.enumerate() if thread.name == "rlinf-control"]
    Path(folder, f"{SUPERVISED}{os.getpid()}").write_text(" ".join(threads), encoding="ascii")
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


class Switched(Worker):
    """A worker whose recorder follows the flag."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        switchable(config)


class SwitchedActor(Switched, EmbodiedFSDPActor):
    """Trains."""


class SwitchedRollout(Switched, MultiStepRolloutWorker):
    """Acts."""


class SwitchedEnv(Switched, EnvWorker):
    """Steps environments."""


class SwitchedLanguageActor(Switched, LanguageActor):
    """Trains a language model."""


class SwitchedLanguageRollout(Switched, LanguageRolloutWorker):
    """Answers prompts."""


class SwitchedReward(Switched, RewardWorker):
    """Scores answers."""
