"""`runner`: length of a run, checkpoints, and destinations of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self, cast

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import ConfigModel, IgnoredKeys
from rlinf_core.config.sections.values import (
    Count,
    Duration,
    Fraction,
    NonNegativeInt,
    OptionalWrittenPath,
    Port,
    StepsOrNever,
    WrittenPath,
    duration_seconds,
)
from rlinf_core.scalars import Bool, Text, problem

# Modules required by a logger backend.
LOGGER_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "torch"),
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
}
# Modules required by `metrics_port`.
METRICS_PORT_MODULES: Final = ("prometheus_client",)

# The value of `resume_dir` for the newest checkpoint of the experiment.
RESUME_NEWEST: Final = "auto"


class LoggerConfig(ConfigModel):
    """Destinations of metrics and logs. `metrics.jsonl` is always written."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("project_name",),
            lambda logger, sizes: not logger.logger_backends,
            "only the services in `logger_backends` group runs by project",
            "remove it, or write `logger_backends: [tensorboard]`",
            because=("logger_backends",),
        ),
    )

    log_path: WrittenPath = Field(
        default="runs", description="Folder with one folder per run; relative to the working folder of `rlinf train`."
    )
    project_name: Text = Field(default="rlinf", description="Project name for the logger backends.")
    experiment_name: Text | None = Field(
        default=None, description="Name of the run, part of its folder's name. Default: the recipe's name."
    )
    logger_backends: tuple[Literal["tensorboard", "wandb", "swanlab", "trackio", "mlflow"], ...] = Field(
        default=(), description="Additional metric services, each imported only if named here. Default: none."
    )

    @field_validator("logger_backends", mode="before")
    @classmethod
    def _refuse_otlp(cls, backends: object) -> object:
        if isinstance(backends, list | tuple) and "otlp" in cast("Sequence[object]", backends):
            raise problem(
                "bad-value",
                "the logger backend `otlp` is no longer part of rlinf",
                help="remove it, and have the collector's `prometheus` receiver scrape `runner.metrics_port`;"
                " `runner.trace: true` keeps the spans in `trace.json`",
            )
        return cast("object", backends)


