"""Operations of simulators that raise: repeated once on a new simulator, or told with a known remedy.

What runs in a simulator that raises is repeated once on a new one. Where that does not come out as before, the machine
is at fault, and the episode is left out. Where it raises again, from the same seed and the same actions, the code has a
bug: the episode counts as failed, see `env_errors`. Faults with a known remedy are missing files, and a driver that
cannot render.
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
# Actions of an episode up to which it is repeated on a new simulator.
MOST_REPEATED: Final = 2000
RENDERING_HELP: Final = (
    "install a rendering driver, `apt-get install --no-install-recommends libegl1 libgl1-mesa-dri libosmesa6`, and set"
    " `env_vars: [{MUJOCO_GL: egl}]`, or osmesa, for the node group"
)
# What messages about a file that is missing hold of its name.
_FILE: Final = re.compile(r"[^\s'\"]+\.(?:xml|mjcf|urdf|stl|obj|msh|png|bddl|init|pruned_init|npz|hdf5)\b")
# What MuJoCo, robosuite and PyOpenGL say where they cannot render; of OSMesa only that a function is missing.
_RENDERING: Final = re.compile(r"\b(?:EGL|OpenGL|OSMesa|GLFW|MUJOCO_GL|glGetError|GLContext)\b")

ResultT = TypeVar("ResultT")


class SimulatorError(RuntimeFailure):
    """A simulator raised an exception, and a new one did so too."""

    code = "simulator-raises"


class RaisedTwiceError(SimulatorError):
    """An operation raised on a simulator and on the new one that repeated it; a third one has started over."""


class FaultLog:
    """Warnings about simulators that raised, one with a traceback for each line of code."""

    def __init__(self) -> None:
        self._places: set[str | None] = set()

    @property
    def any(self) -> bool:
        """Whether there was a fault."""
        return bool(self._places)

    def warn(self, fault: str, error: Exception) -> None:
        """Log the first fault of a line of code."""
        place = position(error)
        if place not in self._places:
            self._places.add(place)
            _LOGGER.warning("%s; a new simulator repeats what ran in it", fault, exc_info=error)


class RepeatingSimulator(ABC):
    """A simulator, of one environment or of many, that is replaced where it raises.

    Args:
        faults: log of its faults.
    """

    def __init__(self, faults: FaultLog) -> None:
        self._faults = faults

    @abstractmethod
    def _renew(self) -> None:
        """Replace the simulator by a new one, in which what runs has begun."""

    @abstractmethod
    def _replay(self) -> None:
        """Repeat the actions of what runs, and note what does not come out as before."""

    @abstractmethod
    def _names(self) -> tuple[str, str]:
        """Return the task, and which environments these are at what moment, for messages."""

    def _attempt(self, operation: Callable[[], ResultT], doing: str, action: Any = None) -> ResultT:
        """Perform an operation; if it raises, repeat it on a new simulator that has replayed the steps before.

        Args:
            operation: is called once or twice.
            doing: what, for messages.
            action: what was done, for messages.

        Raises:
            RaisedTwiceError: the new simulator raised as well.
            SimulatorError: there is no new simulator, or it cannot begin.
            RLinfError: the fault is one of our own errors, or has a known remedy.
        """
        try:
            return operation()
        except Exception as error:  # noqa: BLE001 - whatever a simulator raises
            return self._attempt_again(error, operation, doing, action)

    def _attempt_again(
        self, error: Exception, operation: Callable[[], ResultT], doing: str, action: Any = None
    ) -> ResultT:
        """Perform an operation that raised on a new simulator; see `_attempt`."""
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
        """Replace the simulator, and begin the running episodes in the new one.

        Raises:
            SimulatorError: the new one cannot be made, or cannot begin.
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
        """Raise an error of ours as it is, and the error of a fault with a known remedy."""
        if isinstance(error, RLinfError):
            raise error
        known = known_fault(error)
        if known is not None:
            raise known from error

    def _fault(self, error: Exception, doing: str, action: Any = None) -> str:
        """Return what a simulator raised, doing what, and where in its episodes."""
        task, place = self._names()
        if action is not None:
            shown = np.array2string(np.asarray(action), precision=4, threshold=16)
            doing = f"{doing} {' '.join(shown.split())}"
        at = position(error)
        raised = f"{type(error).__name__}: {error}{f' at {at}' if at else ''}"
        return f"the simulator of `{task}` raised {raised} ({place}, {doing})"


# Starts that are tried in the place of one whose reset raises.
MOST_STARTS: Final = 6


def env_error(episode: str, error: SimulatorError, *, began: bool = True) -> EnvError:
    """Return the record of an error that came twice."""
    cause = error.__cause__
    return EnvError(episode, " ".join(error.message.split()), (cause and position(cause)) or "", began)


def known_fault(error: BaseException) -> ConfigError | None:
    """Return the error of a fault with a known remedy; None for others, and for our own errors."""
    return None if isinstance(error, ConfigError) else _missing_file(error) or _no_renderer(error)


def _missing_file(error: BaseException) -> ConfigError | None:
    """Return the error of a simulator that lacks one of its files, such as a scene.

    Python names the file, and MuJoCo does within its message.
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
