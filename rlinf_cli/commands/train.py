"""`rlinf train`: validate, plan, start, follow; several values make a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments.options import Assume, Detach, DryRun, NoWait, Share, Training, choose_claims
from rlinf_cli.command import Result, command, opt


@command(
    "rlinf train",
    "rlinf train embodied",
    "rlinf train math/sums-laptop runner.max_steps=50 actor.seed=7",
    "rlinf train embodied/pick-laptop actor.optim.lr=1e-4,3e-4 --seeds 3",
    "rlinf train embodied/pick-laptop --rehearse",
    excludes={
        "--no-wait": "--share",
        "--rehearse": "--seeds --parallel --folder --dry-run --detach --skip-checks --assume",
    },
)
def train(
    arguments: Training = None,
    seeds: Annotated[
        int | None,
        opt(
            "--seeds N",
            "Run N times, with every seed of training in the file, plus 0 to N-1.",
            min=1,
        ),
    ] = None,
    parallel: Annotated[
        int, opt("--parallel N", "Of a sweep, run N at the same time; they share the machine.", min=1)
    ] = 1,
    folder: Annotated[
        Path | None,
        opt(
            "--folder FOLDER",
            "New folder of a sweep, or that of this sweep to continue. Default: a new one in the folder of runs.",
        ),
    ] = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    no_wait: NoWait = False,
    share: Share = False,
    skip_checks: Annotated[
        bool, opt("--skip-checks", "Skip the slow comparisons before the first step: `runner.skip_checks`.")
    ] = False,
    rehearse: Annotated[
        bool,
        opt(
            "--rehearse", "Train nothing: stand-ins take as long as the RUNs after FILE recorded, by default the last."
        ),
    ] = False,
    # Set by `rlinf train` on another machine, which has already shown the warnings of the file.
    remote_driver: Annotated[bool, opt("--remote-driver", hidden=True)] = False,
    assume: Assume = None,
) -> Result | int | None:
    """Train the job that a file describes; alone, list the recipes.

    FILE is a path, the name of a shipped config, or `-`; RECIPE starts from the recipe's own config. KEY=VALUE replaces
    a value of it, as in `runner.max_steps=50`, and ~KEY deletes one. Ctrl-C ends the run cleanly; a second one ends it
    at once. --assume is for --dry-run: a real run probes the machines.

    A run waits while another job of yours holds one of its accelerators or robots, and says which job, and how far
    that is.

    KEY=A,B gives a key several values; they make a sweep, one run after the other for every combination. A list is
    written in brackets, and a placement keeps its commas. All runs are validated before the first one starts; each has
    a folder within that of the sweep. A failed run does not end the sweep. Ctrl-C does, cleanly; the same command with
    --folder continues from the checkpoints.
    """
    from rlinf_cli.job.job_file import split_files
    from rlinf_cli.run.starting import chosen, recipes_result, start
    from rlinf_cli.sweep.plan import several
    from rlinf_cli.sweep.sweeping import sweep

    if not arguments:
        return recipes_result()
    choose_claims(no_wait=no_wait, share=share)
    if rehearse:
        from rlinf_cli.advice.rehearsing import rehearse as rehearsed

        names, words = split_files(arguments)
        file, overrides = chosen([*names[:1], *words])
        return rehearsed(file, overrides, names[1:])
    file, overrides = chosen(arguments)
    if assume and not dry_run:
        raise typer.BadParameter("a real run probes the machines; use it with --dry-run", param_hint="'--assume'")
    overrides = [*overrides, *(["runner.skip_checks=true"] if skip_checks else [])]
    swept = several(file, overrides)
    if swept or seeds or folder is not None:
        if detach or assume or file == "-":
            raise typer.BadParameter("a sweep takes neither standard input nor --detach nor --assume")
        again = ["rlinf", "train", *arguments, *(["--seeds", str(seeds)] if seeds else [])]
        return sweep(file, overrides, swept, seeds or 0, parallel, folder, again, dry_run=dry_run)
    if parallel > 1:
        raise typer.BadParameter("it goes with a sweep", param_hint="'--parallel'")
    return start(file, overrides, assume, dry_run=dry_run, detach=detach, already_shown=remote_driver)
