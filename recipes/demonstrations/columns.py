"""Columns of data sets: their names in LeRobot, HIL-SERL, robomimic, Isaac Lab and openpi, the sizes of rows, errors of
data that do not fit, and the packages for reading them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from rlinf_core import RLinfError
from rlinf_core.process.requirements import absence, install_command, missing_modules

Role: TypeAlias = Literal["action", "reward", "success", "done", "terminated", "truncated", "intervention"]
# The roles of columns that tell how an episode ends, in the order of `ends_of`.
END_ROLES: Final[tuple[Role, ...]] = ("done", "terminated", "truncated")
# Flips of images: `vertical` swaps top and bottom, `horizontal` left and right, `rotate180` both.
Flip: TypeAlias = Literal["none", "vertical", "horizontal", "rotate180"]

ACTION: Final = "action"
STATE: Final = "observation.state"
REWARD: Final = "next.reward"
SUCCESS: Final = "next.success"
DONE: Final = "next.done"
TRUNCATED: Final = "next.truncated"
INTERVENTION: Final = "intervention"
IMAGES: Final = "observation.images."
FRAME_AGE: Final = "observation.frame_age."

# Synonymous column names, without a known group and its dot or slash in front.
_ALIASES: Final[Mapping[Role, frozenset[str]]] = {
    "action": frozenset(("action", "actions")),
    "reward": frozenset(("reward", "rewards")),
    "success": frozenset(
        ("success", "successes", "is_success", "is_successful", "succeeded", "solved", "task_success")
    ),
    "done": frozenset(("done", "dones", "is_done", "is_last")),
    "terminated": frozenset(
        ("terminated", "terminations", "termination", "terminal", "terminals", "is_terminal", "is_terminated")
    ),
    "truncated": frozenset(
        ("truncated", "truncations", "truncation", "is_truncated", "timeout", "timeouts", "time_out", "time_outs")
    ),
    "intervention": frozenset(
        (
            "intervention",
            "interventions",
            "is_intervention",
            "is_intervened",
            "intervened",
            "intervene_flag",
            "intervention_flag",
            "human_intervention",
            "is_human_intervention",
            "action_modes",
            "intv_labels",
        )
    ),
}
_GROUPS: Final = ("complementary_info", "complementary_data", "info", "infos", "observation", "obs", "next")
# In these columns 1 is an intervention; 0, -1 and -10 are the policy, a demonstration, and the steps before an
# intervention.
MODES: Final = ("action_modes", "intv_labels")
_CAMERA_PREFIXES: Final = (IMAGES, "observation.image.", "observation.")
# The names in LIBERO and robomimic of the cameras that our environments call `main` and `wrist`.
_SIMULATED_CAMERAS: Final[Mapping[str, frozenset[str]]] = {
    "main": frozenset(("agentview", "agentview_rgb", "agentview_image")),
    "wrist": frozenset(("eye_in_hand_rgb", "robot0_eye_in_hand", "robot0_eye_in_hand_rgb", "robot0_eye_in_hand_image")),
}
_STATES: Final = (STATE, "observation.states", "state", "states")


def column_of(role: Role, names: Iterable[str], chosen: Mapping[Role, str], where: str) -> str | None:
    """Return the column of a role, by its known names; None if there is none.

    Args:
        role: the role.
        names: the names of all columns.
        chosen: the columns of some roles, as in `data.columns`.
        where: file or folder, for errors.

    Raises:
        DatasetError: several columns match, or the chosen one does not exist.
    """
    known = list(names)
    wanted = chosen.get(role)
    if wanted is not None:
        if wanted not in known:
            listed = ", ".join(f"`{candidate}`" for candidate in known)
            message = f"the data set has no column `{wanted}`, which `data.columns` names for `{role}`"
            raise DatasetError(message, where=where, help=f"it has {listed}")
        return wanted
    # Groups may hold other observations: `observation.action` is a past action.
    base = str if role == "action" else _base
    candidates = [name for name in known if base(name) in _ALIASES[role]]
    if len(candidates) > 1:
        raise DatasetError(
            f"`{candidates[0]}` and `{candidates[1]}` could both be the {role} column",
            where=where,
            help=f"choose one: `data.columns: {{{role}: {candidates[0]}}}`",
        )
    return candidates[0] if candidates else None


def _base(name: str) -> str:
    parts = re.split(r"[./]", name)
    while len(parts) > 1 and parts[0] in _GROUPS:
        parts.pop(0)
    return ".".join(parts)


def state_of(names: Iterable[str]) -> str | None:
    """Return the state column, by its usual names; None if there is none."""
    known = set(names)
    return next((name for name in _STATES if name in known), None)


def camera_names(columns: Iterable[str], where: str) -> dict[str, str]:
    """Return the camera name of each image column: `observation.images.top` is `top`.

    Raises:
        DatasetError: two columns would be the same camera.
    """
    cameras: dict[str, str] = {}
    for column in columns:
        prefix = next((start for start in _CAMERA_PREFIXES if column.startswith(start)), "")
        camera = column.removeprefix(prefix)
        other = next((earlier for earlier, name in cameras.items() if name == camera), None)
        if other is not None:
            message = f"the images `{other}` and `{column}` would both be the camera `{camera}`"
            raise DatasetError(message, where=where, help="rename one of the columns")
        cameras[column] = camera
    return cameras


def camera_like(camera: str, names: Iterable[str]) -> str | None:
    """Return the data set's camera of the same name, or of the name that LIBERO or robomimic give this camera.

    Returns:
        None if no camera or several match.
    """
    known = list(names)
    candidates = [camera] if camera in known else [name for name in known if name in _SIMULATED_CAMERAS.get(camera, ())]
    return candidates[0] if len(candidates) == 1 else None


def is_depth(column: str) -> bool:
    """Return whether a column's name denotes depth."""
    return "depth" in re.split(r"[^a-z]+", column.lower())


