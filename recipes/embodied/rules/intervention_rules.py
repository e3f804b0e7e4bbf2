"""Rules of `env.train.intervention`: where people can take over, and the options of sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.intervention_types import ENVIRONMENT, JUDGES, NONE, SOURCES, drives_one
from recipes.embodied.config.off_policy_settings import is_off_policy
from recipes.sections.checks import Report, blame
from recipes.sections.imports import check_import, runs_in_this_interpreter
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, missing_modules

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedConfig, PolicyJob
    from recipes.embodied.config.env_config import EnvironmentConfig

_AT: Final[Path] = ("env", "train", "intervention")
_SOURCE: Final[Path] = (*_AT, "source")


def check_intervention(config: EmbodiedConfig, workers: int | None, report: Report) -> None:
    """Report a source that cannot take over in this job, and options that it does not take."""
    intervention, loss = config.env.train.intervention, config.algorithm.loss_type
    source = intervention.source
    if source == NONE:
        return
    if not is_off_policy(loss):
        report(
            _SOURCE,
            "conflicting-settings",
            f"`loss_type: {loss}` learns only from actions that its own policy chose",
            "write `algorithm.loss_type: sac`; or record corrections of a trained policy with `rlinf record RUN"
            f" --device {source}`, and learn from them with recipe `sft`",
            about=[("algorithm", "loss_type")],
        )
    if ":" in source:
        check_import(config, _SOURCE, source, "env", report, is_class=True)
        return
    total, stages = config.env.train.total_num_envs, config.rollout.pipeline_stage_num
    if drives_one(source) and workers is not None and (total != workers or stages != 1):
        report(
            blame(config, ("env", "train", "total_num_envs"), _SOURCE),
            "conflicting-settings",
            f"a person controls one environment, but `env` has {workers} worker{'s' if workers > 1 else ''} with"
            f" {total} environments in {stages} pipeline stage{'s' if stages > 1 else ''}",
            f"write `total_num_envs: {workers}` and `pipeline_stage_num: 1`",
            about=[_SOURCE],
        )
    _check_package(config, report)


def _check_package(config: EmbodiedConfig, report: Report) -> None:
    source = config.env.train.intervention.source
    known = SOURCES[source]
    if runs_in_this_interpreter(config, "env") and missing_modules(known.modules):
        report(
            _SOURCE,
            "missing-extra",
            f"`source: {source}` needs the package `{known.install}`, {absence(known.modules[0])}",
            f"run `pip install {known.install}`, or run `env` in an interpreter that has it",
        )


def check_judge(config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report) -> None:
    """Report a judge that cannot judge these environments, and options that it does not take."""
    judge, at = environments.judge, ("env", section, "judge")
    if judge.source == ENVIRONMENT:
        return
    if ":" in judge.source:
        check_import(config, (*at, "source"), judge.source, "env", report, is_class=True)
        return
    missing = missing_modules(JUDGES[judge.source].modules) if runs_in_this_interpreter(config, "env") else ()
    if missing:
        message = f"`judge: {judge.source}` needs the package `{missing[0]}`, {absence(missing[0])}"
        report((*at, "source"), "missing-extra", message, f"give the nodes of `env` an interpreter with {missing[0]}")
    if judge.source == "keys" and environments.total_num_envs != 1 and not is_robot(environments.env_type):
        report(
            blame(config, ("env", section, "total_num_envs"), ("env", "train", "total_num_envs"), (*at, "source")),
            "conflicting-settings",
            f"a person judges one environment per worker, but `total_num_envs` is {environments.total_num_envs}",
            "write `total_num_envs: 1`",
            about=[(*at, "source")],
        )
