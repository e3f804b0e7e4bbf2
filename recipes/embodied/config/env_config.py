"""`env`: the environments of an embodied job, for training and for evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self, TypeAlias, TypeVar, cast

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from recipes.embodied.config.env_types import (
    DEFAULT_ENV_TYPE,
    ENV_TYPES,
    FORMER_ENV_TYPES,
    GYMNASIUM,
    ID_FORM,
    has_ids,
    share_task,
)
from recipes.embodied.config.intervention_types import ENVIRONMENT, FORMER_SOURCES, JUDGES, NONE, SOURCES, SourceType
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count, IgnoredKeys, Seed
from rlinf_core.config.model import NoOptions, V, Variant, chosen, kind_of_section, one_of, several
from rlinf_core.config.sections.values import GroupName, NonNegativeInt, PositiveFloat
from rlinf_core.scalars import Bool, Data, Text, problem

EnvTypeName = Annotated[Text, KnownOrOwn("env_type", tuple(ENV_TYPES), instead=FORMER_ENV_TYPES, form=ID_FORM)]
_TASKS = ", ".join(f"{' or '.join(known.tasks)} ({name})" for name, known in ENV_TYPES.items() if known.tasks)
_SIMULATORS = ", ".join(f"`{known.task}` ({name})" for name, known in ENV_TYPES.items() if known.task)
_WITH_IDS = " and ".join(name for name in ENV_TYPES if has_ids(name))
# Evaluation must not reuse the starts of training.
EVAL_SEED_OFFSET = 1_000_000


class VideoConfig(ConfigModel):
    """Videos of episodes."""

    save_video: Bool = Field(
        default=False,
        description="Write videos of the episodes of every evaluation, one per kind of episode end, into `videos` in"
        " the run folder.",
    )


class InterventionConfig(Variant):
    """The people, or the script, that take over from the policy."""

    chosen_by: ClassVar[str] = "source"

    source: Annotated[Text, KnownOrOwn("intervention source", (NONE, *SOURCES), instead=FORMER_SOURCES)] = Field(
        default=NONE,
        description=f"Source of interventions: none, {', '.join(SOURCES)}, or `package.module:Class` for your own.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="The keys of this source alone (docs/robots.md)."
    )


class JudgeConfig(Variant):
    """The judge of episodes."""

    chosen_by: ClassVar[str] = "source"

    source: Annotated[Text, KnownOrOwn("judge", (ENVIRONMENT, *JUDGES))] = Field(
        default=ENVIRONMENT,
        description="Judge of success: environment, keys (a person), classifier (of pictures), or"
        " `package.module:Class`. Judges other than the environment give reward 1 for success and nothing"
        " else.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="The keys of this judge alone (docs/robots.md)."
    )


def _by_source(section: type[V], nothing: str, known: Mapping[str, SourceType]) -> tuple[type[V], ...]:
    """Return a section for each source: nothing, those known, and the user's own."""
    own = kind_of_section(section, (), None, form="[^:]*:.*", others=("package.module:Class",))
    options = {nothing: NoOptions, **{name: kind.options for name, kind in known.items()}}
    return (*(kind_of_section(section, (name,), model) for name, model in options.items()), own)


INTERVENTIONS: Final = _by_source(InterventionConfig, NONE, SOURCES)
_JUDGES: Final = _by_source(JudgeConfig, ENVIRONMENT, JUDGES)
if TYPE_CHECKING:
    Intervention: TypeAlias = InterventionConfig
    Judge: TypeAlias = JudgeConfig
else:
    Intervention, Judge = one_of(INTERVENTIONS), one_of(_JUDGES)


class EnvironmentConfig(Variant):
    """Environments of one kind."""

    chosen_by: ClassVar[str] = "env_type"
    of_kind: ClassVar[tuple[str, ...]] = ("task",)

    env_type: EnvTypeName = Field(
        default=DEFAULT_ENV_TYPE,
        description=f"Kind of environment: {', '.join(ENV_TYPES)}; an id of Gymnasium such as `CartPole-v1`; or"
        " `package.module:Class` for your own, a `gymnasium.Env` or a `VectorEnv`. It chooses `options`.",
    )
    task: Text | None = Field(
        default=None,
        description=f"Task: {_TASKS}, {_SIMULATORS}, an id such as `CartPole-v1` ({_WITH_IDS}). Default: the first"
        " one.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="The keys of this kind alone; of your own, arguments of its class."
    )
    total_num_envs: Count = Field(
        default=64, description="Total number of environments, over all workers and pipeline stages."
    )
    max_episode_steps: Count | None = Field(
        default=None,
        description="Steps after which an episode is truncated. Default: the environment's own limit: 50 for the arms,"
        f" the task's for simulators, the id's for {_WITH_IDS}.",
    )
    rollout_epoch: Count = Field(default=1, description="Rollout passes per training step.")
    seed: Seed = Field(
        default=0,
        description=f"Seed of the starts. Default: 0; for evaluations, the training seed + {EVAL_SEED_OFFSET}.",
    )
    judge: Judge = Field(
        default_factory=_JUDGES[0], description="Judge of episodes: source, options. Default: the environment."
    )

    @classmethod
    def keeps(cls, key: str, value: object, before: str, now: str) -> bool:
        return key == "task" and share_task(str(value), before, now)

    @property
    def in_training(self) -> RecordedEnvironmentConfig:
        """The section that says how steps and episodes count: this one, or that of training."""
        raise NotImplementedError


