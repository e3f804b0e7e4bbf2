"""Commands for jobs and their files: train, check, show, explain, and write a first one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf_cli import console, options
from rlinf_cli.command import Group, Result, arg, command, group, opt
from rlinf_cli.job.job_file import check_apart, is_override, load, load_sound, split_files
from rlinf_cli.options import (
    Assume,
    Detach,
    DryRun,
    FileIfAny,
    FileOrRun,
    Live,
    Name,
    NoWait,
    Out,
    Overrides,
    Parallel,
    Recipe,
    Share,
    Training,
    assumed,
    choose_claims,
)
from rlinf_cli.projects import ProjectKind, next_commands, project_files, write_project
from rlinf_cli.runs.run_lookup import config_of
from rlinf_core.errors import ClusterError, PlacementError
from rlinf_core.suggest import near

if TYPE_CHECKING:
    from rlinf_core.config.sections.cluster import ClusterConfig
    from rlinf_core.job.load import Probe
    from rlinf_core.topology import NodeInfo


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
    from rlinf_cli.run.starting import chosen, recipes_result, start
    from rlinf_cli.run.sweep import sweep
    from rlinf_cli.run.sweep_plan import several

    if not arguments:
        return recipes_result()
    choose_claims(no_wait=no_wait, share=share)
    if rehearse:
        from rlinf_cli.advice.recorded_runs import rehearse as rehearsed

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
    from rlinf_cli.job.findings import validated

    files, overrides = split_files(arguments)
    if not files:
        raise typer.BadParameter("name a file to check, or `-` for standard input")
    if files.count("-") > 1:
        raise typer.BadParameter("standard input can be read only once")
    reports = [
        (file, load(file, overrides, assume, probe=_prober(file, assume, live=live)).diagnostics) for file in files
    ]
    return validated(reports, github=github)


def _prober(file: str, assume: Sequence[str] | None, *, live: bool) -> Probe | None:
    """Return a function that probes the nodes of a file for their accelerators, or None without `live`.

    The function raises `ClusterError` if a node cannot be probed.

    Raises:
        typer.BadParameter: `live` and `assume` are both given.
    """
    if not live:
        return None
    if assume:
        raise typer.BadParameter("`--assume` and `--live` exclude each other: give one of them")

    def probe(cluster: ClusterConfig) -> Sequence[NodeInfo]:
        from rlinf_cli.cluster import doctor, identity
        from rlinf_cli.cluster.checks import node_info
        from rlinf_cli.cluster.inventory import reachable
        from rlinf_cli.cluster.transport import Transport, run

        nodes, cluster_id = reachable(cluster), identity.cluster_id(identity.cluster_name(file, None))
        probed, unanswered = run(doctor.look_at(nodes, cluster_id, Transport(), console.message))
        if unanswered:
            lines = [f"{finding.where}: {finding.what}" for finding in unanswered]
            missing = f"{len(lines)} of {len(nodes)} nodes could not be probed"
            raise ClusterError(missing, why="\n".join(lines), help=unanswered[0].help or None)
        return [node_info(machine) for machine in probed]

    return probe


_DEFAULT = "placement"


class _Views(Group):
    """The views; the name of one may follow the file, too, and placement is the one that is shown by default."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        valued = {
            name
            for view in self.commands.values()
            for parameter in view.params
            for name in parameter.opts
            if not getattr(parameter, "is_flag", True)
        }
        free = [at for at in range(len(args)) if not at or args[at - 1] not in valued]
        at = next((at for at in free if args[at] in self.commands), None)
        names = [args[at] for at in free if not args[at].startswith("-") and not is_override(args[at])]
        if at is None and len(names) > 1:
            # One of them is meant for a view.
            wrong = next((name for name in names if near(name, self.commands)), names[0])
            return super().resolve_command(ctx, [wrong])
        words = [_DEFAULT, *args] if at is None else [args[at], *args[:at], *args[at + 1 :]]
        return super().resolve_command(ctx, words)


inspect = group("Show what a file means: placement, values, memory, hardware.", cls=_Views)


