"""The loading of a command's job file, with the findings that only commands report."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from rlinf_cli import console
from rlinf_cli.interrupts import ExitCode
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import quoted

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
    from rlinf_core.config.sections.cluster import ClusterConfig
    from rlinf_core.config.tree import MappingNode, Path
    from rlinf_core.job.load import Job, Probe
    from rlinf_core.job.recipe import Recipe
    from rlinf_core.topology import ClusterTopology


# The prefix of `recipe=NAME`, which replaces a file.
_RECIPE = "recipe="
# A cheap test of the source, before the tree is searched for integers with leading zeros.
_LIKELY = re.compile(r"(?<![\w.])0[0-9]")
_LEADING_ZERO = re.compile(r"[-+]?0+[0-9]+", re.ASCII)
# Codes of findings about referenced files that are missing, or unreadable without a package.
_ABOUT_FILES: Final = frozenset({"hub-name", "missing-extra", "missing-key", "unusable-path"})


def is_override(argument: str) -> bool:
    """Return whether an argument is `key=value`, `~key` or `+key=value`, and not a file name.

    A file whose name contains `=` is given with its folder, as in `./a=b.yaml`.
    """
    if argument.startswith(("~", "+")):
        return not argument.startswith(("~/", "+/"))
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key


def split_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the files and the overrides of `FILE... [KEY=VALUE]...`, each in the order given.

    Without a file, `recipe=NAME` takes its place; see `file_of_recipe`.
    """
    files = [argument for argument in arguments if not is_override(argument)]
    overrides = [argument for argument in arguments if is_override(argument)]
    recipes = [argument for argument in overrides if argument.startswith(_RECIPE)]
    if files or not recipes:
        return files, overrides
    return recipes[-1:], [argument for argument in overrides if argument not in recipes]


def as_recipe(name: str) -> str:
    """Return `recipe=NAME` for the bare name of a recipe, and other names unchanged."""
    from rlinf_core.config.shipped import is_bare_name, shipped_config

    if not is_bare_name(name) or is_override(name) or os.path.isfile(name) or shipped_config(name) is not None:
        return name
    from rlinf_core.job.find_recipe import recipe_names

    return f"{_RECIPE}{name}" if name in recipe_names() else name