E = TypeVar("E", bound=EnvironmentConfig)


class _WithIdConfig(ConfigModel):
    """Environments of Gymnasium, EnvPool and panda-gym, and those of the user's own."""

    @model_validator(mode="wrap")
    @classmethod
    def _read_id(cls, written: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Read an id of Gymnasium in `env_type` as the `task` of `gymnasium`."""
        section = cast("dict[str, Any]", written) if isinstance(written, dict) else {}
        kind, task = section.get("env_type"), section.get("task")
        if not isinstance(kind, str) or not re.fullmatch(ID_FORM, kind):
            return validate(written)
        if task is not None and str(task) != kind:
            message = f"`env_type: {kind}` names the task, and `task` is `{task}`"
            error = problem("conflicting-settings", message, help=f"remove one of the two, or write `task: {kind}`")
            raise several([(("env_type",), error, kind)])
        read = validate({**section, "env_type": GYMNASIUM, "task": kind})
        read.model_fields_set.discard("task")  # the file has no such key to report
        return read


class RecordedEnvironmentConfig(EnvironmentConfig):
    """Environments of one kind, in which people may take over."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("success_reward",),
            lambda env, sizes: env.judge.source != ENVIRONMENT,
            "the judge rewards success and nothing else",
            because=("judge.source",),
        ),
    )

    auto_reset: Bool = Field(default=True, description="Reset environments whose episode ended within a pass.")
    ignore_terminations: Bool = Field(
        default=False, description="Run episodes to their full length, even after the task is done."
    )
    reward_coef: PositiveFloat = Field(default=1.0, description="Factor of all rewards.")
    success_reward: Bool = Field(
        default=False,
        description="Reward only the first success of an episode, with 1, instead of the environment's rewards.",
    )
    intervention: Intervention = Field(
        default_factory=INTERVENTIONS[0],
        description="Human interventions during training: source, options. Evaluations have none.",
    )

    @property
    def in_training(self) -> RecordedEnvironmentConfig:
        return self


class TrainEnvironmentConfig(RecordedEnvironmentConfig):
    """Environments that training learns from."""

    max_steps_per_rollout_epoch: Count = Field(
        default=50, description="Steps of every environment in one rollout pass; evaluations run whole episodes."
    )


