"""Normalization of states and actions by data set statistics, which are saved with the policy's weights.

A policy trained on normalized numbers acts differently without the statistics. They are therefore written beside its
weights, as `normalization.json`, and read with them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.models.folder_facts import STATISTICS
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.suggest import excerpt

Scheme: TypeAlias = Literal["mean_std", "quantile"]
SCHEMES: Final = ("mean_std", "quantile")
# A number that hardly varies is shifted but not scaled.
_SMALLEST_SCALE: Final = 1e-4
# The largest statistic, so that differences and multiples stay finite in float32.
_LARGEST: Final = 1e30
_QUANTILES: Final = (0.01, 0.99)

ArrayOrTensor = TypeVar("ArrayOrTensor", Array, Tensor)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of D numbers over the rows of a data set.

    Attributes:
        mean: the mean of each number.
        std: the standard deviation of each number.
        low: the lower bound of each number, the 1 % quantile if computed by `of`.
        high: the upper bound of each number, the 99 % quantile if computed by `of`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, rows: Array) -> Statistics:
        """Return the statistics of rows, [n, D].

        Raises:
            ConfigError: there are no rows, or a number is NaN or infinite.
        """
        rows = np.asarray(rows, np.float64)
        if not len(rows) or not np.isfinite(rows).all():
            raise ConfigError(
                "statistics of these data cannot be computed",
                why="a value is NaN or infinite" if len(rows) else "there are no rows",
                help="leave such episodes out",
            )
        low, high = np.quantile(rows, _QUANTILES, axis=0)
        return cls(*_tuples(rows.mean(axis=0), rows.std(axis=0), low, high))

    @classmethod
    def of_moments(cls, mean: Sequence[float], std: Sequence[float]) -> Statistics:
        """Return statistics of which only mean and standard deviation are known, for `mean_std`.

        Raises:
            ValueError: the lengths differ, or a number is invalid.
        """
        _check_columns(mean, std, "means", "standard deviations")
        if min(std, default=0) < 0:
            raise ValueError(f"a standard deviation is {min(std)}")
        center, spread = np.array(mean, np.float64), np.array(std, np.float64)
        return cls(*_tuples(center, spread, center - spread, center + spread))

    @classmethod
    def of_bounds(cls, low: Sequence[float], high: Sequence[float]) -> Statistics:
        """Return statistics of which only two bounds are known, for `quantile`.

        Raises:
            ValueError: the lengths differ, or a number is invalid.
        """
        _check_columns(low, high, "lower", "upper bounds")
        wrong = next(((least, most) for least, most in zip(low, high, strict=True) if least > most), None)
        if wrong is not None:
            raise ValueError(f"the lower bound {wrong[0]} is above the upper bound {wrong[1]}")
        least, most = np.array(low, np.float64), np.array(high, np.float64)
        return cls(*_tuples((least + most) / 2, (most - least) / 2, least, most))

    def __len__(self) -> int:
        return len(self.mean)

    def affine(self, scheme: Scheme, epsilon: float | None) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
        """Return shift [D], scale [D] and offset of the normalization (x - shift) / scale - offset.

        `mean_std` gives mean 0 and std 1, `quantile` maps `low` to -1 and `high` to 1. For numbers that hardly vary,
        see `Normalization.epsilon`.
        """
        low, high = np.array(self.low), np.array(self.high)
        if epsilon is not None:
            # Relative to `low`, not the middle: a number that never varies becomes exactly -1.
            shift, scale = (
                (np.array(self.mean), np.array(self.std) + epsilon)
                if scheme == "mean_std"
                else (low, (high - low + epsilon) / 2)
            )
            return shift.astype(np.float32), scale.astype(np.float32), float(scheme == "quantile")
        shift, scale = (
            (np.array(self.mean), np.array(self.std)) if scheme == "mean_std" else ((low + high) / 2, (high - low) / 2)
        )
        scale = np.where(scale < _SMALLEST_SCALE, 1.0, scale)
        return shift.astype(np.float32), scale.astype(np.float32), 0.0


@dataclass(frozen=True, slots=True)
class Normalization:
    """The normalization of a policy's states and actions.

    Attributes:
        scheme: mean and standard deviation, or quantiles.
        states: the statistics of states; None: states are not normalized.
        actions: the statistics of actions; None: actions are not normalized.
        epsilon: the addition to a std, or to the distance of two quantiles, before the division, as in the library that
            the statistics come from. None: numbers that hardly vary are only shifted.
        action_scheme: the scheme of actions, if it differs from the one of states.
        rows: the number of rows in running statistics of states; None: the statistics are fixed.
    """

    scheme: Scheme = "mean_std"
    states: Statistics | None = None
    actions: Statistics | None = None
    epsilon: float | None = None
    action_scheme: Scheme | None = None
    rows: int | None = None

    def normalized_states(self, states: ArrayOrTensor) -> ArrayOrTensor:
        """Return states [..., S], normalized."""
        return self._normalized(states, self.states, self.scheme)

    def normalized_actions(self, actions: ArrayOrTensor) -> ArrayOrTensor:
        """Return an environment's actions [..., A], normalized for the policy."""
        return self._normalized(actions, self.actions, self.action_scheme or self.scheme)

    def actions_of(self, normalized: ArrayOrTensor) -> ArrayOrTensor:
        """Return actions [..., A] as the environment takes them: the inverse of `normalized_actions`."""
        if self.actions is None:
            return normalized
        shift, scale, offset = self.actions.affine(self.action_scheme or self.scheme, self.epsilon)
        return cast("ArrayOrTensor", (normalized + offset) * _like(scale, normalized) + _like(shift, normalized))

    def check(self, state_size: int, action_size: int, where: str) -> None:
        """Check the number of dimensions of the statistics.

        Raises:
            ConfigError: the statistics have other sizes, as those of another environment.
        """
        for name, statistics, needed in (("states", self.states, state_size), ("actions", self.actions, action_size)):
            if statistics is not None and len(statistics) != needed:
                raise ConfigError(
                    f"the {name} in `{where}` have {len(statistics)} numbers; the environment needs {needed}",
                    help="the statistics belong to another environment or another control mode of the robot",
                )

    def save(self, folder: Path) -> None:
        """Write `normalization.json` into a folder."""
        (folder / STATISTICS).write_text(json.dumps(self._data(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Normalization | None:
        """Return the statistics that `save` wrote into a folder; None if there is no such file.

        Raises:
            ConfigError: `save` did not write the file.
        """
        path = folder / STATISTICS
        if not path.is_file():
            return None
        try:
            return cls.of_data(load_json_object(read_bounded(path), non_finite=True))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"`{path}` holds no statistics",
                why=str(error) or type(error).__name__,
                help="copy the file again from where the policy was trained",
            ) from None

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Normalization:
        """Return the normalization from plain data, as made by `dataclasses.asdict`.

        Raises:
            ValueError, TypeError, KeyError: the data are something else.
        """
        of_actions = data.get("action_scheme")
        for scheme in (data["scheme"], of_actions or data["scheme"]):
            if scheme not in SCHEMES:
                raise ValueError(f"unknown scheme `{scheme}`")
        epsilon = data.get("epsilon")
        if epsilon is not None and not 0 <= epsilon < math.inf:
            raise ValueError(f"`epsilon` is {epsilon}")
        return cls(
            data["scheme"],
            _read(data["states"]),
            _read(data["actions"]),
            epsilon,
            of_actions,
            _counted(data.get("rows")),
        )

    def digest(self) -> str:
        """Return a digest of the statistics, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self._data(), sort_keys=True).encode()).hexdigest()[:16]

    def _data(self) -> dict[str, Any]:
        data = asdict(self)
        # Fields that earlier versions did not write stay out, so that digests remain equal.
        return {name: value for name, value in data.items() if value is not None or name in ("states", "actions")}

    def _normalized(self, values: ArrayOrTensor, statistics: Statistics | None, scheme: Scheme) -> ArrayOrTensor:
        if statistics is None:
            return values
        shift, scale, offset = statistics.affine(scheme, self.epsilon)
        return cast("ArrayOrTensor", (values - _like(shift, values)) / _like(scale, values) - offset)


def _tuples(*columns: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(column.tolist()) for column in columns)


def _counted(rows: Any) -> int | None:
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise ValueError(f"`rows` is {rows}")
    return rows


def _check_columns(first: Sequence[Any], second: Sequence[Any], name: str, other: str) -> None:
    if len(first) != len(second):
        raise ValueError(f"there are {len(first)} {name} and {len(second)} {other}")
    for number in (*first, *second):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) < _LARGEST:
            raise ValueError(
                f"one of the {name} or {other} is `{excerpt(repr(number))}`, and no number that can be used"
            )


def _like(values: NDArray[np.float32], other: Array | Tensor) -> Any:
    if isinstance(other, Tensor):
        return torch.from_numpy(values).to(other.device)  # pyright: ignore[reportUnknownMemberType]
    return values


def _read(data: dict[str, Sequence[float]] | None) -> Statistics | None:
    if data is None:
        return None
    moments, bounds = Statistics.of_moments(data["mean"], data["std"]), Statistics.of_bounds(data["low"], data["high"])
    _check_columns(moments.mean, bounds.low, "means", "lower bounds")
    return Statistics(moments.mean, moments.std, bounds.low, bounds.high)