class DatasetError(RLinfError):
    """A data set cannot be read or written, or does not fit; `where` is its file or folder."""


def needed(module: str, purpose: str) -> Any:
    """Import a package that only some data sets need.

    Args:
        module: the name of the module.
        purpose: what needs the package, as the subject of a sentence.

    Raises:
        DatasetError: the package is not installed.
    """
    package = module.partition(".")[0]
    cause: ImportError | None = None
    if not missing_modules([package]):
        try:
            return importlib.import_module(module)
        except ImportError as error:
            cause = error
    raise DatasetError(
        f"{purpose} needs the package `{package}`, {absence(package)}", help=f"run `{install_command(package)}`"
    ) from cause


class DatasetShape(NamedTuple):
    """Sizes of a data set's rows.

    Attributes:
        where: the file or folder.
        fps: rows per second; None: not recorded.
        action_size: numbers in an action.
        choices: whether actions are discrete.
        state_size: numbers in a state; 0 without states.
        cameras: (H, W, 3) by name.
    """

    where: str
    fps: float | None
    action_size: int
    choices: bool
    state_size: int
    cameras: Mapping[str, tuple[int, int, int]]


def check_alike(first: DatasetShape, other: DatasetShape) -> None:
    """Check that two data sets can be used together.

    Raises:
        DatasetError: the data sets differ in their rate, their cameras, the kind or size of actions, or the size of
            states.
    """
    for what, one, two in (
        ("rows per second (fps)", first.fps, other.fps),
        ("kinds of actions", *("discrete" if data.choices else "continuous" for data in (first, other))),
        ("numbers in an action", first.action_size, other.action_size),
        ("numbers in a state", first.state_size, other.state_size),
        ("cameras", dict(first.cameras), dict(other.cameras)),
    ):
        if one != two:
            raise DatasetError(
                f"the data sets have different {what}: {two}, but `{first.where}` has {one}",
                where=other.where,
                help="learn from data sets of one kind at a time",
            )
