"""Memory of environments: what they observe, and what a step of them holds in between."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.config.env_types import ENV_TYPES, is_simulator
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.envs.real.franka_robot import SPEC as FRANKA_ROBOT
from rlinf_core import ConfigError
from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast

# Bytes of a simulator's own process, without and with cameras (docs/simulators/libero.md); None: not measured.
SIMULATORS: Final[Mapping[str, tuple[int, int] | None]] = {
    "libero": (int(1.3 * 2**30), int(1.8 * 2**30)),
    "metaworld": None,
    "robosuite": None,
    "gymnasium_robotics": None,
}
# Observations in shared memory: those that are being sent, and those before, which may still be in use.
_SENT_COPIES: Final = 2
_UNKNOWN_STATES: Final = 64
# Environments that are tried: what one more of them takes is a quarter of the difference.
_FEW, _MORE = 2, 6


class EnvironmentSizes(NamedTuple):
    """Sizes of environments, in bytes.

    Attributes:
        spec: of each.
        stepping: the most that one holds while it is stepped: its state, its observations, what is computed in between.
        modules: what a process imports to make them.
        notes: what is not known.
    """

    spec: EnvSpec
    stepping: int = 0
    modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def observed(self) -> int:
        """An observation of one environment."""
        pixels = sum(height * width * channels for height, width, channels in self.spec.cameras.values())
        return 4 * self.spec.state_size + pixels


def environment_sizes(environments: EnvironmentConfig) -> EnvironmentSizes:
    """Return the sizes of environments. Of our own a few are stepped; of simulators what their options say is taken.

    Raises:
        ConfigError: they cannot be made here.
    """
    from recipes.embodied.rules.env_rules import options_of_simulator

    kind = environments.env_type
    if is_simulator(kind):
        options = options_of_simulator(environments)
        cameras: dict[str, Any] = {
            str(camera): (options.image_size, options.image_size, 3) for camera in options.cameras
        }
        spec = EnvSpec(_UNKNOWN_STATES, 7, cameras=cameras, has_instructions=kind != "robosuite")
        return EnvironmentSizes(spec, notes=(f"the states of `{kind}` are taken to be {_UNKNOWN_STATES} numbers",))
    if kind == "franka_robot":
        return EnvironmentSizes(FRANKA_ROBOT)  # the arm is elsewhere
    known = ENV_TYPES.get(kind)
    # Who wrote the others may have an arm move at a step.
    steps = known is not None and known.robot is None
    spec, module, _ = _tried(environments, 1, steps=steps)
    if not steps:
        notes = (f"what a step of `{kind}` holds in between is not counted",)
        return EnvironmentSizes(spec, modules=(module,), notes=notes)
    few, more = (_tried(environments, count, steps=True)[2] for count in (_FEW, _MORE))
    return EnvironmentSizes(spec, max(0, more - few) // (_MORE - _FEW), (module,))


def _tried(environments: EnvironmentConfig, count: int, *, steps: bool) -> tuple[EnvSpec, str, int]:
    """Make environments and step them once; return their spec, the module of their class, and the most they held."""
    from recipes.embodied.envs.registry import make_env

    settings = EnvSettings(
        num_envs=count, task=environments.task, options=environments.options, success_reward=environments.success_reward
    )
    tracemalloc.start()
    try:
        env = make_env(environments.env_type, settings)
        try:
            spec = env.spec
            if steps:
                env.reset(0)
                chosen = spec.num_choices is not None
                env.step(np.zeros((count, 1, 1), np.int64) if chosen else np.zeros((count, 1, spec.action_size), "f4"))
            return spec, type(env).__module__, tracemalloc.get_traced_memory()[1]
        finally:
            env.close()
    except ConfigError as error:
        raise ConfigError("the environment cannot be made here", why=error.message, help=error.help) from error
    finally:
        tracemalloc.stop()


def env_forecast(
    environments: EnvironmentConfig, phase: str, sizes: EnvironmentSizes, base: Mapping[str, int], count: int
) -> ProcessForecast:
    """Return the forecast of one env worker, with the processes of its simulators.

    Args:
        environments: those that it steps in `phase`.
        phase: the method that steps them.
        sizes: of the environments.
        base: an empty process, by phase.
        count: number of env workers.
    """
    rows, notes = environments.total_num_envs // count, sizes.notes
    observed = rows * sizes.observed
    parts = {
        "base": base["start"],
        "environments": rows * sizes.stepping,
        "observations": _SENT_COPIES * observed,
    }
    if is_simulator(environments.env_type):
        per_simulator = SIMULATORS.get(environments.env_type)
        if per_simulator is None:
            notes = (*notes, f"the processes of `{environments.env_type}` are not counted: they were not measured")
        else:
            processes = min(rows, environments.num_processes or 1)
            parts["simulators"] = processes * per_simulator[bool(sizes.spec.cameras)]
            if processes < rows:
                notes = (*notes, f"a process of `{environments.env_type}` is counted as it holds one environment")
    phases = (
        PhaseForecast("init_worker", {"base": base["start"]}),
        PhaseForecast(phase, parts),
    )
    return ProcessForecast("env", count, phases, observed * count, notes)
