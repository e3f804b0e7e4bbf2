"""Whole episodes, step by step, and the env workers that collect them, for recordings, evaluations and videos.

Imports no torch: it runs in interpreters of environments, which may lack it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_config import InterventionConfig
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvError, EnvSpec, Observation, StepResult
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, is_past
from recipes.embodied.envs.running import ERROR
from recipes.embodied.envs.simulators.packages import versions_of
from recipes.embodied.interventions.registry import open_source
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.loop.videos import FrameRecorder
from recipes.embodied.workers.env_worker import EnvWorker
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.errors import RunError

# The columns to keep of every step: none, or everything that a policy learns from.
Keep: TypeAlias = Literal["nothing", "everything"]
# The actor of steps without interventions.
Actor: TypeAlias = Literal["policy", "expert", "nobody"]
ACTIONS, REWARDS, INTERVENED = "actions", "rewards", "interventions"
SUCCESSES, TERMINATIONS = "successes", "terminations"
FRAME_AGES: Final = "frame_age."


@dataclass(frozen=True)
class CollectedEpisode:
    """One episode of T steps.

    Attributes:
        env: number of the environment within the job.
        reset: number of the reset that began it; with `env` and the seed it determines the start.
        task: the first instruction, or the name of the task if the environment has none.
        length: T.
        total_reward: sum of rewards.
        success_once: solved in some state; None: success is unknown.
        success_at_end: solved in the last state; None: success is unknown.
        outcome: how it ended: `success`, a failure by its name, `time out`, `error` of the environment's code.
        start: `seed`, and `number` of a fixed start if there is one.
        columns: the columns by name, [T, ...]: observations before each step, `actions`, `rewards`, `successes` and
            `terminations` after it; `interventions` if somebody may intervene; `frame_age.CAMERA` if the age of a frame
            is known, in seconds.
    """

    env: int
    reset: int
    task: str
    length: int
    total_reward: float
    success_once: bool | None
    success_at_end: bool | None
    outcome: str = ""
    start: Mapping[str, int] = field(default_factory=dict[str, int])
    columns: Mapping[str, Array] = field(default_factory=dict[str, Array])


class EpisodeCollector:
    """Steps a batch of environments from a reset until the episode of each is over.

    Args:
        batch: the batch, without `auto_reset`.
        reset: number of the reset.
        task: the name of the task, used if the environment has no instructions.
        keep: the columns to keep.

    Attributes:
        observations: the current observations.
        errors: the errors of the environments' own code.
    """

    def __init__(self, batch: VectorEnv, reset: int, task: str, keep: Keep) -> None:
        if batch.settings.auto_reset:
            raise ValueError("episodes are collected from environments without auto_reset")
        self._batch, self._reset, self._keep = batch, reset, keep
        self.observations: Observation = batch.reset(reset)
        self._ages = batch.frame_ages()
        texts = self.observations.get(INSTRUCTIONS)
        self._tasks = [task] * batch.num_envs if texts is None else [str(text) for text in texts]
        self._steps: list[dict[str, Array]] = []
        self._valid: list[NDArray[np.bool_]] = []
        self._totals = np.zeros(batch.num_envs)
        self._solved_once = np.zeros(batch.num_envs, np.bool_)
        self._solved = np.zeros(batch.num_envs, np.bool_)
        self._over = np.zeros(batch.num_envs, np.bool_)
        self._failed = np.zeros(batch.num_envs, np.bool_)
        self._outcomes = [""] * batch.num_envs
        self._starts = batch.first_starts()
        self.errors: list[EnvError] = []

    @property
    def over(self) -> bool:
        """Whether every episode has ended."""
        return bool(self._over.all())

    def step(self, actions: Array) -> Observation:
        """Execute a chunk of actions [B, C, A] step by step, and return the observations after it.

        After an intervention, the rest of the chunk holds the environment, as in `ExecutedActions`.
        """
        interrupted = np.zeros(len(actions), np.bool_)
        for index in range(actions.shape[1]):
            if self.over:
                break
            before = self.observations
            wanted = actions[:, index : index + 1].copy()
            left = np.flatnonzero(interrupted)
            if len(left):
                wanted[left, 0] = self._batch.hold_actions(left)
            result = self._batch.step(wanted)
            self.observations = result.observations
            if result.interventions is not None:
                interrupted |= result.interventions[:, 0]
            taken = wanted[:, 0] if result.executed is None else result.executed[:, 0]
            self._add(before, taken, result)
        return self.observations

    def _add(self, before: Observation, actions: Array, result: StepResult) -> None:
        valid = result.valid[:, 0]
        solved = self._batch.solved
        self._valid.append(valid)
        self._totals += result.rewards[:, 0] * valid
        self._solved = np.where(valid, solved, self._solved)
        self._solved_once |= self._solved
        self._over |= result.dones[:, 0]
        if result.failed is not None:
            self._failed |= result.failed
        ended = np.flatnonzero(result.dones[:, 0])
        for row, outcome in zip(ended, self._batch.outcomes(ended, ~result.terminations[ended, 0]), strict=True):
            self._outcomes[row] = outcome
            if outcome == ERROR:
                self._solved[row] = self._solved_once[row] = False
        self.errors += result.errors
        if self._keep == "nothing":
            return
        row = {name: array for name, array in before.items() if not is_past(name)}
        row |= {f"{FRAME_AGES}{camera}": ages for camera, ages in self._ages.items()}
        self._ages = self._batch.frame_ages()
        if result.interventions is not None:
            row[INTERVENED] = result.interventions[:, 0]
        self._steps.append(
            {
                **row,
                ACTIONS: actions,
                REWARDS: result.rewards[:, 0],
                SUCCESSES: solved,
                TERMINATIONS: result.terminations[:, 0],
            }
        )

    def episodes(self) -> list[CollectedEpisode]:
        """Return the collected episodes by environment, without those whose simulator failed or that a person
        discarded.

        Raises:
            RunError: simulators failed in more than half of the episodes.
        """
        broken = int((self._failed & ~self._batch.discarded).sum())
        if 2 * broken > len(self._failed):
            raise RunError(
                f"the simulators of {broken} of {len(self._failed)} episodes failed",
                why="the log of the env worker has environment, seed, action and traceback",
                help="mend the simulator",
            )
        valid = np.stack(self._valid) if self._valid else np.zeros((0, self._batch.num_envs), np.bool_)
        knows = self._batch.knows_success
        episodes: list[CollectedEpisode] = []
        for row, number in enumerate(self._batch.numbers):
            if self._failed[row]:
                continue
            steps = np.flatnonzero(valid[:, row])
            names = self._steps[0] if self._steps else ()
            columns = {name: np.stack([self._steps[step][name][row] for step in steps]) for name in names}
            episodes.append(
                CollectedEpisode(
                    int(number),
                    self._reset,
                    self._tasks[row],
                    len(steps),
                    float(self._totals[row]),
                    bool(self._solved_once[row]) if knows else None,
                    bool(self._solved[row]) if knows else None,
                    self._outcomes[row],
                    self._starts[row],
                    columns,
                )
            )
        return episodes


class CollectingEnvWorker(EnvWorker):
    """A worker that runs one episode in each environment of `env.eval`."""

    def init_worker(self, layout: Layout, intervention: InterventionConfig | None = None) -> EnvSpec:
        """Make the environments; return their spec for the policy.

        Args:
            layout: the layout of the job.
            intervention: the source that takes over from the actor; None: no interventions.
        """
        self._rollout = self._config.rollout.group_name
        self._eval = self._made(self._config.env.eval, layout, training=False)
        if intervention is not None and intervention.source != NONE:
            for batch in self._eval.batches:
                batch.intervention = open_source(intervention.source, batch, intervention.options)
        return self._eval.batches[0].spec

    def describe(self) -> dict[str, Any]:
        """Return facts of the environments that the configuration does not hold: horizon, images, package versions."""
        batch = self._batches[0]
        return {
            "max_episode_steps": batch.max_episode_steps,
            "control_hz": batch.control_hz,
            "state_size": batch.spec.state_size,
            "action_size": batch.spec.action_size,
            "aged_cameras": list(batch.frame_ages()),
            "cameras": {name: list(shape) for name, shape in batch.spec.cameras.items()},
            "versions": {"numpy": np.__version__, **versions_of(self._config.env.eval.env_type)},
        }

    @property
    def _batches(self) -> list[VectorEnv]:
        if self._eval is None:
            raise RuntimeError("called before init_worker()")
        return self._eval.batches

    def collect(self, reset: int, keep: Keep, *, actor: Actor = "policy", film: bool = False) -> list[CollectedEpisode]:
        """Run the episodes that begin with a reset.

        Args:
            reset: the number of the reset.
            keep: the columns to keep.
            actor: the source of actions without interventions: the environment's scripted expert; the policy, by the
                rollout workers' `evaluate`; or nobody, so that the arm stands still until a person moves it, and an
                episode begins with the first motion.
            film: record the frames that `recorded_episodes` returns.

        Raises:
            ConfigError: the task has no expert.
        """
        stages = self._eval
        if stages is None:
            raise RuntimeError("called before init_worker()")
        environments = self._config.env.eval
        task = environments.task or environments.env_type
        collectors = [EpisodeCollector(batch, reset, task, keep) for batch in stages.batches]
        if film:
            self._films = [FrameRecorder(batch, reset) for batch in stages.batches]
        if actor != "policy":
            for batch, collector in zip(stages.batches, collectors, strict=True):
                if actor == "nobody" and batch.intervention is not None:
                    batch.intervention.wait_for_person()
                still = np.zeros((batch.num_envs, 1, batch.action_size), batch.spec.action_dtype)
                while not collector.over:
                    collector.step(_expert_actions(batch) if actor == "expert" else still)
        else:
            for stage, collector in enumerate(collectors):
                self._send(stages, stage, stages.first_message(collector.observations))
            for _ in range(stages.chunks):
                for stage, collector in enumerate(collectors):
                    actions = self._recv_actions(stages, stage)
                    self._send(stages, stage, {"observations": collector.step(actions)})
        self._errors += [error for collector in collectors for error in collector.errors]
        return [episode for collector in collectors for episode in collector.episodes()]


def _expert_actions(batch: VectorEnv) -> Array:
    """Return the expert's actions, [B, 1, A]."""
    actions = batch.expert()
    if actions is None:
        kind = batch.settings.task or type(batch).__name__
        raise ConfigError(
            f"the task `{kind}` has no scripted expert",
            help="record with a policy (`--checkpoint`), or give your environment an `expert`",
        )
    return np.asarray(actions)[:, None]
