"""A probe of a simulator in its own interpreter: whether it is installed, steps, and renders.

    python -m recipes.embodied.interpreters.simulator_probe ENV_TYPE [REQUEST [PROCESSES]]

REQUEST is a `ProbeRequest` in JSON, PROCESSES a list of the variables of each env worker on this node. The last line of
output is a record in JSON. The simulator runs in its own process, so that a crash or a hang of the simulator or the
rendering driver is reported as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from recipes.embodied.envs.repeating import RENDERING_HELP
from recipes.embodied.envs.simulators.packages import versions_of
from recipes.embodied.interpreters.simulators_at_once import ProbeRequest, describe_fault, simulators_at_once, stepped

# The time limit of one operation: robosuite compiles itself in its first step.
_SECONDS: Final = 240.0
# Environment types that render with Vulkan; the others render with MuJoCo.
_VULKAN: Final = {"maniskill"}
VULKAN_HELP: Final = (
    "install the accelerator's Vulkan driver, and `apt-get install --no-install-recommends libvulkan1 vulkan-tools`;"
    " `vulkaninfo --summary` lists the devices that it finds"
)


def look(
    env_type: str,
    request: ProbeRequest = ProbeRequest(),  # noqa: B008 - a value
    workers: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return the report on a simulator.

    Args:
        env_type: the environment type.
        request: the task and options.
        workers: variables of each env worker on this node; all simulators of these workers are tried at once.

    Returns:
        `versions` by distribution; `states` and `actions`, their sizes, or `fault`; `frame`, the size of a rendered
        image, or `frame_fault`; `renderer`, the value of `MUJOCO_GL`; `at_once`, how many ran at the same time;
        `seconds`, the time taken. For `rlinf doctor`: `verdict`, `what` was found, and `help`.
    """
    began = time.monotonic()
    report: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": versions_of(env_type),
        "renderer": os.environ.get("MUJOCO_GL"),
    }
    try:
        report |= _tried(env_type, request.settings(env_type, _SECONDS, images=False))
    except Exception as error:  # noqa: BLE001 - a simulator may raise anything
        report["fault"] = describe_fault(error)
    else:
        try:
            report |= _tried(env_type, request.settings(env_type, _SECONDS, images=True))
        except Exception as error:  # noqa: BLE001 - so may a driver that renders
            report["frame_fault"] = describe_fault(error)
    if workers and "fault" not in report and ("frame" in report or not request.frame):
        report |= simulators_at_once(env_type, request, workers, _SECONDS)
    report["seconds"] = round(time.monotonic() - began, 1)
    return {**report, **_judged(env_type, report, needs_frame=request.frame)}


def _judged(env_type: str, report: dict[str, Any], *, needs_frame: bool) -> dict[str, str]:
    vulkan = env_type in _VULKAN
    if "fault" in report:
        fault = report["fault"]
        why = f": {fault['why']}" if fault["why"] else ""
        help = fault["help"] or (VULKAN_HELP if vulkan else "")
        return {"verdict": "fault", "what": f"`{env_type}`: {fault['message']}{why}", "help": help}
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    what = f"{versions}: {report['states']} states, {report['actions']} actions"
    if "frame" in report:
        how = f"MUJOCO_GL={report['renderer']}" if report["renderer"] else "MuJoCo's default renderer"
        how = "Vulkan" if vulkan else how
        what += f", a frame by {how}"
    if "at_once" in report:
        what += f"; {report['at_once']} at once"
    if "frame" in report:
        return {"verdict": "ok", "what": what, "help": ""}
    fault = report["frame_fault"]
    message = ": ".join(part for part in (fault["message"], fault.get("why")) if part)
    verdict = "fault" if needs_frame else "ok"
    help = VULKAN_HELP if vulkan else RENDERING_HELP
    return {"verdict": verdict, "what": f"{what}; no image: {message}", "help": help if needs_frame else ""}


def _tried(env_type: str, settings: Any) -> dict[str, Any]:
    from recipes.embodied.envs.registry import make_env

    env = make_env(env_type, settings)
    try:
        return stepped(env)
    finally:
        env.close()


if __name__ == "__main__":
    kind, *requests = sys.argv[1:]
    asked = ProbeRequest(**json.loads(requests[0])) if requests else ProbeRequest()
    print(json.dumps(look(kind, asked, json.loads(requests[1]) if len(requests) > 1 else ())))
