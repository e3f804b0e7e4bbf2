"""Constructors of intervention sources by name, imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.embodied.config.intervention_types import SOURCES
from recipes.embodied.interventions.device_packages import missing_package
from recipes.embodied.interventions.intervention import InterventionSource, Steerable
from rlinf_core.algorithms.options import checked_options
from rlinf_core.process.requirements import missing_modules
from rlinf_core.registry import Registry

_SOURCES: Registry[type[InterventionSource]] = Registry(
    "intervention source", {name: known.target for name, known in SOURCES.items()}
)
register_source = _SOURCES.register


def open_source(name: str, env: Steerable, options: Mapping[str, Any]) -> InterventionSource:
    """Return an intervention source for a batch of environments.

    Args:
        name: one of ours, a registered one, or `package.module:Class` of your own.
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
