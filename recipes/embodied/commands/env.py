"""`rlinf env`: virtual environments for simulators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import help_examples

LIST_SCHEMA = "rlinf.env-list/1"
SETUP_SCHEMA = "rlinf.env-setup/1"
CHECK_SCHEMA = "rlinf.env-check/1"

app = typer.Typer(
    help="Make virtual environments for simulators, each with its own package versions, and check them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    rich_help_panel="Cluster",
)

EnvType = Annotated[str, typer.Argument(metavar="ENV", help="Kind of environment, as `env_type` names it.")]
Folder = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Folder to create. Default: ~/.rlinf/envs/ENV.", show_default=False),
]


@app.command("list", epilog=help_examples("rlinf env list"))
def list_(output: OutputOption = Output.TEXT, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the simulators that get their own interpreter."""
    from recipes.embodied.envs.simulators.package_versions import LOCKS
    from recipes.embodied.interpreters.locked_venvs import DEFAULT_FOLDER, simulators

    records = [
        {
            "env_type": name,
            "what": (LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines()[0].removeprefix("# "),
            "python": str(python) if (python := (DEFAULT_FOLDER / name / "bin/python").expanduser()).exists() else None,
        }
        for name in simulators()
    ]
    if output is Output.JSON:
        console.result_json({"schema": LIST_SCHEMA, "simulators": records})
        return
    rows = [
        (str(simulator["env_type"]), simulator["python"] or "not made", str(simulator["what"])) for simulator in records
    ]
    console.result(console.table(("env_type", "interpreter", "what"), rows, keep=(0, 1)))
    console.message("\n`rlinf env setup ENV` makes one.")


@app.command("setup", epilog=help_examples("rlinf env setup metaworld"), no_args_is_help=True)
def setup(
    env: EnvType,
    path: Folder = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Create a virtual environment with a simulator, test it, and print the configuration that uses it.

    Installs the package versions that rlinf was tested with, using uv if available, else pip, and this rlinf itself.
    Run it on every machine where `env` is placed.
    """
    from recipes.embodied.envs.faults.fault_lines import RENDERING_HELP
    from recipes.embodied.interpreters.locked_venvs import lines_of
    from recipes.embodied.interpreters.locked_venvs import setup as make

    made = make(env, path, console.message)
    facts = made.facts
    if output is Output.JSON:
        console.result_json({"schema": SETUP_SCHEMA, "env_type": env, "python": str(made.python), "facts": facts})
        return
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    console.message(f"Python {facts['python']}, {versions}: {facts['states']} states, {facts['actions']} actions")
    if made.renderer is None:
        console.error_block(
            "it renders no images: only states can be observed",
            why=facts["frame_fault"]["message"],
            do=RENDERING_HELP,
        )
    else:
        console.message(f"a frame was rendered with MUJOCO_GL={made.renderer}")
    console.result(lines_of(made))


@app.command("check", epilog=help_examples("rlinf env check libero"), no_args_is_help=True)
def check(
    env: EnvType,
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK]...", help="Tasks or sets of tasks. Default: all.")
    ] = None,
    starts: Annotated[
        int, typer.Option("--starts", metavar="N", min=1, help="Starts of each task, spread over its list.")
    ] = 3,
    path: Annotated[
        Path | None,
        typer.Option(
            "--path", metavar="DIR", help="Folder of the interpreter. Default: ~/.rlinf/envs/ENV.", show_default=False
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check that the stored starts of a simulator's tasks hold under its physics, by the tasks' own predicates.

    Starts that were stored under other versions of a simulator may not come to rest as they were: success rates from
    them compare with nobody's. Exits with 1 if one does not hold.
    """
    from recipes.embodied.interpreters.locked_venvs import DEFAULT_FOLDER
    from recipes.embodied.interpreters.start_check import check_starts, require_stored_starts
    from rlinf_cli.exit_codes import ExitCode

    require_stored_starts(env)
    folder = (path or DEFAULT_FOLDER / env).expanduser().absolute()
    records = check_starts(env, folder / "bin/python", tasks or (), starts, console.message)
    faults = [(record["task"], *fault) for record in records for fault in record["faults"]]
    if output is Output.JSON:
        console.result_json({"schema": CHECK_SCHEMA, "env_type": env, "tasks": records})
    else:
        rows: list[tuple[str, ...]] = []
        for name in dict.fromkeys(record["set"] for record in records):
            own = [record for record in records if record["set"] == name]
            broken = sum(len({start for start, _ in record["faults"]}) for record in own)
            tried, seconds = sum(len(record["starts"]) for record in own), sum(record["seconds"] for record in own)
            rows.append((name, str(len(own)), str(tried), str(tried - broken), f"{seconds:.0f}"))
        console.result(console.table(("tasks", "number", "starts", "hold", "seconds"), rows, keep=(0, 1, 2, 3, 4)))
        for task, start, fault in faults:
            console.result(f"{task}, start {start}: {fault}")
        console.message(", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()))
    if faults:
        raise typer.Exit(ExitCode.FAILED)
