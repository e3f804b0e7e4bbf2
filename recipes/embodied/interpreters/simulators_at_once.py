"""As many simulators at the same time as a node's env workers hold, each with its worker's accelerators.

    python -m recipes.embodied.interpreters.simulators_at_once ENV_TYPE REQUEST COUNT SECONDS

makes COUNT simulators, steps them, prints a record in JSON, and holds them until its standard input is closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from recipes.embodied.config.env_types import ENV_TYPES
from rlinf_core import RLinfError
from rlinf_core.foreign.strict_json import load_json_object

_MODULE: Final = "recipes.embodied.interpreters.simulators_at_once"
_IMAGE_SIZE: Final = 64


class ProbeRequest(NamedTuple):
    """The simulator that a job file configures.

    Attributes:
        frame: whether failing to render is a fault.
        task: name of a task or a set of tasks; None: a task that every installation has.
        options: `env.train.options`.
        batches: environments of the whole job, and simulator processes of one batch, for each batch that a worker holds
            at the same time.
    """

    frame: bool = True
    task: str | None = None
    options: Mapping[str, Any] = {}
    batches: Sequence[tuple[int, int]] = ()

    def settings(self, env_type: str, seconds: float, *, images: bool, num_envs: int = 1) -> Any:
        """Return the environments of a worker, one simulator process per environment.

        Args:
            env_type: the environment type.
            seconds: time limit of one operation.
            images: whether to observe images: those in the job file, or one camera.
            num_envs: the number of environments.
        """
        from recipes.embodied.envs.env_spec import EnvSettings

        task = self.task or ("libero_spatial/0" if env_type == "libero" else ENV_TYPES[env_type].task)
        cameras = (self.options.get("cameras") or ["main"]) if images else []
        options = {"image_size": _IMAGE_SIZE, **self.options, "cameras": cameras}
        return EnvSettings(
            num_envs=num_envs, task=task, options=options, num_processes=num_envs, simulator_timeout=seconds
        )


def simulators_at_once(
    env_type: str, request: ProbeRequest, workers: Sequence[Mapping[str, str]], seconds: float
) -> dict[str, Any]:
    """Try the simulators of all env workers of a node at the same time.

    Args:
        env_type: the environment type.
        request: the task, options, and number of environments per worker.
        workers: variables of each worker.
        seconds: time limit of one operation of a simulator.

    Returns:
        `at_once`, their number; or `fault` if they do not run together.
    """
    counts = [_count(request, int(worker.get("WORLD_SIZE", "1"))) for worker in workers]
    if sum(counts) < 2:
        return {}
    tried = [
        subprocess.Popen(
            (sys.executable, "-P", "-m", _MODULE, env_type, json.dumps(request._asdict()), str(count), str(seconds)),
            env={**os.environ, **worker},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for worker, count in zip(workers, counts, strict=True)
    ]
    try:
        answers = [_answer(process) for process in tried]
    finally:
        for process in tried:
            process.communicate()
    for rank, (worker, fault) in enumerate(zip(workers, answers, strict=True)):
        if fault is not None:
            where = f"env worker {worker.get('RANK', rank)}, {sum(counts)} simulators of {len(workers)} workers at once"
            return {"fault": {**fault, "message": f"{where}: {fault['message']}"}}
    return {"at_once": sum(counts)}


def stepped(env: Any) -> dict[str, Any]:
    """Reset the environments, take a step in each, and return the sizes of observations and actions.

    Raises:
        ValueError: an image has a single color.
    """
    import numpy as np

    env.reset()
    result = env.step(np.zeros((env.num_envs, 1, env.spec.action_size), np.float32))
    report: dict[str, Any] = {"states": env.spec.state_size, "actions": env.spec.action_size}
    for name, images in result.observations.items():
        if name.startswith("images."):
            if any((image == image.flat[0]).all() for image in images):
                raise ValueError("the rendered frame is a single color")
            report["frame"] = list(images.shape[1:3])
    return report


def describe_fault(error: Exception) -> dict[str, str | None]:
    """Return an error as a record."""
    if isinstance(error, RLinfError):
        return {"message": error.message, "why": error.why, "help": error.help}
    return {"message": f"{type(error).__name__}: {error}", "why": None, "help": None}


def _count(request: ProbeRequest, world_size: int) -> int:
    """Return the number of simulators of one of several workers: at most one process per environment."""
    return sum(max(1, min(processes, envs // world_size)) for envs, processes in request.batches)


def _answer(tried: subprocess.Popen[str]) -> dict[str, str | None] | None:
    """Return the fault that a process reports; None: its simulators run."""
    line = tried.stdout.readline() if tried.stdout is not None else ""
    try:
        return load_json_object(line)["fault"]
    except (ValueError, KeyError):
        return {"message": f"it ended, {tried.wait()}, before its simulators ran", "why": None, "help": None}


def _hold(env_type: str, request: ProbeRequest, count: int, seconds: float) -> None:
    from recipes.embodied.envs.registry import make_env

    env, fault = None, None
    try:
        env = make_env(env_type, request.settings(env_type, seconds, images=request.frame, num_envs=count))
        stepped(env)
    except Exception as error:  # noqa: BLE001 - a simulator may raise anything
        fault = describe_fault(error)
    print(json.dumps({"fault": fault}), flush=True)
    sys.stdin.read()
    if env is not None:
        env.close()


if __name__ == "__main__":
    _hold(sys.argv[1], ProbeRequest(**json.loads(sys.argv[2])), int(sys.argv[3]), float(sys.argv[4]))
