"""Checks of an environment's observations and steps against its own spec."""

from __future__ import annotations

from typing import cast

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec, Observation, Transition
from recipes.training.arrays import Array
from rlinf_core import RLinfError
from rlinf_core.runners.storage.first_contact import ContactCheck

_AGREE = "`spec` and `_observe` must agree; observations are `states`, `images.CAMERA` and `instructions`"


class EnvContractError(RLinfError):
    """An environment violates the contract of `VectorEnv`."""


def check_observations(spec: EnvSpec, num_envs: int, seen: Observation) -> None:
    """Check that observations have exactly the names, shapes and types of `spec`.

    Raises:
        EnvContractError: they do not.
    """
    for camera, shape in spec.cameras.items():
        if len(shape) != 3 or shape[2] != 3:
            how = "repeat a grey channel three times, and observe depth within `states`"
            raise broken(f"images of `{camera}` are {list(shape)}; those of a camera are RGB, uint8 [H, W, 3]", how)
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


def broken(message: str, help: str) -> EnvContractError:
    """Return the error about a contract violation."""
    return EnvContractError(message, help=help)
