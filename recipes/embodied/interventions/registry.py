"""Constructors of intervention sources and judges by name, imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.embodied.config.intervention_types import JUDGES, SOURCES, KeysOptions
from recipes.embodied.interventions.devices.event_device import missing_package
from recipes.embodied.interventions.intervention import InterventionSource, Steerable, SuccessJudge, Verdict
from recipes.training.arrays import Array
from rlinf_core.algorithms.options import checked_options
from rlinf_core.process.requirements import missing_modules
from rlinf_core.registry import Registry

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