def file_of_recipe(name: str, overrides: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the file that a job's name means, with the overrides.

    A recipe, as `NAME` or `recipe=NAME`, means its default config. Former names of shipped configurations become the
    current ones. Other names are unchanged, and so is `recipe=NAME` if the recipe's config is not a file.

    Raises:
        ConfigError: there is no such recipe.
    """
    from rlinf_core.config.shipped import current_name

    if now := current_name(name):
        console.warn(f"the config `{name}` is now `{now}`")
        return now, overrides
    name = as_recipe(name)
    if not name.startswith(_RECIPE):
        return name, overrides
    from rlinf_core.job.find_recipe import started_recipe

    start = started_recipe(name.removeprefix(_RECIPE), overrides).default_config
    # The override also selects the recipe, since recipes may share a default config.
    return (name, overrides) if "\n" in start else (start, [name, *overrides])


def load(
    name: str,
    overrides: Sequence[str] | None = None,
    assume: Sequence[str] | None = None,
    *,
    probe: Probe | None = None,
    stdin: bytes | None = None,
) -> Job:
    """Return the job of a file, with all findings.

    `probe` probes the hardware of its nodes; `stdin` is the text already read from standard input.

    Raises:
        ConfigError: `recipe=NAME` names no recipe.
        ClusterError: a node cannot be probed.
    """
    if name == "-" and stdin is None and sys.stdin is not None and sys.stdin.isatty():  # None: the caller closed it
        console.message("reading standard input; end it with Ctrl-D")
    file, changes = file_of_recipe(name, overrides or ())
    return load_with_lint(file, changes, assume=assume or (), environ=os.environ, probe=probe, stdin=stdin)


def load_with_lint(
    name: str,
    overrides: Sequence[str] = (),
    *,
    assume: Sequence[str] = (),
    stdin: bytes | None = None,
    environ: Mapping[str, str] | None = None,
    probe: Probe | None = None,
) -> Job:
    """Return the result of `load_job` with the findings that only commands report."""
    from rlinf_cli.job import machine_rules, no_effect, placement_rules
    from rlinf_core.job.load import load_job

    rules = (machine_rules.check,)
    job = load_job(name, overrides, assume=assume, stdin=stdin, environ=environ, probe=probe, rules=rules)
    if job.tree is not None and job.tree.entry("recipe") is None:
        _note_unchecked(job.tree, job.diagnostics)
    job.diagnostics.extend(_leading_zeros(job))
    job.diagnostics.extend(placement_rules.lint(job))
    no_effect.report_no_effect(job)
    return job


def _note_unchecked(tree: MappingNode, diagnostics: Diagnostics) -> None:
    from rlinf_core.config.validating.key_findings import foreign_character, unknown_key
    from rlinf_core.job.load import ClusterFile

    # Indentation by no-break spaces puts keys of `cluster` at the top of the file.
    strange = {entry.key.raw for entry in tree.entries if foreign_character(entry.key.raw)}
    diagnostics.extend(unknown_key(ClusterFile, tree, (key,)) for key in strange)
    others = [entry for entry in tree.entries if entry.key.raw not in {"cluster", *strange}]
    if others:
        from rlinf_core.config.diagnostics import Diagnostic, Severity

        names = quoted(entry.key.raw for entry in others)
        first = others[0].key
        help_text = "add `recipe: NAME`; `rlinf train` lists the names"
        if tree.entry("defaults") is not None:
            help_text += "; name bases with `extends: FILE`, not `defaults`"
        message = f"without `recipe` only `cluster` is checked, not {names}"
        finding = Diagnostic("section-not-checked", Severity.NOTE, message, first.span, (first.raw,), help_text)
        diagnostics.add(finding)


def _leading_zeros(job: Job) -> Iterator[Diagnostic]:
    """Yield warnings about integers such as `010`, which is ten in YAML 1.2 and eight in YAML 1.1."""
    view = job.view
    if view is None or not any(_LIKELY.search(source.text) for source in job.sources):
        return
    from rlinf_core.config.diagnostics import Diagnostic, Severity
    from rlinf_core.config.tree import scalars
    from rlinf_core.config.validating.model_fields import types_at
    from rlinf_core.job.load import ClusterFile

    model = ClusterFile if job.recipe is None else job.recipe.config_model()
    for path, scalar in scalars(view.tree):
        is_octal = type(scalar.value) is int and _LEADING_ZERO.fullmatch(scalar.raw)
        if is_octal and int in types_at(model, path):
            message = f"`{scalar.raw}` is read as {scalar.value}; other YAML loaders read it as octal"
            help = f"write `{scalar.value}`"
            where = view.original(path)
            yield Diagnostic("leading-zero", Severity.WARNING, message, scalar.span, where, help)


class SoundJob(NamedTuple):
    """A job without errors; none of its parts is None.

    Attributes:
        name: its display name.
        files: the file and its bases; empty for standard input without a base.
        tree: the composed configuration, including secrets.
        secret: the paths of values that must not be printed, besides those with secret-looking keys.
        model: the recipe's model of the file or, without a recipe, a model of its cluster section alone.
        recipe: the selected recipe, or None.
    """

    name: str
    files: tuple[str, ...]
    tree: MappingNode
    secret: frozenset[Path]
    model: BaseModel
    cluster: ClusterConfig
    topology: ClusterTopology
    recipe: Recipe | None = None


def load_sound(
    name: str,
    overrides: Sequence[str] | None = None,
    assume: Sequence[str] | None = None,
    *,
    probe: Probe | None = None,
    packages: bool = True,
) -> SoundJob:
    """Return a job without errors; warnings and notes are left to `rlinf validate`.

    Missing data and checkpoints are no errors here (see `viewed`), and without `packages` missing packages are none,
    either.

    Raises:
        typer.Exit: the job has errors, which are printed on standard error.
        ClusterError: with `probe`, a node cannot be probed.
    """
    job = viewed(load(name, overrides, assume, probe=probe))
    return sound(job if packages else _without(job, lambda finding: finding.code == "missing-extra"))


def viewed(job: Job) -> Job:
    """Return a job without findings about its training data and its first checkpoint, for commands that only view
    it."""
    return without_start(without_training_data(job))


def as_recorded(job: Job) -> Job:
    """Return the job of a finished run for viewing.

    Besides those of `viewed`, findings about packages, which may be on other machines, and about assumptions for groups
    that the run lacks are removed.
    """
    return _without(viewed(job), lambda finding: finding.code in {"missing-extra", "bad-assumption"})


def without_training_data(job: Job) -> Job:
    """Return a job without findings about training and its data, which may have moved or not exist yet."""
    keys = () if job.recipe is None else tuple(tuple(key.split(".")) for key in job.recipe.training_data)
    return _without(
        job,
        lambda finding: (
            finding.code == "cannot-train"
            or (finding.code in _ABOUT_FILES and any(finding.path[: len(key)] == key for key in keys))
        ),
    )


def without_start(job: Job) -> Job:
    """Return a job without findings about the checkpoints that it began from, which may have been pruned."""
    begun = {("runner", "resume_dir"), ("actor", "checkpoint_load_path")}
    return _without(job, lambda finding: finding.code == "unusable-path" and finding.path in begun)


def _without(job: Job, unwanted: Callable[[Diagnostic], bool]) -> Job:
    """Return a job without some of its findings."""
    from rlinf_core.config.diagnostics import Diagnostics

    kept = Diagnostics()
    kept.extend(finding for finding in job.diagnostics if not unwanted(finding))
    return job._replace(diagnostics=kept)


def sound(job: Job) -> SoundJob:
    """Return a job as a `SoundJob`.

    Raises:
        typer.Exit: the job has errors, which are printed on standard error.
    """
    from rlinf_core.job.load import ClusterFile

    if job.ok and job.tree is not None and job.cluster is not None and job.topology is not None:
        model = job.config or ClusterFile.model_construct(cluster=job.cluster)
        files = tuple(source.name for source in job.sources if source.kind == "file")
        return SoundJob(job.name, files, job.tree, job.secret, model, job.cluster, job.topology, job.recipe)
    from rlinf_core.config.diagnostics import Severity

    show_findings(job, Severity.ERROR)
    raise typer.Exit(ExitCode.INVALID)


def refuse_secrets(overrides: Iterable[str], keeper: str) -> None:
    """Refuse overrides of secrets, since `keeper` keeps the command line.

    Raises:
        ConfigError: an override sets a secret.
    """
    from rlinf_core.config.secrets import mask_text

    for override in overrides:
        if mask_text(override) != override:
            key = override.partition("=")[0]
            what = f"`{key}` is a secret, and {keeper} keeps the command line"
            raise ConfigError(
                what, where=f"{key}=...", help="write `${env:NAME}` in the file, and set the variable NAME"
            )


def check_apart(file: FilePath | None, inputs: Iterable[str], option: str) -> None:
    """Check that an output file is not part of the configuration.

    Raises:
        typer.BadParameter: `file`, the value of `option`, is one of the inputs.
    """
    if file is not None and file.exists() and any(os.path.exists(name) and file.samefile(name) for name in inputs):
        message = f"`{file}` is part of the configuration; name another file"
        raise typer.BadParameter(message, param_hint=f"'{option}'")


def show_findings(job: Job, severity: Severity) -> None:
    """Print the findings of one severity on standard error."""
    from rlinf_cli.job.findings import finding_blocks

    selected = [diagnostic for diagnostic in job.diagnostics if diagnostic.severity is severity]
    if selected:
        console.error("\n\n".join(finding_blocks(selected, sys.stderr)))
