"""Rules between values of a job that several recipes share: divisible sizes, required placements, shared accelerators.

A recipe's rules are a function `check(config, world_sizes, report)`: the validated file, the number of processes of
each component (None if unknown offline), and the recipient of findings. An invalid value has its default in `config`,
and a finding that follows from such a value is dropped: each rule therefore names the keys that it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from recipes.sections.model_folders import CONVERT, is_earlier
from rlinf_core import ConfigError, JobConfig, Report, RLinfError, RunnerConfig
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.runner import LOGGER_MODULES, METRICS_PORT_MODULES, RESUME_NEWEST, RunSettings
from rlinf_core.config.tree import Path
from rlinf_core.job.recipe import Fact
from rlinf_core.job.report import FindingPlace, is_given
from rlinf_core.node.stacks import install_spy, py_spy
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.suggest import quoted

# Enough for every divisor of a number up to 10^10, and fast for any number that a user may write.
_TRIED_DIVISORS: Final = 100_000
# Adam moves a weight by up to the learning rate in each step; weights are mostly below 0.1.
_LARGEST_RATE: Final = 0.05

WorldSizes: TypeAlias = Mapping[str, int | None]


def blame(config: BaseModel, *paths: Path) -> FindingPlace:
    """Return the first of `paths` that the user wrote, or the last one if all are defaults; a finding there covers all
    of them."""
    return FindingPlace(next((path for path in paths if is_given(config, path)), paths[-1]), paths)


def place_entry(cluster: ClusterConfig, *components: str) -> str:
    """Return an entry of `component_placement` for unplaced components, in the node group of the first placed one."""
    groups = [entry.node_group for entry in cluster.component_placement.values()]
    names = ",".join(components)
    return f"`{names}: {{node_group: {groups[0][0]}, placement: 0}}`" if groups and all(groups) else f"`{names}: 0`"


def check_sections(
    config: JobConfig,
    runner: RunnerConfig,
    facts: Mapping[str, Fact],
    components: tuple[str, ...],
    report: Report,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """Report inconsistent settings of the sections that every training recipe has.

    Args:
        config: the job.
        runner: the section `runner` of the job.
        facts: the facts of the recipe, which a resumed checkpoint must match.
        components: the components that the recipe requires.
        report: takes findings.
        optional: further components that the recipe may have.
    """
    check_components(config.cluster, config.recipe, components, report, optional)
    check_group_names(config, (*components, *optional), report)
    _check_training(config, report)
    check_loggers(runner, report)
    _check_profiler(runner, config.cluster, report)
    _check_folders(runner, config.recipe, report, facts)
    save_path = getattr(getattr(config, "actor", None), "checkpoint_save_path", None)
    if save_path is not None:
        _check_output(("actor", "checkpoint_save_path"), save_path, report)


def share_accelerators(config: Any, one: str, other: str) -> bool:
    """Return whether two placed components have a declared accelerator in common."""
    cluster = config.cluster
    nodes = cluster.num_nodes
    declared = {
        group.label: tuple(group.node_ranks.resolve(nodes))
        for group in cluster.node_groups or ()
        if group.accelerators is not None
    }
    if declared:
        # A component without a node group may use the accelerators of all nodes.
        declared.setdefault("cluster", tuple(range(nodes)))
    # Compared by nodes, since several labels may name the same nodes with other interpreters. None: all accelerators.
    used: list[list[tuple[tuple[int, ...], range | None]]] = []
    for name in (one, other):
        entry = cluster.component_placement[name]
        groups = [declared[label] for label in entry.node_group or ("cluster",) if label in declared]
        used.append([(ranks, part.resources) for ranks in groups for part in entry.placement.parts])
    return any(
        ranks == others and (mine is None or theirs is None or not set(mine).isdisjoint(theirs))
        for ranks, mine in used[0]
        for others, theirs in used[1]
    )


def check_components(
    cluster: ClusterConfig, recipe: str, components: tuple[str, ...], report: Report, optional: tuple[str, ...] = ()
) -> None:
    """Report required components that are not placed, and placed ones that are neither required nor optional."""
    at: Path = ("cluster", "component_placement")
    placed = cluster.component_placement
    missing = [component for component in components if component not in placed]
    for name in placed:
        if name in components or name in optional:
            continue
        from rlinf_core.suggest import did_you_mean

        listed = ", ".join(f"`{component}`" for component in (*components, *optional))
        report(
            (*at, name),
            "unused-component",
            f"recipe `{recipe}` has no component `{name}`: nothing would run there",
            did_you_mean(name, missing) or f"its components are {listed}",
            severity=Severity.WARNING,
        )
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        message = f"recipe `{recipe}` needs a placement for {names}"
        report(at, "missing-component", message, f"add {place_entry(cluster, *missing)}")


def _check_training(config: BaseModel, report: Report) -> None:
    """Report settings that prevent or hinder training: half precision, and extreme learning rates."""
    if _value(config, ("runner", "only_eval")):
        return
    _check_half_precision(config, report)
    optim: Path = ("actor", "optim")
    last, end = _value(config, ("runner", "last_step")), _value(config, (*optim, "total_training_steps"))
    falls = _value(config, (*optim, "lr_scheduler")) in ("linear", "cosine")
    no_rate = falls and _value(config, (*optim, "min_lr_ratio")) == 0
    if no_rate and isinstance(end, int) and isinstance(last, int) and end < last:
        report(
            (*optim, "total_training_steps"),
            "cannot-train",
            f"the learning rate is 0 after step {end}, and the run has {last}: {last - end} steps change nothing",
            "remove it, or write `actor.optim.min_lr_ratio: 0.1`",
            about=[("runner", "max_steps"), ("runner", "max_epochs"), (*optim, "min_lr_ratio")],
        )
    for section in (optim, ("critic",)):
        for name in ("lr", "value_lr"):
            rate = _value(config, (*section, name))
            if isinstance(rate, float) and rate > _LARGEST_RATE:
                report(
                    (*section, name),
                    "unusual-value",
                    f"`{name}: {rate:g}` lets each step move every weight by about {rate:g}",
                    "Adam's usual rates are 1e-6 to 1e-2",
                    severity=Severity.WARNING,
                )


def _check_half_precision(config: BaseModel, report: Report) -> None:
    """Report training in half precision: without loss scaling its gradients underflow."""
    precisions = ("actor", "fsdp_config", "mixed_precision")
    for key in (("actor", "model", "precision"), (*precisions, "param_dtype"), (*precisions, "reduce_dtype")):
        if _value(config, key) == "fp16":
            report.conflict(
                ".".join(key),
                f"training with `{key[-1]}: fp16` would lose gradients: those below 6e-8 underflow to 0, and the"
                " loss is not scaled",
                "write `bf16`, which has the range of fp32",
            )
            break


def _value(config: BaseModel, path: Path) -> object:
    """Return the value at `path`; None if a section above it is missing."""
    value: object = config
    for segment in path:
        value = getattr(value, str(segment), None)
    return value


def check_group_names(config: BaseModel, sections: tuple[str, ...], report: Report) -> None:
    """Report worker groups with the same name."""
    first: dict[str, str] = {}
    for section in sections:
        name: str = getattr(config, section).group_name
        earlier = first.setdefault(name, section)
        if earlier != section:
            report.conflict(
                f"{section}.group_name {earlier}.group_name",
                f"the groups of `{earlier}` and `{section}` are both called `{name}`",
                "give every worker group its own name, by `group_name`",
            )


def check_loggers(runner: RunSettings, report: Report) -> None:
    """Report logger backends whose packages are missing in this Python, which runs the driver."""
    for index, name in enumerate(runner.logger.logger_backends):
        missing = missing_modules(LOGGER_MODULES[name])
        if missing:
            report(
                ("runner", "logger", "logger_backends", index),
                "missing-extra",
                f"`logger_backends` names `{name}`, which needs {quoted(missing)}, {absence(missing[0])}",
                f"run `{install_command(*missing)}`, which is the extra `rlinf-cli[{name}]`,"
                " or remove it from the list: `metrics.jsonl` is always written",
            )

    missing = missing_modules(METRICS_PORT_MODULES) if runner.metrics_port is not None else ()
    if missing:
        report(
            ("runner", "metrics_port"),
            "missing-extra",
            f"`metrics_port` needs {quoted(missing)}, {absence(missing[0])}",
            f"run `{install_command(*missing)}`, which is the extra `rlinf-cli[prometheus]`, or remove it:"
            " `metrics.jsonl` is always written",
        )


def _check_profiler(runner: RunnerConfig, cluster: ClusterConfig, report: Report) -> None:
    """Report profiles of unplaced components or of steps that the run lacks, and a missing profiler."""
    profiler = runner.profiler
    if profiler is None:
        return
    placed = list(cluster.component_placement)
    for index, name in enumerate(profiler.components):
        if name not in placed:
            report(
                ("runner", "profiler", "components", index),
                "missing-component",
                f"`components` names `{name}`, which is not placed",
                f"the job places {quoted(placed)}",
            )
    last = runner.last_step
    if last is not None and profiler.first_step > last:
        report.conflict(
            "runner.profiler.first_step",
            f"`first_step: {profiler.first_step}` is after the last step of the run, {last}: nothing would be profiled",
            f"write {last} or less",
        )
    if profiler.kind == "py-spy" and py_spy() is None:
        report(
            ("runner", "profiler", "kind"),
            "missing-extra",
            "`kind: py-spy` needs py-spy, not installed in this Python",
            f"run `{install_spy()}`, or write `kind: torch`",
        )


def _check_folders(runner: RunnerConfig, recipe: str, report: Report, facts: Mapping[str, Fact]) -> None:
    """Report a checkpoint that cannot be resumed from, and a file at the path of the runs folder.

    Args:
        runner: section of the file.
        recipe: the recipe of the file.
        report: takes findings.
        facts: the facts of the recipe, which a resumed checkpoint must match.
    """
    from os.path import exists, isdir

    resume = runner.resume_dir
    if resume not in (None, RESUME_NEWEST) and not isdir(resume):
        report(
            ("runner", "resume_dir"),
            "unusable-path",
            f"`resume_dir` names `{resume}`, which {'is a file' if exists(resume) else 'does not exist'}",
            f"name a `global_step_N` folder, or write `{RESUME_NEWEST}` for the newest checkpoint of this experiment",
        )
    elif resume not in (None, RESUME_NEWEST):
        _check_checkpoint(resume, runner.logger.log_path, recipe, report, facts)
    check_log_path(runner, report)


def report_absent(at: Path, path: str, report: Report) -> None:
    """Warn of a path that does not exist here, as the configuration may be for another machine."""
    message = f"`{at[-1]}` names `{path}`, which does not exist on this machine"
    report(at, "unusable-path", message, severity=Severity.WARNING)


def report_unusable(at: Path, error: ConfigError, report: Report) -> None:
    """Report that the contents of a path cannot be used."""
    report(at, "unusable-path", f"{error.message}: {error.why}" if error.why else error.message, error.help)


def check_log_path(runner: RunSettings, report: Report) -> None:
    """Report a file where the folder of runs is to be."""
    _check_output(("runner", "logger", "log_path"), runner.logger.log_path, report)


def _check_output(at: Path, folder: str, report: Report) -> None:
    """Report a file where the run is to make a folder."""
    # These functions raise for no name, however malformed.
    from os.path import abspath, dirname, exists, isdir

    taken = abspath(folder)
    while not exists(taken) and dirname(taken) != taken:
        taken = dirname(taken)
    if not isdir(taken):
        report(
            at,
            "unusable-path",
            f"`{at[-1]}` must be a folder, but `{taken}` is a file",
            "name another folder; it is created if it does not exist",
        )


def _check_checkpoint(resume: str, log_path: str, recipe: str, report: Report, facts: Mapping[str, Fact]) -> None:
    """Report a checkpoint that is damaged, or of another recipe or other settings.

    Large files are read only when the run starts.
    """
    # Imported only for files that name a checkpoint: the import takes a moment.
    from pathlib import Path as FilePath

    from rlinf_core.runners.storage.resuming import damage_of_source, named_source, run_to_resume

    at: Path = ("runner", "resume_dir")
    try:
        source = named_source(FilePath(resume))
        if any(is_earlier(name) for name in source.manifest.files):
            report(at, "unusable-path", f"`{resume}`: its newest checkpoint was written by an earlier rlinf", CONVERT)
            return
        run_to_resume(source, FilePath(log_path).absolute(), recipe)
        source.check(facts)
        damaged = damage_of_source(FilePath(resume))
        if damaged:
            help = "copy the checkpoint again, or name the one that is to be used"
            report(at, "unusable-path", f"`{resume}`: {', and '.join(damaged)}", help, severity=Severity.WARNING)
    except RLinfError as error:
        reason = f"{error.message}: {error.why}" if error.why else error.message
        report(at, "unusable-path", f"`{resume}`: {reason}", error.help or "name another folder")


def near_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of `value`: `96 or 128`."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def near_divisors(value: int, wanted: int) -> str:
    """Return the divisors of `value` on both sides of `wanted`: `640 or 800`.

    Above 10^10 some divisors are unknown, so that the result may not be the nearest.
    """
    below = [number for number in divisors(value) if number < wanted]
    above = [number for number in divisors(value) if number > wanted]
    return " or ".join(str(number) for number in (*below[-1:], *above[:1]))


def divisors(value: int) -> list[int]:
    """Return the divisors of a number in ascending order; above 10^10, only some of them."""
    small = [number for number in range(1, min(isqrt(value), _TRIED_DIVISORS) + 1) if value % number == 0]
    return sorted({*small, *(value // number for number in small)})
