"""Checks of an environment's observations and steps against its own spec."""

from __future__ import annotations

import logging
from typing import Final, cast

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec, Observation, Transition
from recipes.embodied.envs.simulators.package_versions import has_locked_versions, versions_of
from recipes.training.arrays import Array
from rlinf_core import RLinfError
from rlinf_core.runners.storage.first_contact import ContactCheck, Difference, FirstContact

_LOGGER: Final = logging.getLogger("rlinf")
_AGREE = "`spec` and `_observe` must agree; observations are `states`, `images.CAMERA` and `instructions`"


class EnvContractError(RLinfError):
    """An environment violates the contract of `VectorEnv`."""


def check_observations(spec: EnvSpec, num_envs: int, seen: Observation) -> None:
    """Check that observations have exactly the names, shapes and types of `spec`.

    Raises:
        EnvContractError: they do not.
    """
    wanted = spec.observations
    for name, (row, kind) in wanted.items():
        if name not in seen:
            raise broken(f"`spec` declares `{name}`, which is not observed", _AGREE)
        array, shape = np.asarray(seen[name]), (num_envs, *row)
        if array.shape != shape or kind not in (array.dtype.name, array.dtype.kind):
            said = f"{'text' if kind == 'U' else kind}{list(shape)}"
            raise broken(f"`{name}` is {array.dtype}{list(array.shape)}; `spec` says {said}", _AGREE)
    extra = next((name for name in seen if name not in wanted), None)
    if extra is not None:
        raise broken(f"the observation `{extra}` is not declared in `spec`", _AGREE)


def check_transition(num_envs: int, moved: Transition) -> None:
    """Check that rewards and flags are arrays with one value per environment.

    Raises:
        EnvContractError: they are not.
    """
    flags = {name: getattr(moved, name) for name in ("terminations", "truncations", "successes")}
    arrays = {"rewards": (moved.rewards, "float32")}
    arrays |= {name: (flag, "bool") for name, flag in flags.items() if flag is not None or name == "terminations"}
    wanted = [num_envs]
    for name, (value, dtype) in arrays.items():
        # An environment of a user's own may return anything; a number would count for the whole batch.
        array = cast("Array", value)
        if not isinstance(cast("object", value), np.ndarray):
            said = type(array).__name__
        elif list(array.shape) != wanted or array.dtype != dtype:
            said = f"{array.dtype}{list(array.shape)}"
        else:
            continue
        raise broken(
            f"`{name}` of a step is {said}; expected {dtype}{wanted}",
            "`_advance` returns a `Transition` of arrays with one value for each environment of the batch",
        )


def first_step_check(section: str) -> ContactCheck:
    """Return the comparison that the environments of a section have passed, once they have made a step."""
    return ContactCheck("env", f"first observations and step of {section}", "the spec of its environments")


def compare_starts(contact: FirstContact, section: str, env_type: str, faults: list[str] | None) -> None:
    """Keep the comparison of stored starts, at rest, with the tasks' own descriptions of them.

    Args:
        contact: keeps the result.
        section: the section of the environments, as in `env.eval`.
        env_type: their kind.
        faults: `VectorEnv.start_faults`.

    Raises:
        EnvContractError: they differ under other versions than those of the kind's lock file, and comparisons are not
            skipped.
    """
    if faults is None:
        return
    packages = ", ".join(f"{name} {version}" for name, version in versions_of(env_type).items())
    note = f"{packages}: {'; '.join(faults) or 'the first start of each task is as described'}"
    # Under the versions of published numbers it is a start that its makers stored so, for everybody.
    if faults and not contact.skips and not has_locked_versions(env_type):
        raise EnvContractError(
            f"the stored starts of `{env_type}` do not hold under this physics: {faults[0]}",
            where=section,
            why=f"{packages}; success rates from such starts compare with nobody's",
            help=f"run `rlinf env setup {env_type}`, which installs the versions of published numbers, and"
            f" `rlinf env check {env_type}`, which tries each task; `runner.skip_checks=true` uses them all the same",
        )
    if faults:
        _LOGGER.warning("stored starts of %s do not hold: %s", section, note)
    contact.keep(f"stored starts of {section}", "the tasks' own descriptions", Difference(note=note, agrees=not faults))


def broken(message: str, help: str) -> EnvContractError:
    """Return the error about a contract violation."""
    return EnvContractError(message, help=help)
