"""Rules of options that only a user's own component knows, such as `algorithm.options`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipes.sections.algorithm import AlgorithmConfig
from recipes.sections.checks import Report
from rlinf_core import ConfigError, JobConfig
from rlinf_core.algorithms.options import option_names, options_model_of
from rlinf_core.config.tree import Path
from rlinf_core.registry import import_target


def check_algorithm_options(config: JobConfig, algorithm: AlgorithmConfig, report: Report) -> None:
    """Report options of advantage and loss that nothing takes, or that their owner's pydantic model refuses."""
    check_options(config, ("algorithm", "options"), algorithm.options, own_names(algorithm), report)


def own_names(algorithm: AlgorithmConfig) -> Mapping[str, str]:
    """Return the names that may be components of the user's own with options, by their keys."""
    return {"adv_type": algorithm.adv_type, "loss_type": algorithm.loss_type}


def check_options(
    config: JobConfig, at: Path, written: Mapping[str, Any], names: Mapping[str, str], report: Report
) -> None:
    """Report options that no component of the user's own takes; only the workers import it and check them.

    Args:
        config: the file.
        at: the path of the options, as in `("algorithm", "options")`.
        written: the options.
        names: the components that may take them, by the key beside the options that names each.
        report: takes findings.
    """
    if written and not any(":" in name for name in names.values()):
        keys = " or ".join(f"`{key}`" for key in names)
        message = f"`{at[-1]}` has no effect: {keys} name no component of your own"
        help = "remove it, or name a component as `package.module:name`"
        report(at, "not-available", message, help, about=[(*at[:-1], key) for key in names])


def refuse_unknown_options(written: Mapping[str, Any], names: Mapping[str, str], section: str) -> None:
    """Refuse options that none of the user's own components has, in a worker; see `checked_options` for the others.

    Args:
        written: the options.
        names: the components that may take them, by the key that names each.
        section: where the options are written, as in `algorithm.options`.

    Raises:
        ConfigError: an option is unknown, or a component cannot be imported.
    """
    owners = [import_target(name, key) for key, name in names.items() if ":" in name] if written else []
    unknown = unknown_options(owners, written) if owners else []
    if unknown:
        listed = ", ".join(f"`{section}.{name}`" for name in unknown)
        raise ConfigError(f"unknown options: {listed}", help=f"your own {' and '.join(names)} take no such option")


def unknown_options(owners: Iterable[object], written: Mapping[str, Any]) -> list[str]:
    """Return those options that none of the users' own `owners` knows; none where one of them takes any."""
    known: set[str] = set()
    for owner in owners:
        model = options_model_of(owner)
        names = None if model is None else option_names(model)
        if names is None:
            return []
        known |= names
    return [name for name in written if name not in known]
