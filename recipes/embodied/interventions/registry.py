"""Intervention sources and judges by name, imported on demand, and those without a device of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.intervention_types import JUDGES, SOURCES, KeysOptions, ScriptedOptions
from recipes.embodied.interventions.event_device import missing_package
from recipes.embodied.interventions.intervention import InterventionSource, Steerable, SuccessJudge, Takeover, Verdict
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.algorithms.options import checked_options
from rlinf_core.process.requirements import missing_modules
from rlinf_core.registry import Registry

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


_SOURCES: Registry[type[InterventionSource]] = Registry(
    "intervention source",
    {name: known.target for name, known in SOURCES.items()},
    bases=("recipes.embodied.interventions.intervention:InterventionSource",),
)
register_source = _SOURCES.register


def open_source(name: str, env: Steerable, options: Mapping[str, Any]) -> InterventionSource:
    """Return an intervention source for a batch of environments.

    Args:
        name: a built-in or registered name, or a custom `package.module:Class`.
        env: the batch.
        options: the options by name.

    Raises:
        ConfigError: there is no such source, its package is missing, or an option is wrong.
        InterventionError: the device cannot be opened.
    """
    source = SOURCES.get(name)
    if source is not None and source.install is not None and missing_modules(source.modules):
        raise missing_package(name, source.install)
    made = _SOURCES.get(name)
    return made(env, checked_options(made, options, "env.train.intervention.options"))


_JUDGES: Registry[type[SuccessJudge]] = Registry(
    "judge",
    {name: known.target for name, known in JUDGES.items()},
    bases=("recipes.embodied.interventions.intervention:SuccessJudge",),
)


class KeysJudge(SuccessJudge):
    """A person who watches and presses a key for success or failure."""

    options_model = KeysOptions

    def __init__(self, env: Steerable, options: KeysOptions) -> None:
        super().__init__(env, options)
        self._device: InterventionSource | None = None

    def judge(self, observations: Mapping[str, Array]) -> dict[int, Verdict]:
        if self.env.intervention is not None and self.env.intervention.judges:
            return {}  # the verdicts of that source count
        if self._device is None:
            self._device = open_source(self.options.device, self.env, self.options.options)
        reading = self._device.read()
        return {} if reading is None else reading.verdicts

    def close(self) -> None:
        if self._device is not None:
            self._device.close()


def open_judge(name: str, env: Steerable, options: Mapping[str, Any]) -> SuccessJudge:
    """Return a judge of a batch of environments.

    Args:
        name: a built-in name, or a custom `package.module:Class`.
        env: the batch.
        options: the options by name.

    Raises:
        ConfigError: there is no such judge, or an option is wrong.
    """
    made = _JUDGES.get(name)
    return made(env, checked_options(made, options, "env.train.judge.options"))
