"""The fit of a data set to an environment: sizes of actions and states, and matching of cameras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from recipes.demonstrations.columns import DatasetError, DatasetShape, camera_like

if TYPE_CHECKING:
    from recipes.embodied.envs.env_spec import EnvSpec


def check_fits(data: DatasetShape, spec: EnvSpec, named: Mapping[str, str]) -> dict[str, str]:
    """Return the data set's camera for each camera of the environment.

    Args:
        data: sizes of the data set.
        spec: the spec of the environment; sizes of 0 are not checked.
        named: the data set's camera for some of the environment's cameras.

    Raises:
        DatasetError: actions, states or images differ from the environment's.
    """
    for what, size, needed in (
        ("numbers in an action", data.action_size, spec.action_size or data.action_size),
        ("numbers in a state", data.state_size, spec.state_size or data.state_size),
    ):
        if size != needed:
            raise DatasetError(
                f"the data set has {size} {what}; the environment has {needed}",
                where=data.where,
                help="it belongs to another environment, or another control mode of the robot; `data.columns`"
                " selects the states",
            )
    if spec.action_size and data.choices != (spec.num_choices is not None):
        raise DatasetError(
            "the data set's actions and the environment's are of different kinds",
            where=data.where,
            why="one has discrete actions, the other continuous ones",
            help="it belongs to another environment",
        )
    return {camera: _camera(data, camera, shape, named, spec) for camera, shape in spec.cameras.items()}


def _camera(
    data: DatasetShape, camera: str, shape: tuple[int, int, int], named: Mapping[str, str], spec: EnvSpec
) -> str:
    only = next(iter(data.cameras), None) if len(data.cameras) == len(spec.cameras) == 1 else None
    column = named.get(camera) or camera_like(camera, data.cameras) or only
    if column is None or column not in data.cameras:
        names = ", ".join(f"`{name}`" for name in data.cameras) or "none"
        raise DatasetError(
            f"the data set has no camera `{column or camera}`",
            where=data.where,
            help=f"it has {names}; `data.cameras` selects the one for the environment's `{camera}`",
        )
    theirs = data.cameras[column]
    if theirs != shape:
        raise DatasetError(
            f"images of `{column}` are {theirs[0]} x {theirs[1]}; the environment's are {shape[0]} x {shape[1]}",
            where=data.where,
            help="set the environment's cameras to the size of the data set's",
        )
    return column
