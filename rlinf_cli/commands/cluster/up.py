"""`rlinf up`: bring up the nodes of a file as one cluster."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.cluster_options import NameOption, Parallel
from rlinf_cli.arguments.options import File, Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlinf_cli.bootstrap.startup import UpReport, UpRequest


class Template(StrEnum):
    SLURM = "slurm"
    KUBERAY = "kuberay"


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, and connect to nothing.", show_default=False)]
Print = Annotated[
    Template | None,
    typer.Option(
        "--print",
        metavar="slurm|kuberay",
        help="Print a job script or manifest with which Slurm or Kubernetes starts the same cluster.",
        show_default=False,
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="[GROUP:]KEY[=VALUE]",
        help="With --print, for all nodes or those of a group. Slurm: `requeue` to resume after the time limit, or an"
        " option of `sbatch`, as in `time=24:00:00` or `sim:partition=cpu`. KubeRay: `image`, `volume=CLAIM:/PATH`,"
        " `cpu`, `memory`, `toleration=KEY[=VALUE][:EFFECT]`, `secret=NAME`, or `job` for a RayJob. May be repeated.",
        show_default=False,
    ),
]
Rollback = Annotated[
    bool,
    typer.Option("--rollback", help="If a node fails, take down the nodes that this run started.", show_default=False),
]
NodeRank = Annotated[
    int | None,
    typer.Option("--node-rank", metavar="K", help="Start only this machine, as node K.", min=0, show_default=False),
]
HeadAddress = Annotated[
    str | None,
    typer.Option("--head-address", metavar="A", help="With --node-rank: address of node 0.", show_default=False),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="With --node-rank: file of the token that all nodes share.",
        show_default=False,
    ),
]
Block = Annotated[
    bool, typer.Option("--block", help="Stay in the foreground until stopped, then take down.", show_default=False)
]
Sync = Annotated[
    str | None,
    typer.Option("--sync", metavar="PATH", help="Copy rlinf and the code in PATH to the nodes.", show_default=False),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="Time limit for Ray to start on a node, in seconds.", min=1),
]
NoAuth = Annotated[
    bool,
    typer.Option(
        "--insecure-no-auth",
        help="Disable authentication: anyone who reaches the ports can run programs on the nodes.",
        show_default=False,
    ),
]


def up(
    file: File,
    overrides: Overrides = None,
    name: NameOption = None,
    dry_run: DryRun = False,
    template: Print = None,
    wishes: With = None,
    rollback: Rollback = False,
    node_rank: NodeRank = None,
    head_address: HeadAddress = None,
    token_file: TokenFile = None,
    block: Block = False,
    sync: Sync = None,
    timeout: Timeout = 60.0,
    parallel: Parallel = 128,
    insecure_no_auth: NoAuth = False,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Bring the nodes of a file up as one cluster.

    Uses ssh if the file has `hosts`, else only this machine. Run again, it starts missing nodes and leaves the others.
    With --node-rank (or as a Slurm task) it starts only the node that it runs on. KEY=VALUE replaces a value of FILE,
    ~KEY deletes one.
    """
    from rlinf_cli.machines.cluster_lifecycle import Asked, prepare, watch
    from rlinf_core.process.signal_mask import ignore_warnings

    # These signals are for the driver: its nodes must stay until it has saved.
    ignore_warnings()
    if template is not None:
        _print(template, file, overrides, name, wishes or ())
        return
    if wishes:
        raise typer.BadParameter("it requires --print", param_hint="'--with'")
    asked = Asked(file, overrides, name, node_rank, head_address, token_file, timeout, not insecure_no_auth, sync)
    request = prepare(asked)
    if dry_run:
        _plan(request, output)
        return
    if insecure_no_auth:
        console.message("warning: authentication is off: anyone who reaches the ports can run programs on the nodes")
    if block:
        from rlinf_cli.machines.foreground import hold

        hold(request, lambda report: _show(report, output), parallel=parallel)
        return
    try:
        report = watch(request, parallel=parallel)
    except KeyboardInterrupt:
        console.message(f"interrupted: nodes that are up stay up until `rlinf down --name {request.name}`")
        raise
    if not report.ok and rollback:
        _roll_back(request, report, parallel)
    _show(report, output)
    if not report.ok:
        if not rollback and any(node.up for node in report.nodes):
            console.message(
                "running nodes stay up: run the same command again to retry the others, or `rlinf down` to end all"
            )
        raise typer.Exit(ExitCode.UNREACHABLE)


app = command(up, examples=("rlinf up cluster.yaml", "rlinf up cluster.yaml --print slurm"), no_args_is_help=True)


def _print(template: Template, file: str, overrides: list[str] | None, name: str | None, wishes: Sequence[str]) -> None:
    from rlinf_cli.bootstrap import cluster_identity
    from rlinf_cli.bootstrap.inventory import targets
    from rlinf_cli.bootstrap.templates.kuberay import kuberay
    from rlinf_cli.bootstrap.templates.slurm import slurm
    from rlinf_cli.bootstrap.templates.wishes import parse
    from rlinf_cli.file.job_file import load_sound
    from rlinf_core.config.tree import ScalarNode, find

    job = load_sound(file, overrides)
    nodes = targets(job.cluster)
    cluster = cluster_identity.cluster_name(file, name)
    checked = parse(wishes, nodes)
    if template is Template.SLURM:
        printed = slurm(cluster, file, nodes, overrides or (), checked)
    else:
        path = Path(file)
        text = path.read_text(encoding="utf-8") if path.is_file() else None
        log_path = find(job.tree, ("runner", "logger", "log_path"))
        runs = log_path.raw if isinstance(log_path, ScalarNode) else None
        printed = kuberay(cluster, file, nodes, overrides or (), checked, text=text, log_path=runs)
    console.result(printed.rstrip("\n"))


def _plan(request: UpRequest, output: Output) -> None:
    from rlinf_cli.render.up_report import plan_record, plan_text

    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    if output is Output.JSON:
        console.result_json(plan_record(request.name, nodes, authenticated=request.authenticated))
    else:
        console.result(plan_text(request.name, nodes, authenticated=request.authenticated))


def _show(report: UpReport, output: Output) -> None:
    from rlinf_cli.render.up_report import show_failures, up_record, up_text

    show_failures(report.failures)
    if output is Output.JSON:
        console.result_json(up_record(report))
    else:
        console.result(up_text(report))


def _roll_back(request: UpRequest, report: UpReport, parallel: int) -> None:
    from rlinf_cli.machines.cluster_lifecycle import end

    started = {node.rank for node in report.nodes if node.changed}
    console.message(f"taking down the nodes started by this run: {len(started)}")
    end(request.name, [node for node in request.nodes if node.rank in started], parallel=parallel)
