"""The options and arguments that several commands share, and their shell completions.

A shell appends a space to a sole candidate. Therefore a folder or section is offered together with its contents, and a
sole key with an example value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.command import arg, opt
from rlinf_core import env_vars

if TYPE_CHECKING:
    from rlinf_core.job.load import Job

Complete = Callable[[typer.Context, str], list[str]]

_YAML = (".yaml", ".yml")


def _careful(complete: Complete) -> Complete:
    """Return a completion that offers nothing on errors: a traceback would appear in the line being typed."""

    @wraps(complete)
    def wrapper(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            return complete(ctx, incomplete)
        except Exception:  # noqa: BLE001 - see above; the command itself will report the error
            return []

    return wrapper


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


@_careful
def recipes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the installed recipes."""
    from rlinf_core.job.find_recipe import recipe_names

    return _starting(recipe_names(), incomplete)


@_careful
def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the diagnostic codes, and the fields of the file section by section."""
    from rlinf_cli.codes import code_names
    from rlinf_cli.job.completion import documented_fields

    fields = documented_fields(incomplete, ctx.params.get("recipe"))
    return [*_starting(code_names(), incomplete), *fields]


@_careful
def files(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of shipped configs, and YAML files."""
    from rlinf_core.config.shipped import shipped_configs

    return [*_starting(shipped_configs(), incomplete), *_paths(incomplete)]