class RestartLimit(ConfigModel):
    """The number of restarts after deaths. A bare number counts over the whole run, whatever dies."""

    max: NonNegativeInt = Field(default=3, description="Maximum number of restarts; 0: none.")
    within: Duration | None = Field(
        default=None,
        description="Count the restarts of this time only, as in `10m`, and those of each component for itself."
        " Default: count all of the run.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {"max": value}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        alone = handler.resolve_ref_schema(schema)
        alone.update({"type": ["object", "integer"], "minimum": 0})
        return schema

    @property
    def seconds(self) -> float | None:
        """The length of the window; None for the whole run."""
        return None if self.within is None else duration_seconds(self.within)


class ProfilerConfig(ConfigModel):
    """A profile of each worker over a few training steps, in `profiles/` of the run folder."""

    kind: Literal["torch", "py-spy"] = Field(
        default="torch",
        description="torch: operators and kernels, of workers that use torch, for Perfetto; py-spy: functions of Python"
        " by samples, also of processes that a worker started, for speedscope.",
    )
    first_step: Count = Field(default=2, description="First step that is profiled; the first of a run warms up.")
    last_step: Count = Field(default=2, description="Last step that is profiled.")
    components: tuple[Text, ...] = Field(default=(), description="The components, as `[actor]`. Default: all.")

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.last_step < self.first_step:
            raise problem("bad-value", f"`last_step: {self.last_step}` is before `first_step: {self.first_step}`")
        return self


class RunSettings(ConfigModel):
    """The settings of every run, one that trains nothing of its own included."""

    max_restarts: RestartLimit = Field(
        default_factory=RestartLimit,
        description="Maximum number of restarts after the death of a worker or node, of that worker alone or of all"
        " from the last checkpoint: a number, or a window for each component, `{max: 3, within: 10m}`.",
    )
    skip_checks: Bool = Field(
        default=False,
        description="Leave out the comparisons before the first step that cost time, and that of the orientation of"
        " pictures (`rlinf train --skip-checks`); `first_contact.json` names them.",
    )
    trace: Bool = Field(
        default=False, description="Write timers, sends and waits to `trace.json` (for Chrome and Perfetto)."
    )
    metrics_port: Port | None = Field(
        default=None,
        description="Serve the newest metrics to Prometheus at this port of the driver's loopback address."
        " Default: none.",
    )
    logger: LoggerConfig = Field(
        default_factory=LoggerConfig, description="Where metrics and logs go: log_path, names, logger_backends."
    )


class RunnerConfig(RunSettings):
    """The run as a whole."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            (
                *("max_epochs", "max_steps", "val_check_interval", "val_before_train"),
                *("save_interval", "snapshot_interval", "save_on_interrupt", "keep_checkpoints", "profiler"),
                "on_hang",
            ),
            lambda runner, sizes: runner.only_eval,
            "`only_eval` evaluates once and trains nothing",
            "it applies again without `only_eval`",
            because=("only_eval",),
            severity=Severity.NOTE,
        ),
        IgnoredKeys(
            ("val_before_train",),
            lambda runner, sizes: runner.val_check_interval == -1,
            "the run has no evaluations: `val_check_interval` is -1",
            "remove it, or write `val_check_interval: 10`",
            because=("val_check_interval",),
            severity=Severity.NOTE,
        ),
        IgnoredKeys(
            ("snapshot_interval",),
            lambda runner, sizes: runner.save_interval == -1,
            "the run saves nothing before its end: `save_interval` is -1",
            "remove it, or write `save_interval: 100`",
            because=("save_interval",),
        ),
        IgnoredKeys(
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
        default=50, description="Training steps between evaluations, in addition to the one at the end; -1: never."
    )
    val_before_train: Bool = Field(
        default=True,
        description="Also evaluate before the first step, if `val_check_interval` enables evaluations.",
    )
    save_interval: StepsOrNever = Field(
        default=100, description="Training steps between checkpoints, in addition to the one at the end; -1: never."
    )
    save_on_interrupt: Bool = Field(
        default=True,
        description="Write a checkpoint of the last finished step when the run is interrupted (Ctrl-C, SIGTERM,"
        " `rlinf stop`).",
    )
    keep_checkpoints: StepsOrNever = Field(default=3, description="Number of newest checkpoints to keep; -1: all.")
    snapshot_interval: Duration | None = Field(
        default="1m",
        description="Time between snapshots, as in `30s`: checkpoints between those of `save_interval`, each replaced"
        " by the next. They are further apart where they would take more than 1 % of the time. null: none.",
    )
    resume_dir: OptionalWrittenPath = Field(
        default=None,
        description="Checkpoint to continue from: a `global_step_N` folder, or `auto` for the newest of"
        " the run of this configuration. Default: start from scratch.",
    )
    profiler: ProfilerConfig | None = Field(
        default=None, description="Profile workers over a few training steps. Default: none."
    )
    only_eval: Bool = Field(default=False, description="Evaluate once and train nothing.")
    on_hang: Literal["restart", "fail", "wait"] = Field(
        default="wait",
        description="A worker that holds up the run: no step has finished for five times as long as usual and for 10 s"
        " at least, and nothing moves. It is named in any case; restart also ends it, which is a death that"
        " `max_restarts` counts; fail ends it and the run.",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="A NaN or infinity in a loss, a gradient, a reward or an observation: stop ends the run with an"
        " error; skip omits that update or step and counts it in the metrics. Neither reaches a checkpoint.",
    )

    @property
    def snapshot_seconds(self) -> float | None:
        """Seconds between snapshots; None for none."""
        return None if self.snapshot_interval is None else duration_seconds(self.snapshot_interval)

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None for no end."""
        return min((limit for limit in (self.max_epochs, self.max_steps) if limit != -1), default=None)

    @property
    def staleness(self) -> int:
        """Weight versions that a sample may lie behind the policy that learns from it; 0: rollouts never run ahead."""
        return 0


class RolloutRunnerConfig(RunnerConfig):
    """The run of a recipe whose rollouts may run ahead of training."""

    max_staleness: NonNegativeInt = Field(
        default=0,
        description="Maximum number of weight versions by which the policy of a sample may lag behind the trained"
        " one. 0: synchronous steps; from 1 on: asynchronous rollouts.",
    )
    max_failed_fraction: Fraction = Field(
        default=0.5,
        description="Largest share of a step's answers or episodes that may fail through no fault of the policy, as"
        " where a server or simulator does; more end the run.",
    )

    @property
    def staleness(self) -> int:
        """See `RunnerConfig`."""
        return self.max_staleness
