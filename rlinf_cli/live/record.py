"""How far a run is, written to its folder for those who look from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_cli.live.progress import Progress
from rlinf_cli.live.view import View
from rlinf_core.runners.events import CheckpointSaved, Event, RunFinished, RunRestarted, StepFinished

if TYPE_CHECKING:
    from rlinf_core.runners.run_folder import RunFolder

# A state is written whole and to the disk: not more often than anyone looks.
_EVERY = 2.0


class StateWriter(View):
    """Keeps the step in the run's state up to date: every few seconds, and at once where something lasting happens."""

    def __init__(self, progress: Progress, folder: RunFolder) -> None:
        super().__init__(progress)
        self._folder = folder
        self._written = progress.clock()

    def show(self, event: Event) -> None:
        lasting = isinstance(event, CheckpointSaved | RunRestarted | RunFinished)
        due = isinstance(event, StepFinished) and self.progress.clock() - self._written >= _EVERY
        if lasting or due:
            self._written = self.progress.clock()
            self._folder.update(step=self.progress.step)
