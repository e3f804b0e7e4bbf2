"""The data types of an environment's interface: specification, settings and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.training.arrays import Array, OnNonFinite

if TYPE_CHECKING:
    from recipes.embodied.config.env_config import EnvironmentConfig
    from rlinf_core import RobotUnit

FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]
# Height, width and the 3 channels of an image.
ImageShape: TypeAlias = tuple[int, int, int]
# By name: `states` float32 [B, S], `images.CAMERA` uint8 [B, H, W, 3] for each camera, `instructions` text [B]. Which
# of them there are, and their sizes, is said by `EnvSpec`.
Observation: TypeAlias = dict[str, Array]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Names and sizes of observations and actions, which a policy is built for.

    Attributes:
        state_size: S of the observation `states` float32 [B, S]; 0 without states.
        action_size: A of the actions [B, C, A]; 1 for a choice.
        num_choices: an action is one of so many integers, from 0; None: it is A numbers, each from -1 to 1.
        cameras: (H, W, 3) of the observation `images.CAMERA` uint8 [B, H, W, 3], by camera; images are upright, RGB.
        has_instructions: whether there is an observation `instructions`, text [B]: the task in words.
        low, high: [A], bounds of the numbers that the simulator itself takes, which -1 and 1 stand for, or its first
            and last choice; an entry None: that dimension lacks a bound, and numbers are taken as they are, up to the
            other one. None: the environment takes -1 to 1 itself, or choices from 0.
        whole: the simulator takes whole numbers from `low` to `high`, each for an equal part of -1 to 1.
    """

    state_size: int
    action_size: int
    num_choices: int | None = None
    cameras: Mapping[str, ImageShape] = field(default_factory=dict[str, ImageShape])
    has_instructions: bool = False
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None
    whole: bool = False

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> EnvSpec:
        """Return the spec of which these are the fields, by `dataclasses.asdict`, as JSON has them."""
        fields = dict(data)
        fields["cameras"] = {camera: tuple(shape) for camera, shape in data["cameras"].items()}
        fields |= {name: None if data[name] is None else tuple(data[name]) for name in ("low", "high")}
        return cls(**fields)

    @property
    def bounded(self) -> BoolArray:
        """bool [A], the dimensions of an action that are clipped to -1 to 1."""
        if self.low is None or self.high is None:
            return np.ones(self.action_size, np.bool_)
        return np.array([None not in pair for pair in zip(self.low, self.high, strict=True)], np.bool_)

    def carried_out(self, actions: Array) -> Array:
        """Return actions [..., A] with bounded dimensions clipped to -1 to 1."""
        if self.num_choices is not None:
            return actions
        return np.where(self.bounded, np.clip(actions, -1, 1), actions).astype(actions.dtype)

    def native(self, actions: Array) -> Array:
        """Return actions [..., A] in the simulator's own numbers, as the environment gives them to it."""
        if self.low is None or self.high is None:
            return self.carried_out(actions)
        return native_actions(actions, self.low, self.high, chooses=self.num_choices is not None, whole=self.whole)

    @property
    def observations(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape of one row, and numpy's kind or dtype, of each observation: `float32`, `uint8` or `U` for text."""
        observations: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.state_size:
            observations[STATES] = ((self.state_size,), "float32")
        observations |= {image_key(camera): (tuple(shape), "uint8") for camera, shape in self.cameras.items()}
        if self.has_instructions:
            observations[INSTRUCTIONS] = ((), "U")
        return observations


def learned_spec(spec: EnvSpec, action_size: int) -> EnvSpec:
    """Return the spec of an environment with actions of another size, from -1 to 1."""
    return spec if action_size == spec.action_size else replace(spec, action_size=action_size, low=None, high=None)


def native_actions(
    actions: Array,
    low: Sequence[float | None],
    high: Sequence[float | None],
    *,
    chooses: bool = False,
    whole: bool = False,
) -> Array:
    """Return actions [..., A] from -1 to 1, or choices from 0, in a simulator's own numbers; see `EnvSpec`."""
    least = np.array([-np.inf if bound is None else bound for bound in low])
    if chooses:
        return actions + least.astype(np.int64)
    most = np.array([np.inf if bound is None else bound for bound in high])
    bounded = np.isfinite(least) & np.isfinite(most)
    begin, width = np.where(bounded, least, 0), np.where(bounded, most, 0) - np.where(bounded, least, 0)
    share = (np.clip(np.asarray(actions, np.float64), -1, 1) + 1) / 2
    if whole:
        return np.minimum(np.floor(begin + share * (width + 1)), most)
    return np.where(bounded, begin + share * width, np.clip(actions, least, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """Constructor argument of every environment: the keys of `env.train` or `env.eval`, and its share of the batch.

    Attributes:
        num_envs: environments of this batch, B.
        first_env: number of its first one among all environments of the job; starts depend on that number, so that
            they are the same however environments are dealt to workers.
        max_episode_steps: steps after which an episode is truncated; None: the environment's own limit.
        hardware: the robots that the process owns, `worker_info.hardware`; empty for simulators.
        resumable: `save` will be called, so that what it needs has to be kept.
        on_nonfinite: what becomes of a NaN or an infinity in a reward or an observation: an error, or the end of that
            episode, whose last step is then not trained on.
        total_envs: environments of all workers; None: this batch has all of them.
        num_processes: simulator processes that share the environments, 0: none but this one; None: as the environment
            has it by default.
        simulator_timeout: seconds that one operation of a simulator in a process of its own may take.
        owner: the worker, as in `EnvGroup:0`, for errors.
        repeats: where the environments raise, new ones repeat the running episodes once; else the error is raised.
        suspects: simulator processes died of episodes, so that the actions of each are kept.
        set_aside: the names of starts that simulator processes died of thrice; others take their place.
        observed_steps: T, observations in a row that the policy acts by: those before the present one are given as
            `past.NAME` [B, T - 1, ...].
    """

    num_envs: int
    first_env: int = 0
    task: str | None = None
    max_episode_steps: int | None = None
    auto_reset: bool = True
    ignore_terminations: bool = False
    reward_coef: float = 1.0
    success_reward: bool = False
    mask_after_success: bool = False
    group_size: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hardware: tuple[RobotUnit, ...] = ()
    resumable: bool = False
    on_nonfinite: OnNonFinite = "stop"
    total_envs: int | None = None
    num_processes: int | None = None
    simulator_timeout: float = 300
    owner: str = "the environment"
    repeats: bool = False
    suspects: bool = False
    set_aside: frozenset[str] = frozenset()
    observed_steps: int = 1

    @property
    def keeps_actions(self) -> bool:
        """Whether the actions of each running episode are kept."""
        return self.resumable or self.suspects

    @classmethod
    def of(cls, config: EnvironmentConfig, **share: Any) -> EnvSettings:
        """Return the settings of a section `env.train` or `env.eval`; `share` names what is of this batch alone."""
        # Imported here: the process of a simulator needs no configuration.
        from recipes.embodied.config.env_config import stepping

        counted, processes = config.in_training, stepping(config)
        return cls(
            task=config.task,
            max_episode_steps=config.max_episode_steps,
            auto_reset=counted.auto_reset,
            ignore_terminations=counted.ignore_terminations,
            reward_coef=counted.reward_coef,
            success_reward=counted.success_reward,
            seed=config.seed,
            options=config.options,
            total_envs=config.total_num_envs,
            num_processes=processes.num_processes,
            simulator_timeout=processes.simulator_timeout,
            repeats=True,
            **share,
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """Result of one step of all environments; rows that were not stepped may hold anything.

    Attributes:
        rewards: float32 [B].
        terminations: bool [B], the task ended.
        truncations: bool [B], the environment itself cut the episode off; None: it never does.
        successes: bool [B], the task is solved in this state; None: it does not know success.
        actions: float32 [B, A], what was carried out where that is not what was asked for, as where a robot's
            controller keeps a limit; None: what was asked for. Only environments that `alters_actions` give it.
        failures: bool [B], episodes truncated here because the simulator failed, which are not samples, or failed where
            there is an `EnvError` of them; None: none.
    """

    rewards: FloatArray
    terminations: BoolArray
    truncations: BoolArray | None = None
    successes: BoolArray | None = None
    actions: FloatArray | None = None
    failures: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class FinishedEpisodes:
    """The k episodes that ended in a step, ordered by environment.

    Attributes:
        env: int64 [k], the environment, from 0 in this batch.
        number: int64 [k], which episode it was since `reset`, from 0. Where every pass resets, only the episodes 0 are
            a fair sample: among the later ones those that end within the pass are the short ones.
        returns: float32 [k], sum of rewards.
        lengths: int64 [k], steps.
        success_once: bool [k], solved in some state; None: success is not known.
        success_at_end: bool [k], solved in the last state; None: success is not known.
        erred: bool [k], the environment raised again when a new one repeated it: it counts as failed.
    """

    env: IntArray
    number: IntArray
    returns: FloatArray
    lengths: IntArray
    success_once: BoolArray | None
    success_at_end: BoolArray | None
    erred: BoolArray


class EnvError(NamedTuple):
    """An episode in which the environment raised, and raised again when a new one repeated it; plain values.

    Attributes:
        episode: the name of its start.
        text: the exception with file and line, and where in the episode, in one line.
        place: the user's own line, as `FILE:LINE in FUNCTION`; empty where it is not known.
        began: whether the episode began; False where its reset raised.
    """

    episode: str
    text: str
    place: str = ""
    began: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a chunk of C actions.

    Attributes:
        observations: what the policy acts on next; of the new episode where one has started.
        rewards: float32 [B, C].
        terminations: bool [B, C], the task ended with this action.
        truncations: bool [B, C], the episode was cut off after this action.
        valid: bool [B, C], the action was carried out, and counts. It was not when the episode had ended: the rest of
            its chunk is dropped, and so is everything until the next `reset` without `auto_reset`. With
            `on_nonfinite: skip` it does not count where the reward or the observation after it was not finite.
        final_observations: observations at the end of those episodes that ended; rows of other environments hold their
            present one. None when no episode ended.
        episodes: what is known of those that ended; None when none did.
        executed: [B, C, A], the actions that were carried out; None: those of the policy, always.
        interventions: bool [B, C], actions that somebody else than the policy chose; None likewise.
        failed: bool [B], the simulator failed: its episode ended here, is not among `episodes`, and none of its steps
            counts, also of chunks before; None: none did.
        errors: the errors of episodes that failed by one, and of batches of which nobody can say whose it was.
    """

    observations: Observation
    rewards: FloatArray
    terminations: BoolArray
    truncations: BoolArray
    valid: BoolArray
    final_observations: Observation | None
    episodes: FinishedEpisodes | None
    executed: Array | None = None
    interventions: BoolArray | None = None
    failed: BoolArray | None = None
    errors: Sequence[EnvError] = ()

    @property
    def dones(self) -> BoolArray:
        """bool [B, C], whether the episode ended with this action, terminated or truncated."""
        return self.terminations | self.truncations
