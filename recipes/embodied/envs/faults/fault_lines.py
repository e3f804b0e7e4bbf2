"""Simulator faults with a known remedy: missing files, a driver that cannot render."""

from __future__ import annotations

import os
import re
from typing import Final

from rlinf_core import ConfigError

RENDERING_HELP: Final = (
    "install a rendering driver, `apt-get install --no-install-recommends libegl1 libgl1-mesa-dri libosmesa6`, and set"
    " `env_vars: [{MUJOCO_GL: egl}]`, or osmesa, for the node group"
)
# What messages about a file that is missing hold of its name.
_FILE: Final = re.compile(r"[^\s'\"]+\.(?:xml|mjcf|urdf|stl|obj|msh|png|bddl|init|pruned_init|npz|hdf5)\b")
# What MuJoCo, robosuite and PyOpenGL say where they cannot render; of OSMesa only that a function is missing.
_RENDERING: Final = re.compile(r"\b(?:EGL|OpenGL|OSMesa|GLFW|MUJOCO_GL|glGetError|GLContext)\b")


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
