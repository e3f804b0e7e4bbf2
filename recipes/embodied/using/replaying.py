"""An episode that simulator processes died of, done again alone: `rlinf why --replay` calls `replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_config import stepping
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError, SimulatorProcesses
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import BatchRequest, EpisodeAtDeath
from recipes.embodied.envs.registry import env_class
from rlinf_core import Job, RLinfError
from rlinf_core.runners.storage.evidence import QuarantinedItem


def replay(job: Job, item: QuarantinedItem, *, emit: Callable[[str], None] = lambda text: None) -> str:
    """Begin an episode in a simulator process of its own, and take its actions.

    Returns:
        How the process died; empty if it lived.

    Raises:
        RLinfError: the item is no episode of such an environment.
    """
    config = cast("PolicyJob", job.config)
    environments = config.env.train if item.step else config.env.eval
    kind: Any = env_class(environments.env_type)
    try:
        kept = EpisodeAtDeath.model_validate(item.replay)
    except ValidationError as error:
        raise RLinfError(f"episode {item.item} was not kept as a whole", why=str(error).splitlines()[0]) from None
    if not (isinstance(kind, type) and issubclass(kind, SimulatedEnv)):
        raise RLinfError(f"`{environments.env_type}` has no simulators", help="was the run's file changed?")
    task = environments.task or kind.default_task
    request = BatchRequest(kind.simulation, task, environments.options, [kept.group])
    emit(f"`{task}`, seed {kept.seed}, start {kept.number}, {len(kept.actions)} actions")
    processes: SimulatorProcesses | None = None
    try:
        processes = SimulatorProcesses(request, 1, stepping(environments).simulator_timeout, "the replay")
        processes.reset([0], [kept.start])
        for action in kept.actions:
            processes.step(None, np.array([action]))
        processes.observe()
    except SimulatorDiedError as error:
        return str(error.cause)
    finally:
        if processes is not None:
            processes.close()
    return ""
