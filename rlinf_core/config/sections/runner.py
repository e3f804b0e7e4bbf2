"""`runner`: how long a run lasts, what it keeps, and where its results go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import ConfigModel, NoEffect
from rlinf_core.config.sections.values import Count, NonNegativeInt, OptionalWrittenPath, StepsOrNever, WrittenPath
from rlinf_core.scalars import Bool, Text

# The modules that a logger backend imports.
LOGGER_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "torch"),
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
}


# What `resume_dir` says for the newest checkpoint of the experiment.
RESUME_NEWEST: Final = "auto"


class LoggerConfig(ConfigModel):
    """The places of metrics and logs. `metrics.jsonl` is always written."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("project_name",),
            lambda logger, sizes: not logger.logger_backends,
            "only the services that `logger_backends` names file runs by project",
            "remove it, or write `logger_backends: [tensorboard]`",
            because=("logger_backends",),
        ),
    )

    log_path: WrittenPath = Field(
        default="runs", description="Folder that holds one folder for each run; relative to where `rlinf train` starts."
    )
    project_name: Text = Field(default="rlinf", description="Project under which the logger backends file the run.")
    experiment_name: Text | None = Field(
        default=None, description="Name of the run, part of its folder's name. Default: the recipe's name."
    )
    logger_backends: tuple[Literal["tensorboard", "wandb", "swanlab", "trackio"], ...] = Field(
        default=(), description="Further places for metrics, each imported only when named here. Default: none."
    )


class RunnerConfig(ConfigModel):
    """The run as a whole."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            (
                *("max_epochs", "max_steps", "val_check_interval", "val_before_train"),
                *("save_interval", "save_on_interrupt", "keep_checkpoints"),
            ),
            lambda runner, sizes: runner.only_eval,
            "`only_eval` evaluates once and trains nothing",
            "it is read again without `only_eval`",
            because=("only_eval",),
            severity=Severity.NOTE,
        ),
        NoEffect(
            ("val_before_train",),
            lambda runner, sizes: runner.val_check_interval == -1,
            "the run has no evaluations: `val_check_interval` is -1",
            "remove it, or write `val_check_interval: 10`",
            because=("val_check_interval",),
            severity=Severity.NOTE,
        ),
        NoEffect(
            ("keep_checkpoints",),
            lambda runner, sizes: runner.save_interval == -1 and not runner.save_on_interrupt,
            "the run writes no checkpoints",
            "remove it, or write `save_interval: 100`",
            because=("save_interval",),
        ),
    )

    max_epochs: StepsOrNever = Field(
        default=-1,
        description="End after this many passes over the data (an epoch of an embodied run is one step); -1: no limit."
        " The limit reached first ends the run.",
    )
    max_steps: StepsOrNever = Field(
        default=-1,
        description="End after this many training steps; -1: no limit. The limit reached first ends the run.",
    )
    val_check_interval: StepsOrNever = Field(
        default=50, description="Training steps between evaluations, besides the one at the end; -1: never."
    )
    val_before_train: Bool = Field(
        default=True,
        description="Evaluate before the first step, too, where `val_check_interval` asks for evaluations at all.",
    )
    save_interval: StepsOrNever = Field(
        default=100, description="Training steps between checkpoints, besides the one at the end; -1: never."
    )
    save_on_interrupt: Bool = Field(
        default=True,
        description="Write a checkpoint of the last finished step when the run is interrupted (Ctrl-C, SIGTERM,"
        " `rlinf stop`).",
    )
    keep_checkpoints: StepsOrNever = Field(default=3, description="Checkpoints kept, the newest ones; -1: all of them.")
    resume_dir: OptionalWrittenPath = Field(
        default=None,
        description="Checkpoint to continue from: a `global_step_N` folder, or `auto` for the newest of"
        " the run of this configuration. Default: start anew.",
    )
    only_eval: Bool = Field(default=False, description="Evaluate once and train nothing.")
    weight_sync_interval: Count = Field(
        default=1, description="Training steps between two updates of the rollout's weights."
    )
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="How many weight versions the policy that made a sample may lie behind the one that learns from it."
        " 0: synchronous steps; from 1 on rollouts never stop.",
    )
    max_restarts: NonNegativeInt = Field(
        default=3, description="How often a run goes back to its last checkpoint after a worker or node died."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="A NaN or infinity in a loss, a gradient, a reward or an observation: stop ends the run with an"
        " error; skip leaves that update or step out and counts it in the metrics. Neither reaches a checkpoint.",
    )
    trace: Bool = Field(
        default=False, description="Write timers, sends and waits to `trace.json` (Chrome and Perfetto read it)."
    )
    logger: LoggerConfig = Field(
        default_factory=LoggerConfig, description="Where metrics and logs go: log_path, names, logger_backends."
    )

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None: it has no end."""
        return min((limit for limit in (self.max_epochs, self.max_steps) if limit != -1), default=None)
