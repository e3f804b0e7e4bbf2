"""`env`: the environments of an embodied job, for training and for evaluation."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from recipes.embodied.config.env_types import (
    DEFAULT_ENV_TYPE,
    ENV_TYPES,
    FORMER_ENV_TYPES,
    GYMNASIUM,
    ID_FORM,
    has_ids,
)
from recipes.embodied.config.intervention_types import ENVIRONMENT, FORMER_SOURCES, JUDGES, NONE, SOURCES
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count, IgnoredKeys, Seed
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import several
from rlinf_core.config.sections.values import NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.scalars import Bool, Data, Float, Text, problem

EnvTypeName = Annotated[Text, KnownOrOwn("env_type", tuple(ENV_TYPES), instead=FORMER_ENV_TYPES, form=ID_FORM)]
_TASKS = ", ".join(f"{' or '.join(known.tasks)} ({name})" for name, known in ENV_TYPES.items() if known.tasks)
_SIMULATORS = ", ".join(f"`{known.task}` ({name})" for name, known in ENV_TYPES.items() if known.task)
_WITH_IDS = " and ".join(name for name in ENV_TYPES if has_ids(name))
# Evaluation must not see the starts that training saw.
EVAL_SEED_OFFSET = 1_000_000


class VideoConfig(ConfigModel):
    """Videos of episodes."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("video_base_dir",),
            lambda video, sizes: not video.save_video,
            "no videos are written: `save_video` is false",
            "remove it, or write `save_video: true`",
            because=("save_video",),
        ),
        IgnoredKeys(
            ("fps", "episodes"),
            lambda video, sizes: not video.save_video,
            "training writes no videos: `save_video` is false",
            "remove it, or write `save_video: true`; `rlinf eval --play`, `rlinf record` and `rlinf eval` read it",
            because=("save_video",),
            severity=Severity.NOTE,
        ),
    )

    save_video: Bool = Field(
        default=False,
        description="Write videos of the episodes of every evaluation, one per kind of episode end.",
    )
    video_base_dir: OptionalPath = Field(
        default=None, description="Folder for videos. Default: `videos` in the run folder."
    )
    fps: Count = Field(default=20, description="Frames per second; each action is one frame.")
    episodes: Count = Field(default=9, description="Episodes per video, side by side.")


class InterventionConfig(ConfigModel):
    """The people, or the script, that take over from the policy."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("options",),
            lambda intervention, sizes: intervention.source == NONE,
            "there are no interventions: `source: none`",
            "remove it, or name a `source`",
            because=("source",),
        ),
    )

    source: Annotated[Text, KnownOrOwn("intervention source", (NONE, *SOURCES), instead=FORMER_SOURCES)] = Field(
        default=NONE,
        description=f"Source of interventions: none, {', '.join(SOURCES)}, or `package.module:Class` for your own.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Options of the source, by name (docs/robots.md)."
    )


class JudgeConfig(ConfigModel):
    """The judge of episodes."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("options",),
            lambda judge, sizes: judge.source == ENVIRONMENT,
            "the environment judges: `source` is environment",
            "remove it, or name a `source`",
            because=("source",),
        ),
    )

    source: Annotated[Text, KnownOrOwn("judge", (ENVIRONMENT, *JUDGES))] = Field(
        default=ENVIRONMENT,
        description="Judge of success: environment, keys (a person), classifier (of pictures), or"
        " `package.module:Class`. Judges other than the environment give reward 1 for success and nothing"
        " else.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Options of the judge, by name (docs/robots.md)."
    )


