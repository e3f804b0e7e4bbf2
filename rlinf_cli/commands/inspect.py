"""`rlinf inspect`: views of a file, or of the file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rlinf_cli.arguments import options
from rlinf_cli.arguments.options import Assume, FileIfAny, FileOrRun, Live, Name, Out, Overrides, Parallel, assumed
from rlinf_cli.command import Group, Result, command, group, opt
from rlinf_cli.job.job_file import check_apart, is_override
from rlinf_core.suggest import near

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
    from rlinf_cli.cluster.probing import prober
    from rlinf_cli.job.job_file import load_sound
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.placement.picture import picture_of
    from rlinf_cli.placement.placement_summary import placement_result
    from rlinf_cli.run.policies import config_of

    name = config_of(file)
    job = load_sound(name, overrides, assume, probe=prober(name, assume, live=live))
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
    from rlinf_cli.job.config_view import config_result
    from rlinf_cli.job.job_file import load_sound
    from rlinf_cli.run.policies import config_of

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
    from rlinf_cli.cluster.probing import prober
    from rlinf_cli.job.job_file import load_sound
    from rlinf_cli.placement.job_layout import env_record, env_text, lay_out
    from rlinf_cli.run.policies import config_of
    from rlinf_core.errors import PlacementError

    name = config_of(file)
    job = load_sound(name, overrides, assume, probe=prober(name, assume, live=live))
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
