"""`make chaos`: inject faults by seed into runs of a job, and check that each run recovers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli import console
from rlinf_cli.command import Result, arg, command, opt
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.job.job_file import SoundJob, load, sound, split_files
from rlinf_cli.main import guarded
from rlinf_cli.run.starting import check_has_program, check_installed
from rlinf_core.errors import ConfigError
from rlinf_core.runners.storage.resuming import config_id, values_of
from rlinf_core.runners.storage.run_folder import config_text_of
from tests.chaos.campaign import ChaosJob, line_of, prepare_folder, record_of, table_of, work
from tests.chaos.fault_table import chosen_faults
from tests.chaos.judge import GOOD
from tests.chaos.strike_plan import plan_of


@command(
    "python -m tests.chaos embodied/pick-laptop runner.max_steps=20 runner.save_interval=3",
    "python -m tests.chaos math/sums-laptop runner.max_steps=12 --seeds 10 --fault kill",
    "python -m tests.chaos embodied/pick-laptop runner.max_steps=20 --first-seed 7 --seeds 1 --keep",
)
def app(
    arguments: Annotated[list[str], arg("FILE|RECIPE")],
    seeds: Annotated[int, opt("--seeds N", "Number of runs, one for each seed.", min=1)] = 3,
    first_seed: Annotated[int, opt("--first-seed K", "The first seed; a run is replayed by its own.", min=0)] = 0,
    faults: Annotated[
        list[str] | None,
        opt("--fault NAME", "Draw from these faults, as `kill-worker`, or `kill` for all that begin so. Default: all."),
    ] = None,
    most: Annotated[int, opt("--most N", "Largest number of faults in one run.", min=1)] = 3,
    deadline: Annotated[
        float | None,
        opt(
            "--deadline SECONDS",
            "Time without a step, an event or a line after which a run is hung. Default: by the undisturbed runs.",
            min=1.0,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        opt(
            "--folder FOLDER",
            "Folder for the runs; name an earlier one to reuse its undisturbed runs. Default: a new one in the"
            " folder of runs.",
        ),
    ] = None,
    keep: Annotated[bool, opt("--keep", "Keep the folders of good runs.")] = False,
    dry_run: Annotated[bool, opt("--dry-run", "List the faults of each seed, start nothing.")] = False,
) -> Result:
    """Inject faults into runs of a file, and check that each run recovers or names the fault.

    FILE and KEY=VALUE are as for `rlinf train`; the file must limit the steps. The job runs twice undisturbed (once
    where rollouts run ahead of training), on this machine alone, then once for each seed: processes of that run are
    killed or stopped, a checkpoint is damaged, files cannot be written. Where both undisturbed runs have the same
    weights, a disturbed one must have them, too. Only processes of runs that this command has started are touched; jobs
    with robots are refused. The exit code is 1 where a run ended wrong, hung, or did not say why; its folder is kept.
    """
    job, log_path = _job(arguments, faults or [], most, deadline, keep=keep)
    numbers = range(first_seed, first_seed + seeds)
    if dry_run:
        return _listed(job, numbers)
    place = (folder or log_path / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    prepare_folder(place)
    console.message(f"folder: {place}")
    results = work(job, place, numbers, lambda result: console.message(line_of(result)))
    record = {"schema": "rlinf.chaos_runs/1", "runs": [record_of(result) for result in results]}
    bad = [result.plan.seed for result in results if result.verdict not in GOOD]
    if not bad:
        return Result(table_of(results), record)
    words = ", ".join(f"seed-{seed}" for seed in bad)
    note = f"look at {words} in {place}; `--first-seed {bad[0]} --seeds 1` plants the same faults again"
    return Result(table_of(results), record, ExitCode.FAILED, (note,))


def _job(
    arguments: list[str], faults: list[str], most: int, deadline: float | None, *, keep: bool
) -> tuple[ChaosJob, Path]:
    """Return the job, and the folder of runs that it names.

    Raises:
        ConfigError: it has robots, several machines, or no end.
    """
    files, overrides = split_files(arguments)
    if len(files) != 1 or files[0] == "-":
        raise typer.BadParameter(
            "name one file or a recipe, as in `python -m tests.chaos embodied/pick-laptop runner.max_steps=20`"
        )
    loaded = load(files[0], overrides)
    parts = sound(loaded)
    if loaded.recipe is not None:
        check_has_program(loaded.recipe)
    check_installed()
    _check_machine(parts)
    config = loaded.config
    runner = getattr(config, "runner", None)
    last_step, max_steps = (getattr(runner, name, None) for name in ("last_step", "max_steps"))
    # An epoch may be many steps.
    steps = last_step if max_steps is None or max_steps < 0 else max_steps
    if steps is None or runner is None:
        raise ConfigError(
            "the job has no end",
            where=loaded.name,
            help="limit it, as with `runner.max_steps=20`: each seed is one run",
        )
    groups = {
        getattr(getattr(config, name, None), "group_name", name): name for name in parts.cluster.component_placement
    }
    digest = config_id(values_of(config_text_of(loaded)) or {})
    chosen = chosen_faults(faults)
    synchronous = not getattr(runner, "staleness", 0)
    chaos_job = ChaosJob(files[0], tuple(overrides), digest, steps, groups, chosen, most, deadline, keep, synchronous)
    return chaos_job, Path(runner.logger.log_path)


def _check_machine(parts: SoundJob) -> None:
    """Refuse a job that is more than processes of this machine."""
    if any(group.hardware is not None for group in parts.cluster.node_groups or ()):
        raise ConfigError("faults are planted into no job with robots", where=parts.name)
    if parts.cluster.num_nodes != 1:
        raise ConfigError(
            "faults are planted on this machine only, and the job is for several",
            where=parts.name,
            help="name a file for one machine, or set `cluster.num_nodes=1`",
        )


def _listed(job: ChaosJob, seeds: range) -> Result:
    plans = [plan_of(seed, job.steps, job.faults, job.most) for seed in seeds]
    listed = [
        {"seed": plan.seed, "max_restarts": plan.max_restarts, "strikes": [one._asdict() for one in plan.strikes]}
        for plan in plans
    ]
    rows = [(str(plan.seed), str(strike), str(plan.max_restarts)) for plan in plans for strike in plan.strikes]
    table = console.table(("seed", "fault", "max_restarts"), rows, right=(0, 2))
    notes = ("", "nothing was started, and nothing written")
    return Result(table, {"schema": "rlinf.chaos_plan/1", "runs": listed}, notes=notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool on `arguments`, by default the command line's; return the exit code."""
    return guarded(lambda: app(arguments, prog_name="python -m tests.chaos"))


if __name__ == "__main__":
    sys.exit(main())
