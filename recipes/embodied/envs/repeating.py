"""Operations of simulators that raise: retried once on a new simulator, or reported with a known remedy.

An operation that raises is retried once on a new simulator, after a replay. If the replay differs, the machine is at
fault, and the episode is dropped. If the operation raises again, from the same seed and the same actions, the code has
a bug, and the episode counts as failed; see `env_errors`. Faults with a known remedy are missing files and a failing
renderer.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from recipes.embodied.envs.env_spec import EnvError
from rlinf_core import ConfigError, RLinfError
from rlinf_core.errors import RuntimeFailure
from rlinf_core.runners.recovery import position

_LOGGER: Final = logging.getLogger("rlinf")
# The most actions of an episode that is replayed on a new simulator.
MOST_REPEATED: Final = 2000
RENDERING_HELP: Final = (
    "install a rendering driver, `apt-get install --no-install-recommends libegl1 libgl1-mesa-dri libosmesa6`, and set"
    " `env_vars: [{MUJOCO_GL: egl}]`, or osmesa, for the node group"
)
# How messages about a missing file contain its name.
_FILE: Final = re.compile(r"[^\s'\"]+\.(?:xml|mjcf|urdf|stl|obj|msh|png|bddl|init|pruned_init|npz|hdf5)\b")
# How MuJoCo, robosuite and PyOpenGL report that they cannot render; OSMesa reports only a missing function.
_RENDERING: Final = re.compile(r"\b(?:EGL|OpenGL|OSMesa|GLFW|MUJOCO_GL|glGetError|GLContext)\b")

ResultT = TypeVar("ResultT")


class SimulatorError(RuntimeFailure):
    """A simulator raised an exception, and so did the new one."""

    code = "simulator-raises"


class RaisedTwiceError(SimulatorError):
    """An operation raised on a simulator and on the new one that replaced it; a third one has started over."""


class FaultLog:
    """Warnings about simulators that raised, with a traceback once for each line of code."""

    def __init__(self) -> None:
        self._places: set[str | None] = set()

    @property
    def any(self) -> bool:
        """Whether there was a fault."""
        return bool(self._places)

    def warn(self, fault: str, error: Exception) -> None:
        """Log a fault, if it is the first at its line of code."""
        place = position(error)
        if place not in self._places:
            self._places.add(place)
            _LOGGER.warning("%s; a new simulator repeats what ran in it", fault, exc_info=error)


class RepeatingSimulator(ABC):
    """A simulator, of one environment or of many, that is replaced when it raises.

    Args:
        faults: log of its faults.
    """

    def __init__(self, faults: FaultLog) -> None:
        self._faults = faults

    @abstractmethod
    def _renew(self) -> None:
        """Replace the simulator by a new one, and start the running episodes in it."""

    @abstractmethod
    def _replay(self) -> None:
        """Replay the actions of the running episodes, and note which results differ."""

    @abstractmethod
    def _names(self) -> tuple[str, str]:
        """Return, for messages, the task, and the environments and the step."""

    def _attempt(self, operation: Callable[[], ResultT], doing: str, action: Any = None) -> ResultT:
        """Perform an operation; if it raises, retry it on a new simulator that has replayed the earlier steps.

        Args:
            operation: is called once or twice.
            doing: the operation in words, for messages.
            action: the action, for messages.

        Raises:
            RaisedTwiceError: the new simulator raised as well.
            SimulatorError: no new simulator could be made, or it cannot start.
            RLinfError: the fault is one of our own errors, or has a known remedy.
        """
        try:
            return operation()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            return self._attempt_again(error, operation, doing, action)

    def _attempt_again(
        self, error: Exception, operation: Callable[[], ResultT], doing: str, action: Any = None
    ) -> ResultT:
        """Retry, on a new simulator, an operation that raised; see `_attempt`."""
        self._raise_known(error)
        self._faults.warn(self._fault(error, doing, action), error)
        self._begin_anew(error)
        try:
            self._replay()
            return operation()
        except Exception as again:
            self._raise_known(again)
            self._begin_anew(again)
            raise RaisedTwiceError(
                self._fault(again, doing, action),
                why="a new simulator that repeated the episode raised as well",
                help="the log of the worker has its traceback",
            ) from again

    def _begin_anew(self, cause: Exception) -> None:
        """Replace the simulator, and start the running episodes in the new one.

        Raises:
            SimulatorError: the new simulator cannot be made, or cannot start.
            RLinfError: as `_attempt`.
        """
        try:
            self._renew()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            self._raise_known(error)
            raise SimulatorError(
                self._fault(error, "the beginning"),
                why="a new simulator that began the episode again raised as well",
                help="the log of the worker has its traceback",
            ) from cause

    @staticmethod
    def _raise_known(error: Exception) -> None:
        """Raise our own errors unchanged, and faults with a known remedy as their error."""
        if isinstance(error, RLinfError):
            raise error
        known = known_fault(error)
        if known is not None:
            raise known from error

    def _fault(self, error: Exception, doing: str, action: Any = None) -> str:
        """Return a description of what a simulator raised, in which operation and step."""
        task, place = self._names()
        if action is not None:
            shown = np.array2string(np.asarray(action), precision=4, threshold=16)
            doing = f"{doing} {' '.join(shown.split())}"
        at = position(error)
        raised = f"{type(error).__name__}: {error}{f' at {at}' if at else ''}"
        return f"the simulator of `{task}` raised {raised} ({place}, {doing})"


# The number of further starts that are tried if a reset raises.
MOST_STARTS: Final = 6


def env_error(episode: str, error: SimulatorError, *, began: bool = True) -> EnvError:
    """Return the record of an error that occurred twice."""
    cause = error.__cause__
    return EnvError(episode, " ".join(error.message.split()), (cause and position(cause)) or "", began)


def known_fault(error: BaseException) -> ConfigError | None:
    """Return the error of a fault with a known remedy; None for others, and for our own errors."""
    return None if isinstance(error, ConfigError) else _missing_file(error) or _no_renderer(error)


def _missing_file(error: BaseException) -> ConfigError | None:
    """Return the error of a simulator that lacks one of its files, such as a scene.

    Python's error names the file, and MuJoCo's message contains its name.
    """
    if not isinstance(error, OSError | ValueError):
        return None
    named = getattr(error, "filename", None) or next(iter(_FILE.findall(str(error))), None)
    if not named or os.path.exists(named):
        return None
    return ConfigError(
        f"the simulator lacks its file `{named}`",
        why=str(error).splitlines()[0],
        help="install it again with all its assets: `rlinf venv setup` installs a complete list",
    )


def _no_renderer(error: BaseException) -> ConfigError | None:
    if not _RENDERING.search(str(error)):
        return None
    chosen = os.environ.get("MUJOCO_GL")
    return ConfigError(
        f"the simulator cannot render images with {f'MUJOCO_GL={chosen}' if chosen else 'its default renderer'}",
        why=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        help=RENDERING_HELP,
    )
