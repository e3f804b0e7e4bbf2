"""Episodes that simulator processes died of: named by their starts, and set aside at the third death."""

from __future__ import annotations

from recipes.embodied.envs.processes.process_pool import SimulatorDiedError
from recipes.embodied.envs.processes.simulator import EpisodeAtDeath
from recipes.embodied.loop.protocols import Layout
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Suspects, all_deaths


class SuspectedEpisodes:
    """The episodes of a run that simulator processes died of, over all its attempts.

    A simulator process reports which environment it was at. An env worker that steps environments itself does not: its
    death is charged to no episode.

    Args:
        record: the record of the run, which keeps them.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._suspects: Suspects[EpisodeAtDeath] = record.suspects
        self._died = False

    @property
    def count(self) -> int:
        """The number of starts that are set aside."""
        return len(self._suspects.set_aside)

    def known_in(self, layout: Layout) -> Layout:
        """Return a layout with the starts that env workers leave out."""
        return layout._replace(suspects=self._died or bool(self.count), set_aside=self._suspects.set_aside)

    def died(self, error: BaseException, step: int) -> None:
        """Count the deaths in a failed step, and set an episode aside at its third."""
        for cause in all_deaths(error).values():
            episode = cause.episode if isinstance(cause, SimulatorDiedError) else None
            if episode is None:
                continue
            self._died = True
            deaths = self._suspects.died_of_one(episode.name, episode, f"{cause.cause}".partition("\n")[0])
            if deaths:
                self._record.set_aside("episode", episode.name, step, deaths, replay_of(episode))


def replay_of(episode: EpisodeAtDeath) -> dict[str, object]:
    """Return what `rlinf why --replay` needs to repeat an episode, beside the run's file."""
    return {
        "environment": episode.environment,
        "group": episode.group,
        "seed": episode.start.seed,
        "number": episode.start.number,
        "actions": [list(action) for action in episode.actions],
    }