class InferenceConfig(ConfigModel):
    """The joining of the chunks that a policy predicts."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("ensemble_coefficient",),
            lambda inference, sizes: inference.chunking != "ensemble",
            "no predictions are averaged: `chunking` is not ensemble",
            "remove it, or write `chunking: ensemble`",
            because=("chunking",),
        ),
    )

    chunking: Literal["wait", "ensemble"] = Field(
        default="wait",
        description="What is carried out: wait, each chunk after the one before; ensemble, of each action the mean over"
        " the chunks that predict it (arXiv 2304.13705).",
    )
    ensemble_coefficient: Float = Field(
        default=0.01, description="Decay (m) of ensemble: the i-th oldest prediction of a step weighs exp(-m i)."
    )


class EnvironmentConfig(ConfigModel):
    """Environments of one kind."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("num_processes", "simulator_timeout"),
            lambda env, sizes: env.env_type in ENV_TYPES and ENV_TYPES[env.env_type].processes is None,
            lambda env: f"`env_type: {env.env_type}` has no simulator processes",
            because=("env_type",),
        ),
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
        IgnoredKeys(
            ("success_reward",),
            lambda env, sizes: env.judge.source != ENVIRONMENT,
            "the judge rewards success and nothing else",
            because=("judge.source",),
        ),
    )

    env_type: EnvTypeName = Field(
        default=DEFAULT_ENV_TYPE,
        description=f"Kind of environment: {', '.join(ENV_TYPES)}; an id of Gymnasium such as `CartPole-v1`; or"
        " `package.module:Class` for your own, a `gymnasium.Env` or a `VectorEnv`.",
    )
    task: Text | None = Field(
        default=None,
        description=f"Task: {_TASKS}, {_SIMULATORS}, an id such as `CartPole-v1` ({_WITH_IDS}). Default: the first"
        " one.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Additional arguments of the environment's constructor, by name."
    )
    total_num_envs: Count = Field(
        default=64, description="Total number of environments, over all workers and pipeline stages."
    )
    num_processes: NonNegativeInt | None = Field(
        default=None,
        description="Simulator processes per env worker and pipeline stage, which share its environments; 0:"
        " environments are stepped in the worker process. Default: 1 for simulators in separate"
        " packages, 0 for gymnasium. Built-in environments always run in the worker process.",
    )
    simulator_timeout: PositiveFloat = Field(
        default=300.0,
        description="Time limit for one simulator operation (making, resetting, stepping or observing an environment),"
        " in seconds; a process that exceeds it is considered hung and is killed.",
    )
    max_episode_steps: Count | None = Field(
        default=None,
        description="Steps after which an episode is truncated. Default: the environment's own limit: 50 for the arms,"
        f" the task's for simulators, the id's for {_WITH_IDS}.",
    )
    max_steps_per_rollout_epoch: Count = Field(
        default=50, description="Steps of every environment in one rollout pass."
    )
    rollout_epoch: Count = Field(default=1, description="Rollout passes per training step.")
    auto_reset: Bool = Field(default=True, description="Reset environments whose episode ended within a pass.")
    ignore_terminations: Bool = Field(
        default=False, description="Run episodes to their full length, even after the task is done."
    )
    reward_coef: PositiveFloat = Field(default=1.0, description="Factor of all rewards.")
    success_reward: Bool = Field(
        default=False,
        description="Reward only the first success of an episode, with 1, instead of the environment's rewards.",
    )
    group_size: Count | None = Field(
        default=None, description="Environments that share a start. Default: `algorithm.group_size`."
    )
    seed: Seed = Field(
        default=0,
        description=f"Seed of the starts. Default: 0; for evaluations, the training seed + {EVAL_SEED_OFFSET}.",
    )
    video_cfg: VideoConfig = Field(
        default_factory=VideoConfig, description="Videos of episodes: save_video, video_base_dir, fps, episodes."
    )
    judge: JudgeConfig = Field(
        default_factory=JudgeConfig, description="Judge of episodes: source, options. Default: the environment."
    )

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
        read.model_fields_set.discard("task")  # the file has no such key to point at
        return read


class RecordedEnvironmentConfig(EnvironmentConfig):
    """Environments of one kind, in which people may take over."""

    intervention: InterventionConfig = Field(
        default_factory=InterventionConfig,
        description="Human interventions during training: source, options. Evaluations have none.",
    )


class TrainEnvironmentConfig(RecordedEnvironmentConfig):
    """Environments that training learns from."""

    reset_each_pass: Bool | None = Field(
        default=None,
        description="Reset all environments at the start of every pass instead of continuing unfinished episodes."
        " Evaluations always do. Default: true for robots, without `auto_reset`, and for advantages"
        " without values (grpo, reinforce_pp); else false.",
    )
    mask_after_success: Bool = Field(
        default=False,
        description="Exclude the steps after an episode's first success from training; useful with"
        " `ignore_terminations`.",
    )


class EvalEnvironmentConfig(EnvironmentConfig):
    """Environments of evaluations."""

    inference: InferenceConfig = Field(
        default_factory=InferenceConfig,
        description="Temporal ensembling in evaluations and videos: chunking, ensemble_coefficient.",
    )


# What an evaluation decides for itself; everything else it takes from `env.train` where it says nothing.
_EVAL_OWN = {"rollout_epoch": 1, "group_size": 1}


def _as_in_training(evaluation: EvalEnvironmentConfig, info: ValidationInfo) -> EvalEnvironmentConfig:
    # A wrong `env.train` has been reported; the evaluation is then judged by itself.
    train: EnvironmentConfig = info.data.get("train") or EnvironmentConfig()
    own = {name: getattr(evaluation, name) for name in evaluation.model_fields_set}
    if evaluation.task is not None:
        own["task"] = evaluation.task  # of an id in `env_type`, too
    seed = {"seed": (train.seed + EVAL_SEED_OFFSET) % 2**32}
    values = {name: getattr(train, name) for name in EnvironmentConfig.model_fields}
    # What counts as given is what the file gives to the evaluation itself.
    return EvalEnvironmentConfig.model_construct(set(own), **{**values, **_EVAL_OWN, **seed, **own})


class EnvSection(ConfigModel):
    """The workers that step environments."""

    group_name: Text = Field(
        default="EnvGroup", description="Name of the worker group, by which other components address it."
    )
    train: RecordedEnvironmentConfig = Field(
        default_factory=RecordedEnvironmentConfig,
        description="Environments that `rlinf record` records in, and what `env.eval` leaves out.",
    )
    eval: Annotated[EvalEnvironmentConfig, AfterValidator(_as_in_training)] = Field(
        default_factory=EvalEnvironmentConfig,
        validate_default=True,
        description="Evaluation environments. Keys left out are as in `env.train`, except `seed`, `rollout_epoch` (1)"
        " and `group_size` (1).",
    )