@command(
    "rlinf inspect placement hetero18",
    "rlinf inspect placement job.yaml --assume a800=8 -o job.html",
    app=inspect,
    needs={"--advise": "--staleness --patch --free"},
    excludes={"--advise": "--live --all -o", "--measure": "--advise --assume --live --all -o"},
)
def placement(
    file: FileOrRun,
    overrides: Overrides = None,
    assume: Assume = None,
    live: Live = False,
    show_all: Annotated[bool, opt("--all", "Show every process.")] = False,
    out: Out = None,
    advise: Annotated[
        str | None,
        opt("--advise RUN,RUN", "Predict the step of every legal placement from these runs, and show the best."),
    ] = None,
    measure: Annotated[
        bool, opt("--measure", "Measure how long the parts of a step take, in a minute or so, for --advise.")
    ] = False,
    staleness: Annotated[
        int | None,
        opt("--staleness N", "With --advise, the largest `runner.max_staleness`; by default FILE's.", min=0),
    ] = None,
    free: Annotated[bool, opt("--free", "With --advise, only on accelerators that no job of yours holds now.")] = False,
    patch: Annotated[
        Path | None, opt("--patch FILE", "With --advise, where a better placement is written; default: advice.yaml.")
    ] = None,
) -> Result:
    """Show where each component runs, and which hardware is idle.

    Connects to no machine: give accelerators that FILE does not declare with --assume, or probe the nodes with --live.
    KEY=VALUE replaces a value of FILE, ~KEY deletes one. -o also writes a picture, an HTML page. --advise writes a file
    that extends FILE where another placement is surely faster, or as fast on fewer accelerators. --measure runs the job
    for a few steps in three sizes, on one accelerator a component, and on one of each other node group that has a
    component; COMPONENT=N adds a size, as in `env=160`. --advise takes the folder that it writes as it takes a run.
    """
    if measure:
        from rlinf_cli.advice.measuring import measured

        return measured(file, overrides or ())
    if advise is not None:
        from rlinf_cli.advice.answer import placement_advice

        return placement_advice(file, overrides or (), assume, advise, staleness, patch, free=free)
    from rlinf_cli.job.job_layout import lay_out
    from rlinf_cli.job.picture import picture_of
    from rlinf_cli.job.views import placement_result

    name = config_of(file)
    job = load_sound(name, overrides, assume, probe=_prober(name, assume, live=live))
    check_apart(out, job.files, "-o")
    layout = lay_out(job, "placement", file, arguments=(*(overrides or ()), *assumed(assume)))
    picture = picture_of(Path(job.name).name, job.cluster, job.topology, layout.placements, layout.mode)
    result = placement_result(job, layout, picture, every_process=show_all)
    if out is None:
        return result
    from rlinf_cli.report.page import draw_placement

    return draw_placement(result, picture, out)


@command("rlinf inspect config embodied/pick-laptop", "rlinf inspect config job.yaml runner.max_steps=50", app=inspect)
def config(
    file: FileOrRun,
    overrides: Overrides = None,
    show_all: Annotated[bool, opt("--all", "Also show defaults that are null or empty.")] = False,
) -> Result:
    """Show the resolved file, and each value's origin.

    The output is YAML that loads to the same values; the comment after each value is its file and line, its override,
    or `default`. Secrets are masked. KEY=VALUE replaces a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.job.views import config_result

    return config_result(load_sound(config_of(file), overrides), every_value=show_all)


@command("rlinf inspect env hetero18 --component actor --rank 3", app=inspect)
def env(
    file: FileOrRun,
    component: Annotated[str, opt("--component -c NAME", "Component.", autocompletion=options.components)],
    rank: Annotated[int, opt("--rank -r N", "Rank of the process in its component.", min=0)],
    overrides: Overrides = None,
    assume: Assume = None,
    live: Live = False,
) -> Result:
    """Show the environment and interpreter of one process.

    Each variable is shown with its source; a part in `<...>` is known only on the node or at launch. KEY=VALUE replaces
    a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.job.job_layout import env_record, env_text, lay_out

    name = config_of(file)
    job = load_sound(name, overrides, assume, probe=_prober(name, assume, live=live))
    arguments = (*(overrides or ()), "--component", component, "--rank", str(rank), *assumed(assume))
    placements = lay_out(job, "env", file, component, arguments).placements[component]
    if rank >= len(placements):
        last = len(placements) - 1
        raise PlacementError(f"component `{component}` has no rank {rank}", help=f"its ranks are 0 to {last}")
    process = placements[rank]
    return Result(lambda: env_text(job, component, process), lambda: env_record(job, component, process))


@command("rlinf inspect hardware cluster.yaml", app=inspect)
def hardware(
    file: FileIfAny = None,
    overrides: Overrides = None,
    name: Name = None,
    parallel: Parallel = 128,
) -> Result:
    """Show accelerators, robots and cameras: found against declared.

    Probes the machines of FILE, or those of the running cluster. The exit status is 1 if declared hardware is missing,
    3 if a node cannot be reached.
    """
    from rlinf_cli.cluster.doctor_report import hardware_of

    return hardware_of(file, overrides, name, parallel=parallel)


@command(
    "rlinf inspect memory embodied/pick-laptop actor.model.hidden_dim=4096",
    "rlinf inspect memory runs/embodied-20260314-101502",
    app=inspect,
)
def memory(
    file: FileOrRun,
    overrides: Overrides = None,
    available: Annotated[
        float | None,
        opt(
            "--available GIB",
            "Memory of each node in GiB; by default as the file declares, else that of this machine.",
            min=0.001,
            max=2**32,
        ),
    ] = None,
    assume: Assume = None,
) -> Result:
    """Forecast the memory of each process, and whether it fits.

    Nothing is started, and no weights are read. For a RUN, its processes are taken to be where they
    were, and their measured peaks are shown beside the forecast. The exit status is 1 if a node has too little memory;
    what reduces it is suggested.
    """
    from rlinf_cli.memory import forecast_of

    words = (*(overrides or ()), *assumed(assume))
    return forecast_of(file, overrides or (), assume, available, words)


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
    from rlinf_cli.job import findings

    if schema:
        return findings.schema(recipe)
    return findings.codes() if topic is None else findings.topic(topic, recipe)


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
