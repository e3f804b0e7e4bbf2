"""Checks of environments: observations and steps against their spec, numbers against NaN and infinity."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

import numpy as np

from recipes.embodied.envs.env_spec import BoolArray, EnvSpec, IntArray, Observation, Transition
from recipes.embodied.envs.running import RunningEpisodes
from recipes.training.arrays import Array, NonFiniteError, OnNonFinite, all_finite, nonfinite_rows
from rlinf_core import ConfigError, RLinfError
from rlinf_core.runners.storage.first_contact import ContactCheck

_LOGGER: Final = logging.getLogger("rlinf")
_LOOK_AT_ENV: Final = (
    "look in the environment for a division by zero, a root of a negative number, an overflow, or a number beyond"
    " 3.4e38: the policy computes in float32, in which such a number is infinite"
)
_LOOK_AT_POLICY: Final = "the policy returns it: its weights are not finite; lower `actor.optim.lr` or `clip_grad`"
# The largest difference of two first observations of one start, absolute or relative.
_SAME_START: Final = 1e-3
_AGREE = "`spec` and `_observe` must agree; observations are `states`, `images.CAMERA` and `instructions`"


class EnvContractError(RLinfError):
    """An environment violates the contract of `VectorEnv`."""


def form_of_observations(seen: object) -> object:
    """Return shapes and types of observations by name: what `check_observations` looks at, cheap to compare."""
    if not isinstance(seen, dict):
        return type(seen)
    arrays = cast("Observation", seen).items()
    return {name: (getattr(array, "shape", None), getattr(array, "dtype", None)) for name, array in arrays}


def check_observations(spec: EnvSpec, num_envs: int, seen: Observation) -> None:
    """Check that observations have exactly the names, shapes and types of `spec`.

    Raises:
        EnvContractError: an observation does not match.
    """
    if not isinstance(cast("object", seen), dict):
        raise broken(f"`_observe` returns {type(cast('object', seen)).__name__}, not a dictionary of arrays", _AGREE)
    for camera, shape in spec.cameras.items():
        if len(shape) != 3 or shape[2] != 3:
            how = "repeat a grey channel three times, and observe depth within `states`"
            raise broken(f"images of `{camera}` are {list(shape)}; those of a camera are RGB, uint8 [H, W, 3]", how)
    wanted = spec.observations
    for name, (row, kind) in wanted.items():
        if name not in seen:
            raise broken(f"`spec` declares `{name}`, which is not observed", _AGREE)
        array, shape = seen[name], (num_envs, *row)
        said = f"{'text' if kind == 'U' else kind}{list(shape)}"
        if not isinstance(cast("object", array), np.ndarray):
            raise broken(f"`{name}` is {type(array).__name__}; `spec` says {said}, an array", _AGREE)
        if array.shape != shape or kind not in (array.dtype.name, array.dtype.kind):
            raise broken(f"`{name}` is {array.dtype}{list(array.shape)}; `spec` says {said}", _AGREE)
    extra = next((name for name in seen if name not in wanted), None)
    if extra is not None:
        raise broken(f"the observation `{extra}` is not declared in `spec`", _AGREE)


class ObservationCheck:
    """The observations of a batch held against its spec, wherever their form changes.

    Args:
        num_envs: environments of the batch, B.
        declared: returns the spec, which is read when something is first observed.
    """

    def __init__(self, num_envs: int, declared: Callable[[], EnvSpec]) -> None:
        self._num_envs, self._declared = num_envs, declared
        self._spec: EnvSpec | None = None
        # Of the last observations that were checked: shapes and types by name.
        self._form: object = None
        # The first observations, each with a copy, until the first step; None: there were none yet.
        self._kept: list[tuple[Array, Array]] | None = None

    @property
    def spec(self) -> EnvSpec:
        """The spec, as it was when something was first observed."""
        return self._spec or self._declared()

    @property
    def began(self) -> bool:
        """Whether something was observed."""
        return self._kept is not None

    def checked(self, observations: Observation) -> Observation:
        """Return the observations.

        Raises:
            EnvContractError: they do not match the spec.
        """
        form = form_of_observations(observations)
        if form != self._form:
            self._spec = self.spec
            check_observations(self._spec, self._num_envs, observations)
            self._form = form
        return observations

    def keep(self, observations: Observation) -> None:
        """Keep the first observations, for `check_kept`."""
        if self._kept is None:
            self._kept = with_copies(observations)

    def check_kept(self) -> None:
        """Check, after the first step, that the first observations are as they were returned.

        Raises:
            EnvContractError: one has changed.
        """
        if self._kept:
            check_unchanged(self._kept)
            self._kept = []


def with_copies(observations: Observation) -> list[tuple[Array, Array]]:
    """Return each array with a copy, for `check_unchanged`."""
    return [(array, array.copy()) for array in observations.values()]


def check_unchanged(seen: list[tuple[Array, Array]]) -> None:
    """Check that arrays still equal their copies.

    Raises:
        EnvContractError: one differs: it was recorded or will be learned from with the numbers of a later step.
    """
    if not all(np.array_equal(array, copy) for array, copy in seen):
        raise broken("an observation changed after it was returned", "return new arrays from `_observe`, or copies")


def check_groups(size: int, numbers: IntArray, observations: Observation) -> None:
    """Check that the members of a group, neighbors in a batch, observe the same start; images are left out, which may
    vary by rendering.

    Raises:
        EnvContractError: two members observe different numbers.
    """
    for name, array in observations.items():
        if size == 1 or array.dtype.kind != "f":
            continue
        alike = np.isclose(array, array[::size].repeat(size, axis=0), _SAME_START, _SAME_START)
        if not alike.all():
            row = int(np.argmin(alike.reshape(len(array), -1).all(axis=1)))
            raise broken(
                f"environments {numbers[row // size * size]} and {numbers[row]} of one group start differently: their"
                f" first `{name}` differ",
                "draw starts from the seed of `reset` (`super().reset(seed=seed)`, then `self.np_random`), in a"
                " `VectorEnv` from `starts`; or write `group_size: 1`, and an `adv_type` that compares no groups, such"
                " as gae",
            )


def is_rate(value: object) -> bool:
    """Return whether a value is a number of actions per second."""
    number = np.asarray(value)
    return not number.shape and number.dtype.kind in "iuf" and bool(0 < number < np.inf)


def check_rate(rate: object) -> None:
    """Check that `control_hz` is a number of actions per second, or None.

    Raises:
        EnvContractError: it is something else.
    """
    if rate is not None and not is_rate(rate):
        said = f"`control_hz` is {rate!r}, not a number of actions per second"
        raise broken(said, "write a number above 0, or None where it is unknown")


def check_actions(spec: EnvSpec, num_envs: int, actions: Array) -> None:
    """Check that a chunk of actions is [B, C, A] of numbers, or of existing choices.

    Raises:
        ConfigError: it is not.
    """
    choices, size, fault = spec.num_choices, spec.action_size, None
    kinds = "fiu" if choices is None else "iu"
    if not isinstance(cast("object", actions), np.ndarray):
        fault = f"the actions are a `{type(actions).__name__}`; the environments take an array of numpy"
    elif actions.ndim != 3 or (len(actions), actions.shape[2]) != (num_envs, size) or actions.dtype.kind not in kinds:
        said = f"{actions.dtype} {list(actions.shape)}"
        fault = f"the actions are {said}; the environments take {spec.action_dtype} [{num_envs}, C, {size}]"
    elif choices is not None and np.count_nonzero((actions < 0) | (actions >= choices)):
        fault = f"actions go from {actions.min()} to {actions.max()}; the environments take one of {choices}, from 0"
    if fault is not None:
        raise ConfigError(fault, help="a policy of your own returns them from `to_env` (docs/models.md)")


def form_of(moved: object) -> object:
    """Return types and shapes of a result of `_advance`: what `check_transition` looks at, cheap to compare."""
    if not isinstance(moved, Transition):
        return type(moved)
    parts = moved.rewards, moved.terminations, moved.truncations, moved.successes, moved.actions
    return [(type(part), getattr(part, "shape", None), getattr(part, "dtype", None)) for part in parts]


def check_transition(num_envs: int, moved: Transition, altered: int | None) -> None:
    """Check that rewards and flags have one value per environment, and executed actions one action.

    Args:
        num_envs: the number of environments in the batch.
        moved: the result of a step.
        altered: the action size of environments that declare to alter actions; None for others.

    Raises:
        EnvContractError: an array does not match, or environments that declare no altered actions return some.
    """
    if not isinstance(cast("object", moved), Transition):
        raise broken(f"a step returns {type(moved).__name__}", "`_advance` returns a `Transition`")
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
        # A custom environment may return anything; a scalar would be broadcast to the whole batch.
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
    """Return the passed check of a section's environments, to be noted after their first step."""
    return ContactCheck("env", f"first observations and step of {section}", "the spec of its environments")


