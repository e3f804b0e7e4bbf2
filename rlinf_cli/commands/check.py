"""Commands that check and explain a file, without connecting to a machine, and the one that writes a first one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments import options
from rlinf_cli.arguments.options import Assume, Live, Recipe
from rlinf_cli.command import Result, arg, command, opt
from rlinf_cli.projects.project_files import ProjectKind


@command("rlinf validate job.yaml", "rlinf validate hetero18 actor.seed=7", "rlinf validate *.yaml --github")
def validate(
    arguments: Annotated[list[str], arg("FILE|KEY=VALUE", options.files_and_overrides)],
    github: Annotated[bool, opt("--github", "Print the findings as annotations of GitHub.")] = False,
    assume: Assume = None,
    live: Live = False,
) -> Result:
    """Report every error in a file; --live asks its nodes, too.

    FILE is a path, the name of a shipped config such as `hetero18`, or `-` for standard input; several are checked one
    after another. A recipe's name alone checks the recipe's own config. KEY=VALUE replaces a value, as in
    `actor.seed=7`, and ~KEY deletes one.
    """
    from rlinf_cli.cluster.probing import prober
    from rlinf_cli.job.findings import validated
    from rlinf_cli.job.job_file import load, split_files

    files, overrides = split_files(arguments)
    if not files:
        raise typer.BadParameter("name a file to check, or `-` for standard input")
    if files.count("-") > 1:
        raise typer.BadParameter("standard input can be read only once")
    reports = [
        (file, load(file, overrides, assume, probe=prober(file, assume, live=live)).diagnostics) for file in files
    ]
    return validated(reports, github=github)


@command(
    "rlinf explain unknown-key",
    "rlinf explain cluster.node_groups.label",
    "rlinf explain --schema > rlinf.schema.json",
)
def explain(
    topic: Annotated[str | None, arg("CODE|KEY", options.topics)] = None,
    schema: Annotated[bool, opt("--schema", "Print the JSON Schema of job files, for editors.")] = False,
    recipe: Recipe = None,
) -> Result:
    """Explain a diagnostic code, or a key of the file.

    CODE is the word in brackets of a finding, as in `rlinf explain unknown-key`; KEY is a path such as
    `cluster.node_groups.label`. Without either, all codes are listed. A file whose first line is
    `# yaml-language-server: $schema=rlinf.schema.json` is completed by editors from the schema.
    """
    from rlinf_cli.job import explained

    if schema:
        return explained.schema(recipe)
    return explained.codes() if topic is None else explained.topic(topic, recipe)


@command("rlinf init env cart", "rlinf init env --gymnasium cart", "rlinf init lab --name grasping ~/grasping")
def init(
    kind: Annotated[ProjectKind, arg("env|model|reward|recipe|lab")],
    folder: Annotated[Path, arg("FOLDER")] = Path(),
    name: Annotated[
        str | None,
        opt(
            "--name NAME",
            "Name of its Python module, of a lab its package. Default: my_env, my_model, my_reward, my_recipe, or"
            " my_lab.",
        ),
    ] = None,
    gymnasium: Annotated[bool, opt("--gymnasium", "Write an environment of Gymnasium, with kind env.")] = False,
) -> Result:
    """Write a small project of your own, with a test.

    A module, a job file, a test and a README. The module is an environment, a model, a reward function or a recipe, as
    KIND says; a lab has all of them. FOLDER is the current folder by default. No file is overwritten: where one is in
    the way, nothing is written.
    """
    from rlinf_cli.projects.project_files import next_commands, project_files, write_project

    files = project_files(kind, name, gymnasium=gymnasium)
    write_project(folder, files)
    commands = next_commands(files)
    record = {
        "schema": "rlinf.init/1",
        "kind": kind,
        "folder": str(folder.absolute()),
        "files": [str(path) for path in files],
        "next": commands,
    }
    following = "\n".join(["", f"next, in {folder.absolute()}:", *(f"  {line}" for line in commands)])
    return Result("\n".join(str(folder / path) for path in files), record, notes=(following,))
