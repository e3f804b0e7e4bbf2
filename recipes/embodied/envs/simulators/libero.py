"""LIBERO: household tasks of a Franka Panda in MuJoCo, with instructions and fixed initial states."""

# LIBERO is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import LiberoOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.embodied.envs.simulators.packages import imported, unknown_task
from recipes.embodied.envs.simulators.robosuite import upright
from rlinf_core import ConfigError

# The usual limits in evaluations of vision-language-action models, by suite: slightly above the longest demonstration.
_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
_OTHER_LIMIT = 400
_CAMERAS = {"main": "agentview", "wrist": "robot0_eye_in_hand"}
_REST = np.array([0.0, 0, 0, 0, 0, 0, -1])
# numpy's global generator places objects before the initial state is set; fixtures, which the state does not include,
# keep the places of this seed.
_PLACING_SEED = 0
# An object at rest counts as unmoved within these distances: those of LIBERO's own `On`, and the height of its regions
# (`under`). The regions themselves are narrower than the stored starts.
_ASIDE, _ABOVE = 0.03, 0.10  # m


class LiberoSimulation(Simulation):
    """A task of a suite, by its number: `libero_spatial/0`."""

    options_model = LiberoOptions

    @classmethod
    def tasks(cls, task: str, options: LiberoOptions) -> list[str]:
        """Return all tasks of a suite if the name is a suite's."""
        suite, _, number = task.partition("/")
        count = _suite(suite).n_tasks
        if not number:
            return [f"{suite}/{index}" for index in range(count)]
        if not number.isdecimal() or int(number) >= count:
            raise unknown_task("libero", task, [f"{suite}/{index}" for index in range(count)])
        return [task]

    def __init__(self, task: str, options: LiberoOptions) -> None:
        suite, _, number = task.partition("/")
        tasks, wrappers = _suite(suite), imported("libero.libero.envs.env_wrapper", "libero")
        selected = tasks.get_task(int(number))
        folder = imported("libero.libero", "libero").get_libero_path("bddl_files")
        file = os.path.join(folder, selected.problem_folder, selected.bddl_file)
        if not os.path.exists(file):
            raise ConfigError(
                f"LIBERO's task `{task}` has no file `{file}`",
                help="install LIBERO with its assets: `rlinf venv setup libero`",
            )
        self._options, self._words = options, selected.language
        self._starts = self._initial_states(tasks, int(number))
        self.max_episode_steps = _LIMITS.get(suite, _OTHER_LIMIT)
        self._env = wrappers.ControlEnv(
            file,
            has_renderer=False,
            has_offscreen_renderer=bool(options.cameras),
            use_camera_obs=False,
            ignore_done=True,
        )
        self.control_hz = float(self._env.env.control_freq)
        self.stored_starts = len(self._starts)
        self._observed: dict[str, Any] = {}
        self._stored: dict[str, NDArray[np.float64]] = {}
        self.reset(Start(0, 0))

    def _initial_states(self, tasks: Any, number: int) -> NDArray[np.float64]:
        states = np.asarray(tasks.get_task_init_states(number))
        if self._options.initial_states is None:
            return states
        first, last = self._options.initial_states
        if not 0 <= first <= last < len(states):
            raise ConfigError(
                f"`initial_states: [{first}, {last}]` is out of range",
                where="env.options",
                help=f"the task has the initial states 0 to {len(states) - 1}",
            )
        return states[first : last + 1]

    @property
    def spec(self) -> EnvSpec:
        """8 states: position and rotation vector of the hand, and both fingers; object poses follow if configured."""
        shape = (self._options.image_size, self._options.image_size, 3)
        cameras = {str(camera): shape for camera in self._options.cameras}
        return EnvSpec(len(self._states()), 7, cameras=cameras, has_instructions=True)

    def reset(self, start: Start) -> None:
        """See `Simulation`; the task's initial states are the fixed starts."""
        np.random.seed(_PLACING_SEED)
        self._env.reset()
        self._observed = self._env.set_init_state(self._starts[start.number % len(self._starts)])
        self._stored = self._places()
        for _ in range(self._options.settle_steps):
            self._observed, *_ = self._env.step(_REST)

    def faults_of_start(self) -> list[str]:
        """See `Simulation`: checks `(:init ...)` of the task's file by LIBERO's own predicates.

        Objects are stored in the air, so that a start without `settle_steps` is not checked. An object in a region,
        such as one of the table, may also stay where it was stored.
        """
        if not self._options.settle_steps:
            return []
        scene, places = self._env.env, self._places()
        faults: list[str] = []
        for predicate, thing, *others in scene.parsed_problem["initial_state"]:
            if scene._eval_predicate([predicate, thing, *others]):
                continue
            how = ""
            if others and scene.object_states_dict[others[0]].object_state_type == "site":
                x, y, up = places[thing] - self._stored[thing]
                aside = float(np.hypot(x, y))
                if aside <= _ASIDE and up <= _ABOVE:
                    continue
                how = f": it went {aside:.2f} m aside and {up:.2f} m up"
            said = " ".join([thing, predicate, *others])
            faults.append(f"after {self._options.settle_steps} steps at rest `{said}` does not hold{how}")
        return faults

    def _places(self) -> dict[str, NDArray[np.float64]]:
        """Return the position of each object and fixture, in meters."""
        scene = self._env.env
        return {name: scene.sim.data.body_xpos[body].copy() for name, body in scene.obj_body_id.items()}

    def step(self, action: Any) -> Outcome:
        """See `Simulation`; the reward is 1 for success, which ends the episode."""
        self._observed, reward, _, _ = self._env.step(action)
        success = bool(self._env.check_success())
        return Outcome(float(reward), terminated=success, success=success)

    def observe(self) -> Row:
        row: Row = {STATES: self._states(), INSTRUCTIONS: self._words}
        for camera in self._options.cameras:
            image = upright(self._env.sim, _CAMERAS[camera], self._options.image_size)
            row[image_key(camera)] = np.ascontiguousarray(image[:, ::-1]) if self._options.mirrored else image
        return row

    def _states(self) -> NDArray[np.float32]:
        seen = self._observed
        parts = [seen["robot0_eef_pos"], rotation_vector(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"]]
        if self._options.observe_objects:
            parts.append(seen["object-state"])
        return np.concatenate(parts).astype(np.float32)

    def close(self) -> None:
        self._env.close()


class LiberoEnv(SimulatedEnv):
    """`task` is a suite (`libero_spatial`, `libero_object`, `libero_goal`, `libero_10`, ...) or one task, `SUITE/0`."""

    simulation: ClassVar[str] = f"{__name__}:LiberoSimulation"
    default_task: ClassVar[str] = "libero_spatial"


def rotation_vector(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the axis times the angle, from 0 to 2 pi, of a quaternion (x, y, z, w), as LIBERO's policies expect it."""
    w = np.clip(quaternion[3], -1, 1)
    sine = np.sqrt(1 - w * w)
    if sine < 1e-8:
        return np.zeros(3)
    return quaternion[:3] * (2 * np.arccos(w) / sine)


def _suite(name: str) -> Any:
    benchmark = imported("libero.libero.benchmark", "libero")
    known = benchmark.get_benchmark_dict()
    if name not in known:
        raise unknown_task("libero", name, sorted(known))
    return known[name]()
