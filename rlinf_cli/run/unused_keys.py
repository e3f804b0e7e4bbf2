"""Keys that commands which train nothing have no use for: an argument that would change nothing is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from rlinf_core.job.load import Job

_RESUME: Final = "runner.resume_dir"
# Of the length of a training run, what it saves and where it reports.
_RUNNER: Final = (
    *("max_epochs", "max_steps", "max_restarts", "max_staleness", "max_failed_fraction"),
    *("val_check_interval", "val_before_train", "only_eval", "profiler", "on_hang", "trace", "metrics_port", "logger"),
    *("save_interval", "save_on_interrupt", "save_format", "keep_checkpoints", "snapshot_interval", "skip_checks"),
)
_TRAINING: Final = (
    _RESUME,
    *(f"runner.{name}" for name in _RUNNER),
    *(f"actor.{name}" for name in ("optim", "checkpoint_save_path", "global_batch_size", "micro_batch_size")),
    "algorithm",
)
# Of `env.train`, what evaluations take, too.
_OF_EVALUATIONS: Final = (
    *("seed", "auto_reset", "ignore_terminations", "reward_coef", "success_reward"),
    *("num_processes", "simulator_timeout"),
)
# Of `algorithm`, what a policy acts by.
_ACTING: Final = ("algorithm.loss_type", "algorithm.normalize_observations")


def refuse_unused(job: Job, overrides: Sequence[str], command: str, *, of_run: bool, checkpoint: str | None) -> None:
    """Refuse arguments that a command ignores, and a file's checkpoint to resume from in the place of weights.

    Args:
        job: the job with the arguments.
        overrides: `key=value` and `~key` arguments.
        command: its name.
        of_run: whether the job is that of a run.
        checkpoint: the checkpoint that is given.

    Raises:
        ConfigError: a key has no effect.
    """
    from rlinf_core.errors import ConfigError

    for argument in overrides:
        key = argument.lstrip("+~").partition("=")[0]
        if key == _RESUME or not _ignored(key, command, of_run=of_run):
            continue
        remedy = "remove it"
        if key.startswith("env."):
            other = "eval" if key.startswith("env.train") else "train"
            remedy = f"write `env.{other}{key[len('env.') :].removeprefix('train').removeprefix('eval')}`"
        raise ConfigError(
            f"`{key}` has no effect on `rlinf {command}`", where=f"the argument `{argument}`", help=remedy
        )
    written = any(argument.lstrip("+").partition("=")[0] == _RESUME for argument in overrides)
    named = _resumed(job)
    if named is not None and (written or (checkpoint is None and not of_run)):
        raise ConfigError(
            f"`{_RESUME}` is where training goes on: `rlinf {command}` does not take its weights from there",
            where=_RESUME,
            help=f"name them with `--checkpoint {'RUN' if named == 'auto' else named}`, and remove the key",
        )


def _resumed(job: Job) -> str | None:
    """Return the file's `runner.resume_dir`, also one that cannot be resumed from."""
    from rlinf_core.config.tree import to_data

    data = cast("dict[str, Any]", to_data(job.tree)) if job.tree is not None else {}
    runner = data.get("runner")
    named = cast("dict[str, Any]", runner).get("resume_dir") if isinstance(runner, dict) else None
    return None if named is None else str(named)


def _ignored(key: str, command: str, *, of_run: bool) -> bool:
    if _within(key, "env.eval"):
        return command == "record"
    if _within(key, "env.train"):
        # In a file `env.eval` inherits from it; in that of a run it takes how steps count. The seed tells which starts
        # are new.
        return of_run and command != "record" and key.removeprefix("env.train.") not in _OF_EVALUATIONS
    return any(_within(key, name) for name in _TRAINING) and not any(_within(key, name) for name in _ACTING)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
