"""The current step of a run, written to its folder for other processes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.view import View
from rlinf_core.errors import RunError
from rlinf_core.runners.events import CheckpointSaved, Event, RunFinished, RunRestarted, RunStarted, StepFinished

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder

LOGGER = logging.getLogger("rlinf")
# The state is written as a whole and synced. Its cost sets the interval, at most 2 % of the run: the written step lags
# by milliseconds on a good disk, by this many seconds on the worst.
_SHARE = 0.02
_SELDOM = 2.0


class StateWriter(View):
    """Writer of the current step to the run's state: as often as is cheap, and before every long phase.

    A step that cannot be written ends no run: the next one is tried.
    """

    def __init__(self, progress: RunProgress, folder: RunFolder) -> None:
        super().__init__(progress)
        self._folder = folder
        self._next = progress.clock()
        self._warned = False

    def show(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._folder.started()
        lasting = isinstance(event, CheckpointSaved | RunRestarted | RunFinished)
        began = self.progress.clock()
        if lasting or (isinstance(event, StepFinished) and began >= self._next):
            self._write()
            ended = self.progress.clock()
            self._next = ended + min(_SELDOM, (ended - began) / _SHARE)

    def _write(self) -> None:
        try:
            self._folder.update(step=self.progress.step)
        except RunError as error:
            if not self._warned:
                LOGGER.warning("the current step cannot be written to %s: %s", error.where, error.why)
            self._warned = True
