"""`rlinf venv`: virtual environments for simulators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rlinf_cli import console
from rlinf_cli.command import Result, arg, command, group, opt
from rlinf_cli.interrupts import ExitCode

LIST_SCHEMA = "rlinf.env-list/1"
SETUP_SCHEMA = "rlinf.env-setup/1"
CHECK_SCHEMA = "rlinf.env-check/1"

app = group("Make virtual environments for simulators, and check them.", heading="Machines")

EnvType = Annotated[str, arg("ENV")]
Folder = Annotated[Path | None, opt("--path DIR", "Folder of it. Default: ~/.rlinf/envs/ENV.")]


@command("rlinf venv list", app=app, name="list")
def list_() -> Result:
    """List the simulators that get their own interpreter."""
    from recipes.embodied.envs.simulators.packages import LOCKS
    from recipes.embodied.interpreters.locked_venvs import DEFAULT_FOLDER, simulators

    records = [
        {
            "env_type": name,
            "what": (LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines()[0].removeprefix("# "),
            "python": str(python) if (python := (DEFAULT_FOLDER / name / "bin/python").expanduser()).exists() else None,
        }
        for name in simulators()
    ]
    rows = [
        (str(simulator["env_type"]), simulator["python"] or "not made", str(simulator["what"])) for simulator in records
    ]
    return Result(
        lambda: console.table(("env_type", "interpreter", "what"), rows, keep=(0, 1)),
        {"schema": LIST_SCHEMA, "simulators": records},
        notes=("\n`rlinf venv setup ENV` makes one.",),
    )


@command("rlinf venv setup metaworld", app=app)
def setup(
    env: EnvType,
    path: Folder = None,
) -> Result:
    """Make a virtual environment with a simulator, and test it.

    ENV is the kind of environment, as `env_type` names it; the configuration that uses it is printed. Installs the
    package versions that rlinf was tested with, using uv if available, else pip, and this rlinf itself. Run it on every
    machine where `env` is placed.
    """
    from recipes.embodied.envs.repeating import RENDERING_HELP
    from recipes.embodied.interpreters.locked_venvs import lines_of
    from recipes.embodied.interpreters.locked_venvs import setup as make

    made = make(env, path, console.message)
    facts = made.facts
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
    record = {"schema": SETUP_SCHEMA, "env_type": env, "python": str(made.python), "facts": facts}
    return Result(lines_of(made), record)


@command("rlinf venv check libero", app=app)
def check(
    env: EnvType,
    tasks: Annotated[list[str] | None, arg("TASK...")] = None,
    starts: Annotated[int, opt("--starts N", "Starts of each task, spread over its list.", min=1)] = 3,
    path: Folder = None,
) -> Result:
    """Check that the stored starts of a simulator's tasks hold.

    They are judged by the tasks' own predicates, under its physics; TASK... are tasks or sets of tasks, by default all.
    ENV is the kind of environment, as `env_type` names it. Starts that were stored under other versions of a simulator
    may not come to rest as they were: success rates from them compare with nobody's. Exits with 1 if one does not hold.
    """
    from recipes.embodied.interpreters.locked_venvs import DEFAULT_FOLDER
    from recipes.embodied.interpreters.start_check import check_starts, require_stored_starts

    require_stored_starts(env)
    folder = (path or DEFAULT_FOLDER / env).expanduser().absolute()
    records = check_starts(env, folder / "bin/python", tasks or (), starts, console.message)
    faults = [(record["task"], *fault) for record in records for fault in record["faults"]]

    def text() -> str:
        rows: list[tuple[str, ...]] = []
        for name in dict.fromkeys(record["set"] for record in records):
            own = [record for record in records if record["set"] == name]
            broken = sum(len({start for start, _ in record["faults"]}) for record in own)
            tried, seconds = sum(len(record["starts"]) for record in own), sum(record["seconds"] for record in own)
            rows.append((name, str(len(own)), str(tried), str(tried - broken), f"{seconds:.0f}"))
        table = console.table(("tasks", "number", "starts", "hold", "seconds"), rows, keep=(0, 1, 2, 3, 4))
        return "\n".join([table, *(f"{task}, start {start}: {fault}" for task, start, fault in faults)])

    return Result(
        text,
        {"schema": CHECK_SCHEMA, "env_type": env, "tasks": records},
        ExitCode.FAILED if faults else ExitCode.OK,
        (", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()),),
    )