def broken(message: str, help: str) -> EnvContractError:
    """Return the error about a contract violation."""
    return EnvContractError(message, help=help)


class NonFiniteGuard:
    """Checks actions, rewards and observations of a batch.

    Args:
        on_nonfinite: `stop` raises; `skip` ends the episode and makes its last step invalid.
        numbers: int64 [B], the numbers of the environments within the job, for messages.
        episodes: the running episodes of the environments.
    """

    def __init__(self, on_nonfinite: OnNonFinite, numbers: IntArray, episodes: RunningEpisodes) -> None:
        self._stops = on_nonfinite == "stop"
        self._numbers = numbers
        self._episodes = episodes

    def check_actions(self, actions: Array) -> None:
        """Raise a NonFiniteError if an action in [B, ...] is not finite."""
        if not all_finite(actions):
            raise self._error("action", actions, nonfinite_rows(actions), _LOOK_AT_POLICY)

    def check_executed(self, actions: Array, rows: IntArray | None) -> None:
        """Raise a NonFiniteError if an executed action in [B, A] is not finite in some rows; None: all rows."""
        if not all_finite(actions if rows is None else actions[rows]):
            wrong = nonfinite_rows(actions)
            if rows is not None:
                wrong &= np.isin(np.arange(len(actions)), rows)
            raise self._error("executed action", actions, wrong)

    def check_observations(self, observations: Observation) -> None:
        """Raise a NonFiniteError if an observation is not finite, whatever `on_nonfinite` is."""
        for name, array in observations.items():
            if not all_finite(array):
                raise self._error(f"observation {name}", array, nonfinite_rows(array))

    def finite_rewards(self, moved: Transition, valid: BoolArray) -> Transition:
        """Return a transition without non-finite rewards in `valid` environments.

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
        """Return the observations after a chunk without non-finite values, as `finite_rewards` does for rewards.

        Args:
            observations: the observations; non-finite ones are replaced in place.
            resting: bool [B], whether the episode has ended; set for episodes that end here.
            truncations: bool [B, C] of the chunk; changed likewise.
            valid: bool [B, C] of the chunk; changed likewise.
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
        """Return the error for the first of `rows` in values [B, ...]."""
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
    """Return the last true column of each row [k, C]; the last column if none is true."""
    return columns.shape[1] - 1 - np.argmax(columns[:, ::-1], axis=1)
