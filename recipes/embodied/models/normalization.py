"""Normalization of states and actions by data set statistics, which are saved with the policy's weights.

A policy that was trained on normalized numbers is another policy without them. So they are written beside its weights,
as `normalization.json`, and read with them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.models.folder_facts import STATISTICS
from rlinf_core import ConfigError
from rlinf_core.foreign.strict_json import load_json_object

if TYPE_CHECKING:
    pass

Scheme: TypeAlias = Literal["mean_std", "quantile"]
SCHEMES: Final = ("mean_std", "quantile")
# A number that hardly varies is shifted, and not blown up.
_SMALLEST_SCALE: Final = 1e-4
_QUANTILES: Final = (0.01, 0.99)

Array = TypeVar("Array", NDArray[Any], Tensor)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of D numbers over the rows of a data set.

    Attributes:
        mean: of each number.
        std: standard deviation of each.
        low: the hundredth part of the rows is below it.
        high: the hundredth part of the rows is above it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, rows: NDArray[Any]) -> Statistics:
        """Return the statistics of rows, [n, D].

        Raises:
            ConfigError: there are none, or one of the numbers is NaN or infinite.
        """
        rows = np.asarray(rows, np.float64)
        if not len(rows) or not np.isfinite(rows).all():
            raise ConfigError(
                "there are no statistics of these data",
                why="a value is NaN or infinite" if len(rows) else "there are no rows",
                help="leave such episodes out",
            )
        low, high = np.quantile(rows, _QUANTILES, axis=0)
        return cls(*(tuple(map(float, values)) for values in (rows.mean(axis=0), rows.std(axis=0), low, high)))

    @classmethod
    def of_moments(cls, mean: Sequence[float], std: Sequence[float]) -> Statistics:
        """Return statistics of which only mean and standard deviation are known, for `mean_std`.

        Raises:
            ValueError: one of the two has more numbers.
        """
        if len(mean) != len(std):
            raise ValueError(f"there are {len(mean)} means and {len(std)} standard deviations")
        low = tuple(float(center) - float(spread) for center, spread in zip(mean, std, strict=True))
        high = tuple(float(center) + float(spread) for center, spread in zip(mean, std, strict=True))
        return cls(tuple(map(float, mean)), tuple(map(float, std)), low, high)

    def __len__(self) -> int:
        return len(self.mean)

    def shift_and_scale(self, scheme: Scheme) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the shift that is subtracted, and the scale that is divided by, both [D].

        `mean_std` leads to mean 0 and deviation 1, `quantile` to -1 at `low` and 1 at `high`.
        """
        if scheme == "mean_std":
            shift, scale = np.array(self.mean), np.array(self.std)
        else:
            low, high = np.array(self.low), np.array(self.high)
            shift, scale = (low + high) / 2, (high - low) / 2
        scale = np.where(scale < _SMALLEST_SCALE, 1.0, scale)
        return shift.astype(np.float32), scale.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Normalization:
    """The way in which a policy's states and actions are normalized.

    Attributes:
        scheme: mean and standard deviation, or quantiles.
        states: their statistics; None: they are taken as they are.
        actions: their statistics; None: they are taken as they are.
    """

    scheme: Scheme = "mean_std"
    states: Statistics | None = None
    actions: Statistics | None = None

    def normalized_states(self, states: Array) -> Array:
        """Return states [..., S], normalized."""
        return _normalized(states, self.states, self.scheme)

    def normalized_actions(self, actions: Array) -> Array:
        """Return actions [..., A] of an environment as the policy learns them."""
        return _normalized(actions, self.actions, self.scheme)

    def actions_of(self, normalized: Array) -> Array:
        """Return actions [..., A] as the environment takes them: the inverse of `normalized_actions`."""
        if self.actions is None:
            return normalized
        shift, scale = self.actions.shift_and_scale(self.scheme)
        return cast("Array", normalized * _like(scale, normalized) + _like(shift, normalized))

    def check(self, state_size: int, action_size: int, where: str) -> None:
        """Check the number of dimensions of the statistics.

        Raises:
            ConfigError: they are of other states or actions, those of another environment.
        """
        for name, statistics, needed in (("states", self.states, state_size), ("actions", self.actions, action_size)):
            if statistics is not None and len(statistics) != needed:
                raise ConfigError(
                    f"the {name} in `{where}` have {len(statistics)} numbers; the environment needs {needed}",
                    help="the statistics belong to another environment or another control mode of the robot",
                )

    def save(self, folder: Path) -> None:
        """Write `normalization.json` into a folder."""
        (folder / STATISTICS).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Normalization | None:
        """Return the statistics that `save` wrote into a folder; None if there is no such file.

        Raises:
            ConfigError: the file is not one of `save`.
        """
        path = folder / STATISTICS
        if not path.is_file():
            return None
        try:
            return cls.of_data(load_json_object(path.read_bytes(), non_finite=True))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"`{path}` holds no statistics",
                why=str(error) or type(error).__name__,
                help="copy the file again from where the policy was trained",
            ) from None

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Normalization:
        """Return the normalization of plain data, as `dataclasses.asdict` makes them.

        Raises:
            ValueError, TypeError, KeyError: they are not that.
        """
        if data["scheme"] not in SCHEMES:
            raise ValueError(f"unknown scheme `{data['scheme']}`")
        return cls(data["scheme"], _read(data["states"]), _read(data["actions"]))

    def digest(self) -> str:
        """Return a digest of the statistics, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def _normalized(values: Array, statistics: Statistics | None, scheme: Scheme) -> Array:
    if statistics is None:
        return values
    shift, scale = statistics.shift_and_scale(scheme)
    return cast("Array", (values - _like(shift, values)) / _like(scale, values))


def _like(values: NDArray[np.float32], other: NDArray[Any] | Tensor) -> Any:
    """Return numbers as an array or a tensor, whatever `other` is."""
    if isinstance(other, Tensor):
        return torch.from_numpy(values).to(other.device)  # pyright: ignore[reportUnknownMemberType]
    return values


def _read(data: dict[str, Sequence[float]] | None) -> Statistics | None:
    if data is None:
        return None
    statistics = Statistics(*(tuple(float(number) for number in data[name]) for name in ("mean", "std", "low", "high")))
    columns = (statistics.mean, statistics.std, statistics.low, statistics.high)
    if len({len(column) for column in columns}) != 1 or not all(math.isfinite(number) for number in sum(columns, ())):
        raise ValueError("a row of numbers is incomplete or has a non-finite number")
    return statistics