class SteppedConfig(ConfigModel):
    """The keys of environments that processes of their own may step."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *RecordedEnvironmentConfig.no_effect,
        IgnoredKeys(
            ("simulator_timeout",),
            lambda env, sizes: (
                env.env_type in ENV_TYPES
                and not (ENV_TYPES[env.env_type].processes if env.num_processes is None else env.num_processes)
            ),
            "there are no simulator processes: environments are stepped in the worker process",
            "remove it, or write `num_processes: 1`",
            because=("num_processes", "env_type"),
        ),
    )

    num_processes: NonNegativeInt | None = Field(
        default=None,
        description="Simulator processes per env worker and pipeline stage, which share its environments; 0:"
        " environments are stepped in the worker process. Default: 1 for simulators in separate"
        " packages, 0 for gymnasium.",
    )
    simulator_timeout: PositiveFloat = Field(
        default=300.0,
        description="Time limit for one simulator operation (making, resetting, stepping or observing an environment),"
        " in seconds; a process that exceeds it is considered hung and is killed.",
    )


class EvalEnvironmentConfig(EnvironmentConfig):
    """Environments of evaluations."""

    follows: ClassVar[str] = "train"
    _in_training: RecordedEnvironmentConfig = PrivateAttr(default_factory=RecordedEnvironmentConfig)

    video_cfg: VideoConfig = Field(default_factory=VideoConfig, description="Videos of episodes: save_video.")

    @property
    def in_training(self) -> RecordedEnvironmentConfig:
        return self._in_training

    def counted_as(self, training: RecordedEnvironmentConfig) -> EvalEnvironmentConfig:
        """Return these environments with steps and episodes counted as in another section."""
        counted = self.model_copy()
        counted._in_training = training  # pyright: ignore[reportAttributeAccessIssue] - what is private may change
        return counted


def kinds_of(section: type[E]) -> tuple[type[E], ...]:
    """Return the variants of a section, the default first: one for each model of options, with or without the keys of
    processes, which evaluations do not have.
    """
    by_keys: dict[tuple[type[BaseModel] | None, bool], list[str]] = {}
    for name, known in ENV_TYPES.items():
        stepped = known.processes is not None and issubclass(section, RecordedEnvironmentConfig)
        by_keys.setdefault((known.options, stepped), []).append(name)
    return tuple(
        _kind(section, tuple(names), options, stepped=stepped) for (options, stepped), names in by_keys.items()
    )


def _kind(section: type[E], names: tuple[str, ...], options: type[BaseModel] | None, *, stepped: bool) -> type[E]:
    mixins: tuple[type[ConfigModel], ...] = (SteppedConfig,) if stepped else ()
    if GYMNASIUM not in names:
        return kind_of_section(section, names, options, mixins=mixins)
    mixins, others = (_WithIdConfig, *mixins), ("package.module:Class", "NAME-v1")
    return kind_of_section(section, names, options, mixins=mixins, form=rf"[^:]*:.*|{ID_FORM}", others=others)


_RECORDED: Final = kinds_of(RecordedEnvironmentConfig)
TRAINING: Final = kinds_of(TrainEnvironmentConfig)
_EVALUATING: Final = kinds_of(EvalEnvironmentConfig)
if TYPE_CHECKING:
    TrainEnvironments: TypeAlias = TrainEnvironmentConfig
    RecordedEnvironments: TypeAlias = RecordedEnvironmentConfig
    EvalEnvironments: TypeAlias = EvalEnvironmentConfig
else:
    TrainEnvironments = one_of(TRAINING)
    RecordedEnvironments = one_of(_RECORDED)
    EvalEnvironments = one_of(_EVALUATING)


def stepping(environments: EnvironmentConfig) -> SteppedConfig:
    """Return the settings of the processes that step environments; the default without processes."""
    training = environments.in_training
    return training if isinstance(training, SteppedConfig) else SteppedConfig()


# Settings that evaluation does not inherit; it takes all others that it leaves out from `env.train`.
_EVAL_OWN: Final = {"rollout_epoch": 1}
# Keys whose meaning depends on the kind of environment.
_OF_KIND: Final = frozenset({"env_type", "options", *EnvironmentConfig.of_kind})


def _as_in_training(evaluation: EvalEnvironmentConfig, train: RecordedEnvironmentConfig) -> EvalEnvironmentConfig:
    own = {name: getattr(evaluation, name) for name in evaluation.model_fields_set}
    if evaluation.task is not None:
        own["task"] = evaluation.task  # also of an id in `env_type`
    inherited = type(train).model_fields.keys() & type(evaluation).model_fields.keys()
    if "env_type" in own and evaluation.env_type != train.env_type:
        keeps_task = train.task is not None and share_task(train.task, train.env_type, evaluation.env_type)
        inherited -= _OF_KIND - ({"task"} if keeps_task else set())
    seed = {"seed": (train.seed + EVAL_SEED_OFFSET) % 2**32}
    values = {name: getattr(train if name in inherited else evaluation, name) for name in type(evaluation).model_fields}
    # Only what the file sets in `env.eval` itself counts as given.
    return evaluation.model_construct(set(own), **{**values, **_EVAL_OWN, **seed, **own}).counted_as(train)


class EnvSection(ConfigModel):
    """The workers that step environments."""

    group_name: GroupName = Field(
        default="EnvGroup", description="Name of the worker group, by which other components address it."
    )
    train: RecordedEnvironments = Field(
        default_factory=_RECORDED[0],
        description="Environments that `rlinf record` records in, and what `env.eval` leaves out.",
    )
    eval: EvalEnvironments = Field(
        default_factory=_EVALUATING[0],
        description="Evaluation environments. Keys left out are as in `env.train`, except `seed` and `rollout_epoch`"
        " (1); steps and episodes count as there.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _evaluate_as_trained(cls, written: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill what an evaluation leaves out; first its kind, which determines its keys."""
        if not isinstance(written, dict):
            return validate(written)
        section = cast("dict[str, Any]", written)
        evaluation: Any = {} if section.get("eval") is None else section["eval"]
        own = cast("dict[str, Any]", evaluation) if isinstance(evaluation, dict) else None
        follows = own is not None and own.get("env_type") is None
        if own is not None and follows:
            evaluation = {**own, "env_type": _kind_of(section.get("train")).names()[0]}
        read = validate({**section, "eval": evaluation})
        if follows:
            read.eval.model_fields_set.discard("env_type")
        if section.get("eval") is None:
            read.model_fields_set.discard("eval")
        object.__setattr__(read, "eval", _as_in_training(read.eval, read.train))  # sections are frozen
        return read


def _kind_of(train: Any) -> type[Variant]:
    if isinstance(train, EnvironmentConfig):
        return type(train)
    return chosen(_EVALUATING, cast("dict[str, Any]", train) if isinstance(train, dict) else {})
