"""The data types of an environment's interface: specification, settings and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.training.arrays import Array, OnNonFinite
from rlinf_core.suggest import as_index, short_repr

if TYPE_CHECKING:
    from recipes.embodied.config.env_config import EnvironmentConfig
    from rlinf_core import RobotUnit

FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]
# Height, width and the 3 channels of an image.
ImageShape: TypeAlias = tuple[int, int, int]
# By name: `states` float32 [B, S], `images.CAMERA` uint8 [B, H, W, 3] for each camera, `instructions` text [B].
# `EnvSpec` defines which of them exist, and their sizes.
Observation: TypeAlias = dict[str, Array]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Names and sizes of observations and actions, for which a policy is built.

    Attributes:
        state_size: S of the observation `states` float32 [B, S]; 0 without states.
        action_size: A of the actions [B, C, A]; 1 if actions are discrete.
        num_choices: the number of discrete actions, which count from 0; None: an action is A numbers from -1 to 1.
        cameras: (H, W, 3) of the observation `images.CAMERA` uint8 [B, H, W, 3], by camera; images are upright, RGB.
        has_instructions: whether there is an observation `instructions`, text [B].
        low, high: [A], the simulator's own bounds, to which -1 and 1 are mapped, or its first and last discrete action.
            An entry None: the dimension has no such bound, and is not scaled but clipped to the other bound. None: the
            environment takes -1 to 1, or discrete actions from 0.
        whole: whether the simulator takes integers from `low` to `high`, each for an equal part of -1 to 1.
    """

    # Of a spec in a file, a field that is none of these is refused.
    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    state_size: int
    action_size: int
    num_choices: int | None = None
    cameras: Mapping[str, ImageShape] = field(default_factory=dict[str, ImageShape])
    has_instructions: bool = False
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        """Convert numbers of numpy, and lists as JSON has them: a spec is written into checkpoints as JSON.

        Raises:
            TypeError: a size is no integer, or a bound no number.
            ValueError: a size is too small, or the bounds do not fit it or each other.
        """
        plain: dict[str, Any] = {
            "state_size": index(self.state_size),
            "action_size": index(self.action_size),
            "num_choices": None if self.num_choices is None else index(self.num_choices),
            "cameras": {camera: tuple(map(index, shape)) for camera, shape in self.cameras.items()},
            "low": _floats(self.low),
            "high": _floats(self.high),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        for name, least in (("state_size", 0), ("action_size", 1), ("num_choices", 1)):
            if plain[name] is not None and plain[name] < least:
                raise ValueError(f"`{name}` of a spec is {plain[name]}; it is at least {least}")
        low, high = plain["low"], plain["high"]
        if (low is None) != (high is None) or any(
            len(bounds) != self.action_size for bounds in (low, high) if bounds is not None
        ):
            raise ValueError(f"`low` and `high` of a spec are {low} and {high}; both have {self.action_size} entries")
        for least, most in zip(low or (), high or (), strict=True):
            if least is not None and most is not None and least > most:
                raise ValueError(f"`low` of a spec has {least}, above the {most} of `high`")

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> EnvSpec:
        """Return the spec with these fields, as `dataclasses.asdict` returns them, after a round trip through JSON."""
        return cls(**data)

    @property
    def action_dtype(self) -> str:
        """The dtype of actions: `float32`, or `int64` if they are discrete."""
        return "float32" if self.num_choices is None else "int64"

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
        """Return actions [..., A] in the simulator's own units."""
        if self.low is None or self.high is None:
            return self.carried_out(actions)
        return native_actions(actions, self.low, self.high, chooses=self.num_choices is not None, whole=self.whole)

    @property
    def observations(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape of one row and dtype of each observation: `float32`, `uint8`, or the kind `U` for text."""
        observations: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.state_size:
            observations[STATES] = ((self.state_size,), "float32")
        observations |= {image_key(camera): (tuple(shape), "uint8") for camera, shape in self.cameras.items()}
        if self.has_instructions:
            observations[INSTRUCTIONS] = ((), "U")
        return observations


def _floats(bounds: Iterable[float | None] | None) -> tuple[float | None, ...] | None:
    return None if bounds is None else tuple(None if bound is None else float(bound) for bound in bounds)


def learned_spec(spec: EnvSpec, action_size: int) -> EnvSpec:
    """Return the spec of an environment with actions of another size, from -1 to 1."""
    return spec if action_size == spec.action_size else replace(spec, action_size=action_size, low=None, high=None)


def native_actions(
    actions: Array,
    low: tuple[float | None, ...],
    high: tuple[float | None, ...],
    *,
    chooses: bool = False,
    whole: bool = False,
) -> Array:
    """Convert actions [..., A] from -1 to 1, or discrete ones from 0, to a simulator's own units; see `EnvSpec`."""
    if chooses:
        return actions + int(low[0] or 0)
    least, most, bounded, begin, width = _scale(low, high)
    share = (np.clip(np.asarray(actions, np.float64), -1, 1) + 1) / 2
    if whole:
        return np.minimum(np.floor(begin + share * (width + 1)), most)
    return np.where(bounded, begin + share * width, np.clip(actions, least, most))


@cache
def _scale(low: tuple[float | None, ...], high: tuple[float | None, ...]) -> tuple[Array, Array, Array, Array, Array]:
    """Return bounds, infinite for none, which dimensions have two, and the beginnings and widths of these."""
    least = np.array([-np.inf if bound is None else bound for bound in low])
    most = np.array([np.inf if bound is None else bound for bound in high])
    bounded = np.isfinite(least) & np.isfinite(most)
    begin = np.where(bounded, least, 0)
    return least, most, bounded, begin, np.where(bounded, most, 0) - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """The constructor argument of every environment: the keys of `env.train` or `env.eval`, and its share of the batch.

    Attributes:
        num_envs: the number of environments in this batch, B.
        first_env: the number of its first environment within the job; starts depend on it, and not on the distribution
            of environments over workers.
        max_episode_steps: steps after which an episode is truncated; None: the environment's own limit.
        hardware: the robots that the process owns, `worker_info.hardware`; empty for simulators.
        resumable: whether `save` will be called, so that its data must be kept.
        on_nonfinite: the treatment of a NaN or an infinity in a reward or an observation: an error, or the end of the
            episode, whose last step is then not trained on.
        total_envs: the number of environments in all workers; None: this batch has all.
        num_processes: the number of simulator processes that share the environments; 0: only this process; None: the
            environment's default.
        simulator_timeout: time limit of one operation of a simulator in a separate process, in seconds.
        owner: the worker, as in `EnvGroup:0`, for errors.
        repeats: whether environments that raise are replaced by new ones, which replay the running episodes once; else
            the error is raised.
        suspects: whether simulator processes have died in episodes, so that the actions of each episode are kept.
        set_aside: the names of quarantined starts, in which simulator processes died three times; others
            replace them.
        observed_steps: T, the consecutive observations that the policy acts on; those before the current one
            are passed as `past.NAME` [B, T - 1, ...].
    """

    num_envs: int
    first_env: int = 0
    task: str | None = None
    max_episode_steps: int | None = None
    auto_reset: bool = True
    ignore_terminations: bool = False
    reward_coef: float = 1.0
    success_reward: bool = False
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

    def __post_init__(self) -> None:
        """Check the numbers that programs pass.

        Raises:
            ValueError: a number is no integer, or too small, or groups are not whole.
        """
        for name, least in (("num_envs", 1), ("max_episode_steps", 1), ("group_size", 1), ("seed", 0)):
            value = getattr(self, name)
            number = as_index(value)
            if (number is None or number < least) and not (value is None and name == "max_episode_steps"):
                raise ValueError(f"`{name}` is {short_repr(value)}, expected an integer >= {least}")
        if self.num_envs % self.group_size:
            raise ValueError(f"{self.num_envs} environments (`num_envs`) are no whole groups of {self.group_size}")

    @property
    def keeps_actions(self) -> bool:
        """Whether the actions of each running episode are kept."""
        return self.resumable or self.suspects

    @classmethod
    def of(cls, config: EnvironmentConfig, **share: Any) -> EnvSettings:
        """Return the settings of a section `env.train` or `env.eval`; `share` holds the fields of this batch alone."""
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
        truncations: bool [B], the environment itself truncated the episode; None: it never does.
        successes: bool [B], the task is solved in this state; None: success is unknown.
        actions: float32 [B, A], the executed actions, which may differ from the requested ones, as within a robot's
            limits; None: the requested ones. Only environments with `alters_actions` return this.
        failures: bool [B], episodes truncated here because the simulator failed: they are dropped, or count as failed
            if they have an `EnvError`; None: none.
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
        env: int64 [k], the environment's row in this batch.
        number: int64 [k], the episode's number since `reset`, from 0. If every rollout segment resets, only episodes 0
            are an unbiased sample: of later ones, mainly short ones end within the segment.
        returns: float32 [k], sum of rewards.
        lengths: int64 [k], steps.
        success_once: bool [k], solved in some state; None: success is unknown.
        success_at_end: bool [k], solved in the last state; None: success is unknown.
        erred: bool [k], the environment raised, also in the replay on a new one: the episode counts as failed.
    """

    env: IntArray
    number: IntArray
    returns: FloatArray
    lengths: IntArray
    success_once: BoolArray | None
    success_at_end: BoolArray | None
    erred: BoolArray


class EnvError(NamedTuple):
    """An episode in which the environment raised, and raised again in the replay on a new one; plain values.

    Attributes:
        episode: the name of its start.
        text: the exception with file and line, and the place in the episode, in one line.
        place: the line in the user's code, as `FILE:LINE in FUNCTION`; empty if unknown.
        began: whether the episode began; False if its reset raised.
    """

    episode: str
    text: str
    place: str = ""
    began: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a chunk of C actions.

    Attributes:
        observations: what the policy acts on next; those of the new episode if one has started.
        rewards: float32 [B, C].
        terminations: bool [B, C], the task ended with this action.
        truncations: bool [B, C], the episode was truncated after this action.
        valid: bool [B, C], the action was executed, and counts. After the end of an episode, the rest of the chunk is
            dropped and, without `auto_reset`, everything until the next `reset`. With `on_nonfinite: skip`, an action
            before a non-finite reward or observation does not count.
        final_observations: observations at the ends of episodes; rows of other environments hold their current one.
            None if no episode ended.
        episodes: the records of the episodes that ended; None if none did.
        executed: [B, C, A], the executed actions; None: always the policy's.
        interventions: bool [B, C], actions not chosen by the policy; None: always the policy's.
        failed: bool [B], the simulator failed: its episode ended here, is not in `episodes`, and none of its steps
            counts, including earlier chunks; None: none failed.
        errors: the errors of failed episodes, and errors of batches that cannot be attributed to an episode.
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
