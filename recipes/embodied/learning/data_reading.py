"""Demonstrations as section `data` describes them: selected, scaled, flipped, and checked row by row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DONE, REWARD, SUCCESS, TRUNCATED, DatasetError, Flip
from recipes.demonstrations.demonstrations import Demonstrations, joined
from recipes.demonstrations.first_comparison import PicturesShown, thumbnails
from recipes.demonstrations.load_set import read_demonstrations
from recipes.training.arrays import Array

if TYPE_CHECKING:
    from recipes.embodied.config.data_config import DataSource, DemonstrationsConfig
    from recipes.embodied.envs.env_spec import EnvSpec

_LOGGER: Final = logging.getLogger("rlinf")
# A difference within float32 rounding counts as equal.
_ROUNDING: Final = 1e-5
# Episodes of a data set whose first images are compared with the environment's.
_EPISODES_SHOWN: Final = 8


def read_data(config: DemonstrationsConfig) -> Demonstrations:
    """Return the demonstrations that a section `data` names, as one.

    Raises:
        DatasetError: a data set cannot be read, contradicts itself or another one, or holds a NaN or an infinity.
    """
    sources = config.sources
    check_sources(config)
    parts = [read_source(config, source, pictures=True) for source in sources]
    weights = [source.weight for source in sources if source.weight is not None]
    if weights:
        rows = [len(part) for part in parts]
        parts = [
            replace(part, draws=np.full(count, weight / count))
            for part, count, weight in zip(parts, rows, weights, strict=True)
        ]
    return joined(parts)


def check_sources(config: DemonstrationsConfig) -> None:
    """Check that options of one data set are also set for all others.

    Raises:
        DatasetError: an option is set for some data sets only.
    """
    sources = config.sources
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        raise DatasetError(
            "some of the data sets have a `weight` and others none",
            where=sources[weighted.index(False)].path,
            help="write a `weight` for each of them, or for none",
        )


def read_source(config: DemonstrationsConfig, source: DataSource, *, pictures: bool) -> Demonstrations:
    """Return one of the data sets; see `read_data`."""
    data = read_demonstrations(source.path, config.state_columns, columns=config.role_columns, pictures=pictures)
    data = data.chosen(source.episodes) if source.episodes else data
    if not len(data):
        raise DatasetError("no rows are left to learn from", where=source.path, help="choose other episodes")
    data = _scaled(data, source)
    check_finite(data)
    data = _clipped(data) if source.clip_actions else data
    return _turned(data, source.flip)


def _scaled(data: Demonstrations, source: DataSource) -> Demonstrations:
    if source.action_scale is None:
        return data
    size = data.actions.shape[1]
    scale = np.asarray(source.action_scale, np.float32)
    if data.actions.dtype.kind in "iu" or scale.size not in (1, size):
        is_choice = data.actions.dtype.kind in "iu"
        message = "discrete actions have no scale" if is_choice else f"an action has {size} numbers"
        raise DatasetError(f"`action_scale` does not fit: {message}", where=data.where, help="correct it")
    return replace(data, actions=data.actions * scale, statistics=None)


def _clipped(data: Demonstrations) -> Demonstrations:
    beyond = np.abs(data.actions) > 1 + _ROUNDING
    if data.actions.dtype.kind in "iu" or not beyond.any():
        return data
    note = f"clipped {int(beyond.sum())} numbers in {int(beyond.any(axis=1).sum())} of {len(data)} actions to -1 to 1"
    return replace(data, actions=np.clip(data.actions, -1, 1), notes=(*data.notes, note))


def check_finite(data: Demonstrations) -> None:
    """Check that no number of the rows is NaN or infinite.

    Raises:
        DatasetError: a number is NaN or infinite.
    """
    for name, column in (("action", data.actions), ("state", data.states), ("reward", data.rewards)):
        if column is None:
            continue
        finite = np.isfinite(column.reshape(len(column), -1))
        if finite.all():
            continue
        row, dimension = (int(indices[0]) for indices in np.nonzero(~finite))
        value = column.reshape(len(column), -1)[row, dimension]
        number = f", number {dimension}" if name != "reward" else ""
        raise DatasetError(
            f"the {name} of a row is {value}{number}",
            where=data.place_of(row),
            help="correct the data set, or name the other episodes: `train_data_paths: {path: ..., episodes: [...]}`",
        )


def _turned(data: Demonstrations, wanted: Flip | None) -> Demonstrations:
    flip = wanted or data.flip
    if flip in (None, "none"):
        return replace(data, flip=flip)
    notes = data.notes
    if wanted is None and data.cameras:
        notes = (*notes, f"flipping images as the file states: `flip` is `{flip}`")
    cameras = {name: camera.flipped(flip) for name, camera in data.cameras.items()}
    return replace(data, cameras=cameras, notes=notes, flip=flip)


def first_pictures(data: Demonstrations, named: Mapping[str, str]) -> list[PicturesShown]:
    """Return the first images of some episodes of each data set.

    Args:
        data: the demonstrations.
        named: the data's camera for each camera of the environment.
    """
    shown: list[PicturesShown] = []
    before = 0
    for origin in data.origins:
        episodes = before + np.unique(np.linspace(0, origin.episodes - 1, _EPISODES_SHOWN).round().astype(np.int64))
        before += origin.episodes
        rows = data.bounds[episodes]
        cameras = {name: thumbnails(data.cameras[camera].read(rows)) for name, camera in named.items()}
        shown.append(PicturesShown(origin.where, origin.flip or "none", cameras))
    return shown


def check_range(data: Demonstrations, spec: EnvSpec) -> None:
    """Check that actions, which have the environment's size, are in its range.

    Raises:
        DatasetError: an action is beyond it.
    """
    low, high = action_bounds(spec)
    beyond = (data.actions < low - _ROUNDING) | (data.actions > high + _ROUNDING)
    if beyond.any():
        raise _beyond(data, beyond, low, high, choices=spec.num_choices is not None)


def action_bounds(spec: EnvSpec) -> tuple[Array, Array]:
    """Return the minimum and maximum of each action dimension, [A]; infinite if unbounded."""
    if spec.num_choices is not None:
        return np.array([0]), np.array([spec.num_choices - 1])
    bounded = spec.bounded
    return np.where(bounded, -1.0, -np.inf), np.where(bounded, 1.0, np.inf)


def _beyond(data: Demonstrations, beyond: NDArray[np.bool_], low: Array, high: Array, *, choices: bool) -> DatasetError:
    row, dimension = (int(indices[0]) for indices in np.nonzero(beyond))
    least, most = low[dimension], high[dimension]
    largest = float(np.abs(data.actions[:, dimension]).max())
    remedy = (
        "it belongs to another environment"
        if choices
        else "if the units differ, `train_data_paths: {path: ..., action_scale: ...}` multiplies them (this dimension"
        f" goes up to {largest:g}); if the environment clips, write `{{path: ..., clip_actions: true}}`"
    )
    return DatasetError(
        f"number {dimension} of an action is {data.actions[row, dimension]:g}; the environment takes {least:g} to"
        f" {most:g}",
        where=data.place_of(row),
        why=f"{int(beyond.any(axis=1).sum())} of {len(data)} actions are out of range",
        help=remedy,
    )


def tell_notes(data: Demonstrations) -> None:
    """Log what was dropped from demonstrations or converted."""
    for note in data.notes:
        _LOGGER.warning("demonstrations, %s: %s", data.where, note)


def without_rewards(data: Demonstrations) -> DatasetError:
    """Return the error for demonstrations without rewards, or without ends of episodes."""
    lacks = [f"have no rewards (`{REWARD}`)"] if data.rewards is None else []
    if data.ends is None:
        lacks.append(f"do not say how their episodes end (`{DONE}` or `{SUCCESS}`)")
    return DatasetError(
        f"the demonstrations {' and '.join(lacks)}",
        where=data.where,
        help="`rlinf record` writes these columns, and `data.columns: {reward: NAME, done: NAME}` names others; recipe"
        " `sft` learns without them",
    )


def assumed_ends(data: Demonstrations) -> list[str]:
    """Return the assumptions about ends whose kind the data set does not record."""
    if data.ends is None:
        return []
    counts = [int((data.ends.assumed & kind).sum()) for kind in (data.ends.terminations, data.ends.truncations)]
    kinds = (
        f"are done and not solved, and no `{TRUNCATED}` says whether a limit cut them off: they count as ended by the"
        " task",
        "are not solved at their end, and no column says whether the task ended: they count as cut off",
    )
    return [f"{count} of {data.episodes} episodes {how}" for count, how in zip(counts, kinds, strict=True) if count]


def weights_of_replay(data: Demonstrations) -> DatasetError:
    """Return the error for weighted data sets whose steps go into a replay buffer."""
    return DatasetError(
        "the data sets have a `weight`, and a replay buffer draws all steps alike",
        where=data.where,
        help="remove `weight`; demonstrations are half of every batch",
    )


def without_interventions(data: Demonstrations) -> DatasetError:
    """Return the error about demonstrations that do not mark interventions."""
    return DatasetError(
        "the demonstrations do not mark interventions",
        where=data.where,
        help="`data.columns: {intervention: NAME}` names the column; or remove `data.only_interventions`",
    )
