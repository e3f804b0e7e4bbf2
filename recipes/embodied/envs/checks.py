"""Checks of what environments give: observations and steps against their spec, numbers against NaN and infinity."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final, cast

import numpy as np

from recipes.embodied.envs.env_spec import BoolArray, EnvSpec, IntArray, Observation, Transition
from recipes.embodied.envs.running import RunningEpisodes
from recipes.training.arrays import Array, NonFiniteError, OnNonFinite, all_finite, nonfinite_rows
from rlinf_core import RLinfError
from rlinf_core.runners.storage.first_contact import ContactCheck

_LOGGER: Final = logging.getLogger("rlinf")
_LOOK_AT_ENV: Final = (
    "look in the environment for a division by zero, a root of a negative number, an overflow, or a number beyond"
    " 3.4e38: the policy computes in float32, in which such a number is infinite"
)
_LOOK_AT_POLICY: Final = "the policy returns it: its weights are not finite; lower `actor.optim.lr` or `clip_grad`"
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


def check_transition(num_envs: int, moved: Transition, altered: int | None) -> None:
    """Check that rewards and flags are arrays with one value per environment, and executed actions with one action.

    Args:
        num_envs: environments of the batch.
        moved: what a step returned.
        altered: numbers in an action, of environments that alter them; None: they say that they alter none.

    Raises:
        EnvContractError: they are not, or there are actions of environments that alter none.
    """
    if moved.actions is not None:
        if altered is None:
            how = "write `alters_actions = True` in its class, or return none"
            raise broken("a step returns `actions`, and the environment says that it alters none", how)
        array, shape = np.asarray(moved.actions), (num_envs, altered)
        if array.shape != shape:
            said = f"`actions` of a step are {array.dtype}{list(array.shape)}; expected float32{list(shape)}"
            raise broken(said, "return what was carried out, an action for each environment of the batch")
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


class NonFiniteGuard:
    """Checks actions, rewards and observations of a batch.

    Args:
        on_nonfinite: `stop` raises; `skip` ends the episode and makes its last step invalid.
        numbers: int64 [B], of the environments among all of the job, for messages.
        episodes: the episodes that they are in the middle of.
    """

    def __init__(self, on_nonfinite: OnNonFinite, numbers: IntArray, episodes: RunningEpisodes) -> None:
        self._stops = on_nonfinite == "stop"
        self._numbers = numbers
        self._episodes = episodes

    def check_actions(self, actions: Array) -> None:
        """Raise a NonFiniteError where an action, of [B, ...], is not finite."""
        if not all_finite(actions):
            raise self._error("action", actions, nonfinite_rows(actions), _LOOK_AT_POLICY)

    def check_executed(self, actions: Array, rows: IntArray | None) -> None:
        """Raise a NonFiniteError where an action that was carried out, of [B, A], is not finite in some rows; None:
        all."""
        if not all_finite(actions if rows is None else actions[rows]):
            wrong = nonfinite_rows(actions)
            if rows is not None:
                wrong &= np.isin(np.arange(len(actions)), rows)
            raise self._error("executed action", actions, wrong)

    def check_observations(self, observations: Observation) -> None:
        """Raise a NonFiniteError where an observation is not finite, whatever `on_nonfinite` says."""
        for name, array in observations.items():
            if not all_finite(array):
                raise self._error(f"observation {name}", array, nonfinite_rows(array))

    def finite_rewards(self, moved: Transition, valid: BoolArray) -> Transition:
        """Return a transition without NaN and infinities among the rewards of `valid` environments.

        With `on_nonfinite: skip` such a step is made invalid, and its episode is truncated.
        """
        if all_finite(moved.rewards):
            return moved
        rows = nonfinite_rows(moved.rewards) & valid
        if not rows.any():
            return moved
        self._skip_or_raise("reward", moved.rewards, rows)
        valid &= ~rows
        return replace(
            moved,
            rewards=np.where(rows, 0, moved.rewards).astype(np.float32),
            truncations=rows if moved.truncations is None else moved.truncations | rows,
        )

    def finite_observations(
        self, observations: Observation, resting: BoolArray, truncations: BoolArray, valid: BoolArray
    ) -> Observation:
        """Return the observations after a chunk without NaN and infinities, as `finite_rewards` does for rewards.

        Args:
            observations: are changed where they are not finite.
            resting: bool [B], whose episodes have ended; extended by those that end here.
            truncations: bool [B, C] of the chunk, likewise.
            valid: bool [B, C] of the chunk, likewise.
        """
        for name, array in observations.items():
            if all_finite(array):
                continue
            rows = nonfinite_rows(array)
            fresh = rows & ~self._episodes.resting
            if fresh.any():
                self._skip_or_raise(f"observation {name}", array, fresh)
            truncations[:, -1] |= rows & ~resting
            resting |= rows
            valid[fresh, _last_true(valid[fresh])] = False
            observations[name] = np.where(rows.reshape(-1, *[1] * (array.ndim - 1)), 0, array).astype(array.dtype)
        return observations

    def _skip_or_raise(self, tensor: str, values: Array, rows: BoolArray) -> None:
        error = self._error(tensor, values, rows)
        if self._stops:
            raise error
        _LOGGER.warning("%s; %d episodes end here, and this step is dropped", error, rows.sum())

    def _error(self, tensor: str, values: Array, rows: BoolArray, help: str = _LOOK_AT_ENV) -> NonFiniteError:
        """Return the error for the first of `rows`, of values [B, ...]."""
        row = int(np.flatnonzero(rows)[0])
        numbers = values[row].ravel()
        steps, episode = self._episodes.steps[row], self._episodes.episode[row] + 1
        return NonFiniteError(
            tensor,
            float(numbers[~np.isfinite(numbers)][0]),
            f"environment {self._numbers[row]}, after {steps} steps of its episode {episode}",
            help,
        )


def _last_true(columns: BoolArray) -> IntArray:
    """Return the last column of each row [k, C] that is true; the last of all where none is."""
    return columns.shape[1] - 1 - np.argmax(columns[:, ::-1], axis=1)
