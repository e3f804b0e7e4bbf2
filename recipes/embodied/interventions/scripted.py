"""An expert that takes over at random moments, for tests and to estimate the worth of human help."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.intervention_types import ScriptedOptions
from recipes.embodied.interventions.intervention import InterventionSource, Steerable, Takeover
from rlinf_core import ConfigError

# Steps whose takeovers are drawn together; a takeover ends with its block.
BLOCK: Final = 256


def takeover_steps(options: ScriptedOptions, env: int, reset: int, episode: int, block: int) -> NDArray[np.bool_]:
    """Return whether the expert acts in each of a block of 256 steps, bool [256].

    The result depends only on the arguments, so that a resumed run gets the same help as an uninterrupted one.

    Args:
        options: frequency and length of takeovers.
        env: number of the environment within the job.
        reset: number of the reset.
        episode: number of the episode since then.
        block: number of the block of steps in the episode.
    """
    random = np.random.default_rng([options.seed, env, reset, episode, block])
    steps = np.zeros(BLOCK, np.bool_)
    step = 0
    while step < BLOCK:
        if random.random() < options.probability:
            length = int(random.integers(options.shortest, options.longest + 1))
            steps[step : step + length] = True
            step += length
        else:
            step += 1
    return steps


class ScriptedSource(InterventionSource):
    """The environment's own expert, see `VectorEnv.expert`."""

    options_model = ScriptedOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        self._blocks: dict[int, tuple[tuple[int, int, int], NDArray[np.bool_]]] = {}

    def read(self) -> Takeover | None:
        """See `InterventionSource`."""
        progress = self.env.progress
        rows = np.zeros(self.env.num_envs, np.bool_)
        for row in range(self.env.num_envs):
            block, step = divmod(int(progress.steps[row]), BLOCK)
            key = (progress.reset, int(progress.episode[row]), block)
            known = self._blocks.get(row)
            if known is None or known[0] != key:
                steps = takeover_steps(self.options, int(progress.numbers[row]), *key)
                known = self._blocks[row] = (key, steps)
            rows[row] = known[1][step]
        if not rows.any():
            return None
        actions = self.env.expert()
        if actions is None:
            raise ConfigError(
                "`intervention.source: scripted` needs a scripted expert, and this task has none",
                help="choose an input device, or give your environment an `expert`",
            )
        return Takeover(rows, np.asarray(actions, np.float32), {})