@_careful
def yaml_paths(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return YAML files and folders."""
    return _paths(incomplete)


@_careful
def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the keys of the file's model, and values after a key."""
    job = _job(ctx)
    if job is None:
        return []
    from rlinf_cli.job.completion import override_candidates

    return _values(ctx, job, incomplete) or override_candidates(job, incomplete)


@_careful
def files_and_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return files and, after the first file, overrides."""
    job = _job(ctx)
    values = _values(ctx, job, incomplete) if job is not None else []
    return values or [*overrides(ctx, incomplete), *files(ctx, incomplete)]


@_careful
def training(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return recipes, also as `recipe=NAME`, files and, after one of these, overrides."""
    from rlinf_core.job.find_recipe import recipe_names

    if _named(_words(ctx)) is not None:
        return files_and_overrides(ctx, incomplete)
    if ctx.params.get("arguments") or _words(ctx):
        # Bash splits `recipe=NAME` into words; the last one is the name so far.
        return _starting(recipe_names(), incomplete) if "recipe" in _words(ctx) else overrides(ctx, incomplete)
    names = [*recipe_names(), *(f"recipe={name}" for name in recipe_names())]
    return [*_starting(names, incomplete), *files(ctx, incomplete)]


@_careful
def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the run folders, newest first."""
    from rlinf_cli.runs.run_lookup import all_runs

    names = [folder.path.name for folder in sorted(all_runs(), key=lambda folder: -folder.state.created)]
    return [name for name in names if name.startswith(incomplete)]


@_careful
def runs_and_components(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the run folders, and the components with logs in the named or newest run."""
    from rlinf_cli.runs.logs import log_files
    from rlinf_cli.runs.run_lookup import find_run, run_at

    names = runs(ctx, incomplete)
    named = next((folder for word in _words(ctx) if (folder := run_at(word)) is not None), None)
    folder = named or find_run(None, ask=False)
    return [*names, *_starting({file.component for file in log_files(folder.logs)}, incomplete)]


def _values(ctx: typer.Context, job: Job, incomplete: str) -> list[str]:
    """Return the values of the preceding key if the shell split `key=value` into words, as Bash does.

    Typer drops a `=` that is the last word.
    """
    from rlinf_cli.job.completion import override_candidates

    before = _words(ctx)
    if len(before) < 2:
        return []
    key = before[-2] if before[-1] == "=" else before[-1]
    return override_candidates(job, f"{key}={incomplete}", values_only=True)


@_careful
def assumptions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the node groups of the file in the form of `--assume`."""
    job = _job(ctx)
    groups = job.cluster.node_groups if job is not None and job.cluster is not None else ()
    candidates = [
        f"{group.label}={count}" for group in groups if group.hardware is None for count in ("8", "4") if group.label
    ]
    return _starting(candidates, incomplete)


@_careful
def components(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the components that the file places."""
    job = _job(ctx)
    placed = job.cluster.component_placement if job is not None and job.cluster is not None else ()
    return _starting(placed, incomplete)


def _words(ctx: typer.Context) -> list[str]:
    """Return the positional arguments typed so far."""
    words: list[str] = []
    for name in ("file", "arguments", "overrides", "words"):
        argument = ctx.params.get(name)
        words.extend([argument] if isinstance(argument, str) else argument or [])
    # After an option that still needs its value, Typer has not parsed the arguments yet.
    return words or [word for word in ctx.args if not word.startswith("-")]


def _job(ctx: typer.Context) -> Job | None:
    """Return the job of the file on the command line; None without one."""
    named = _named(_words(ctx))
    if named is None:
        return None
    from rlinf_cli.job.job_file import as_recipe
    from rlinf_core.job.load import load_job

    return load_job(as_recipe(named))


def _named(words: list[str]) -> str | None:
    """Return the file among arguments, or `recipe=NAME` if they name a recipe."""
    from rlinf_cli.job.job_file import is_override

    named = next((word for word in words if word != "-" and not is_override(word)), None)
    recipe = next((word.partition("=")[2] for word in words if word.startswith("recipe=")), None)
    # Bash splits `recipe=NAME` into three words.
    if recipe is None and words[:2] == ["recipe", "="] and len(words) > 2:
        recipe = words[2]
    if recipe:
        return f"recipe={recipe}"
    return None if named == "recipe" else named


def _paths(incomplete: str) -> list[str]:
    """Return YAML files and folders; a sole folder is expanded."""
    folder, stem = os.path.split(incomplete)
    completions: list[str] = []
    with os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in entries:
            hidden = entry.name.startswith(".") and not stem.startswith(".")
            if entry.name.startswith(stem) and not hidden and (entry.is_dir() or entry.name.endswith(_YAML)):
                completions.append(os.path.join(folder, entry.name) + ("/" if entry.is_dir() else ""))
    if len(completions) == 1 and completions[0].endswith("/"):
        return [completions[0], *_paths(completions[0])]
    return sorted(completions)


File = Annotated[str, arg("FILE", files)]
FileIfAny = Annotated[str | None, arg("FILE", files)]
FileOrRun = Annotated[str, arg("FILE|RUN", files)]
Training = Annotated[list[str] | None, arg("FILE|RECIPE", training)]
Overrides = Annotated[list[str] | None, arg("KEY=VALUE", overrides)]
Run = Annotated[str | None, arg("RUN", runs)]
Runs = Annotated[list[str] | None, arg("RUN...", runs)]
Processes = Annotated[list[str] | None, arg("RUN|COMPONENT[:RANK]", runs_and_components)]
Out = Annotated[Path | None, opt("-o FILE", "Output file.")]
Assume = Annotated[
    list[str] | None,
    opt(
        "--assume [GROUP=]N[xMODEL]",
        "Assume this many accelerators on each node of a group: `a800=8`, or `8` for all nodes. May be repeated.",
        autocompletion=assumptions,
    ),
]
Live = Annotated[bool, opt("--live", "Probe the nodes over ssh and use what they report. Starts nothing.")]
Checkpoint = Annotated[str | None, opt("--checkpoint N|PATH", "Checkpoint, or its step; by default the newest of RUN.")]
Recipe = Annotated[str | None, opt("--recipe NAME", "Only of this recipe.", autocompletion=recipes)]
Name = Annotated[str | None, opt("--name NAME", "Name of the cluster; by default the file's, else the only one.")]
Parallel = Annotated[int, opt("--parallel N", "Nodes contacted at the same time.", min=1)]
DryRun = Annotated[bool, opt("--dry-run", "Validate, show what would run, start nothing.")]
NoWait = Annotated[
    bool, opt("--no-wait", "End with exit status 3 if another job holds an accelerator or a robot of this one.")
]
Share = Annotated[bool, opt("--share", "Use accelerators that another job holds, too, without waiting.")]
Detach = Annotated[bool, opt("--detach -d", "Run in the background and return.")]


def choose_claims(*, no_wait: bool, share: bool) -> None:
    """Set what this process's job does if another job holds its devices; by default the environment decides."""
    if no_wait or share:
        os.environ[env_vars.CLAIMS.name] = "no-wait" if no_wait else "share"


def assumed(assume: Iterable[str] | None) -> list[str]:
    """Return the `--assume` options of the command line."""
    return [word for assumption in assume or () for word in ("--assume", assumption)]
