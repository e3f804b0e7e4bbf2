"""Commands that bring clusters up, inspect them and take them down."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlinf_cli import console
from rlinf_cli.command import Result, command, opt
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.options import DryRun, File, FileIfAny, Name, Overrides, Parallel
from rlinf_core.errors import ConfigError
from rlinf_core.process.proc import ignore_warnings

if TYPE_CHECKING:
    from rlinf_cli.cluster.up import UpRequest


Template = Literal["slurm", "kuberay"]


# Long by its options: each is a parameter, since typer reads the signature.
@command(
    "rlinf up cluster.yaml",
    "rlinf up cluster.yaml --print slurm",
    needs={"--print": "--with"},
    excludes={
        "--print": "--dry-run --rollback --node-rank --head-address --token-file --block --sync --timeout"
        " --insecure-no-auth",
        "--insecure-no-auth": "--token-file",
    },
)
def up(
    file: File,
    overrides: Overrides = None,
    name: Name = None,
    dry_run: DryRun = False,
    template: Annotated[
        Template | None,
        opt(
            "--print slurm|kuberay",
            "Print a job script or manifest with which Slurm or Kubernetes starts the same cluster.",
        ),
    ] = None,
    wishes: Annotated[
        list[str] | None,
        opt(
            "--with [GROUP:]KEY[=VALUE]",
            "With --print, for all nodes or those of a group. Slurm: `requeue` to resume after the time limit, or an"
            " option of `sbatch`, as in `time=24:00:00` or `sim:partition=cpu`. KubeRay: `image`, `volume=CLAIM:/PATH`,"
            " `cpu`, `memory`, `toleration=KEY[=VALUE][:EFFECT]`, `secret=NAME`, or `job` for a RayJob. May be"
            " repeated.",
        ),
    ] = None,
    rollback: Annotated[bool, opt("--rollback", "If a node fails, take down the nodes that this run started.")] = False,
    node_rank: Annotated[int | None, opt("--node-rank K", "Start only this machine, as node K.", min=0)] = None,
    head_address: Annotated[str | None, opt("--head-address A", "With --node-rank: address of node 0.")] = None,
    token_file: Annotated[
        str | None, opt("--token-file FILE", "With --node-rank: file of the token that all nodes share.")
    ] = None,
    block: Annotated[bool, opt("--block", "Stay in the foreground until stopped, then take down.")] = False,
    sync: Annotated[str | None, opt("--sync PATH", "Copy rlinf and the code in PATH to the nodes.")] = None,
    timeout: Annotated[
        float, opt("--timeout SECONDS", "Time limit for Ray to start on a node, in seconds.", min=1)
    ] = 60.0,
    parallel: Parallel = 128,
    insecure_no_auth: Annotated[
        bool,
        opt(
            "--insecure-no-auth",
            "Disable authentication: anyone who reaches the ports can run programs on the nodes.",
        ),
    ] = False,
) -> Result | None:
    """Bring the nodes of a file up as one cluster.

    Uses ssh if the file has `hosts`, else only this machine. Run again, it starts missing nodes and leaves the others.
    With --node-rank (or as a Slurm task) it starts only the node that it runs on. KEY=VALUE replaces a value of FILE,
    ~KEY deletes one.
    """
    # These signals are for the driver: its nodes must stay until it has saved.
    ignore_warnings()
    if template is not None:
        return Result(_job_script(template, file, overrides or (), name, wishes or ()))
    from rlinf_cli.cluster.lifecycle import plan_result, prepare

    request = prepare(
        file,
        overrides,
        name,
        node_rank=node_rank,
        head_address=head_address,
        token_file=token_file,
        timeout=timeout,
        authenticated=not insecure_no_auth,
        code=sync,
    )
    if dry_run:
        nodes = [node for node in request.nodes if request.only in (None, node.rank)]
        return plan_result(request.name, nodes, authenticated=request.authenticated)
    if insecure_no_auth:
        console.message("warning: authentication is off: anyone who reaches the ports can run programs on the nodes")
    return _bring_up(request, block=block, rollback=rollback, parallel=parallel)


def _job_script(
    scheduler: Template, file: str, overrides: Sequence[str], name: str | None, options: Sequence[str]
) -> str:
    """Return the script or manifest with which Slurm or KubeRay starts the cluster of a file."""
    from rlinf_cli.cluster import identity
    from rlinf_cli.cluster.inventory import targets
    from rlinf_cli.cluster.schedulers import parse
    from rlinf_cli.cluster.schedulers.kuberay import kuberay
    from rlinf_cli.cluster.schedulers.slurm import slurm
    from rlinf_cli.job.job_file import load_sound, refuse_secrets
    from rlinf_core.config.shipped import shipped_configs
    from rlinf_core.config.tree import ScalarNode, find

    refuse_secrets(overrides, "the script")
    if file == "-":
        raise ConfigError("the script reads the file when it runs", where="-", help="write it to a file, and name that")
    job = load_sound(file, overrides)
    nodes, cluster, path = targets(job.cluster), identity.cluster_name(file, name), Path(file)
    checked = parse(options, nodes)
    if scheduler == "slurm":
        return slurm(cluster, file, nodes, overrides, checked, job.cluster.head_address).rstrip("\n")
    ours = set(map(os.path.realpath, shipped_configs().values()))
    bases = [base for base in job.files[1:] if os.path.realpath(base) not in ours]
    if bases and any(option.key == "job" for option in checked):
        raise ConfigError(
            "a RayJob takes one file along, and this one extends another",
            where=file,
            why=f"`{bases[0]}` is not in its pods",
            help=f"print a manifest of one file: `rlinf inspect config {shlex.quote(file)} > whole.yaml` writes it",
        )
    if job.cluster.head_address is not None:
        console.message("`cluster.head_address` has no effect: KubeRay's service is the head's address")
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    log_path = find(job.tree, ("runner", "logger", "log_path"))
    runs = log_path.raw if isinstance(log_path, ScalarNode) else None
    return kuberay(cluster, file, nodes, overrides, checked, text=text, log_path=runs).rstrip("\n")


def _bring_up(request: UpRequest, *, block: bool, rollback: bool, parallel: int) -> Result | None:
    from rlinf_cli.cluster.lifecycle import up_or_back, up_result

    if block:
        from rlinf_cli.cluster.block import hold

        hold(request, lambda report: up_result(report).show(), parallel=parallel)
        return None
    report = up_or_back(request, parallel=parallel, rollback=rollback)
    result = up_result(report)
    if not report.ok and not rollback and any(node.up for node in report.nodes):
        again = "running nodes stay up: run the same command again to retry the others, or `rlinf down` to end all"
        return result._replace(notes=(again,))
    return result


@command("rlinf status", "rlinf status cluster.yaml")
def status(file: FileIfAny = None, name: Name = None, parallel: Parallel = 128) -> Result:
    """Show the nodes of the cluster, and the running jobs.

    By default the only running cluster, or that of RLINF_CLUSTER. Each node is probed over ssh; a Ray started by other
    means is queried at RLINF_ADDRESS. The exit status is 3 while a node is missing.
    """
    from rlinf_cli.cluster import identity
    from rlinf_cli.cluster.status import status_of

    return status_of(name if file is None else identity.cluster_name(file, name), parallel=parallel)


@command("rlinf down", "rlinf down cluster.yaml")
def down(
    file: FileIfAny = None,
    name: Name = None,
    node_rank: Annotated[int | None, opt("--node-rank K", "Take down this machine alone, node K.", min=0)] = None,
    force: Annotated[bool, opt("--force", "Even while a job runs, without asking.")] = False,
    parallel: Parallel = 128,
) -> Result:
    """Take down the cluster that `up` started; check that it is gone.

    By default the only running cluster. With FILE no record of it is needed: every node of the file is probed. A Ray
    that `up` did not start is left alone.
    """
    from rlinf_cli.cluster.lifecycle import agreed, down_result, end, job_line, jobs_of, nodes_to_end, nothing_recorded

    if node_rank is not None and file is None:
        raise typer.BadParameter("it requires FILE, in which this machine is node K", param_hint="'--node-rank'")
    cluster, nodes = nodes_to_end(file, name, node_rank)
    if cluster is None or not nodes:
        return nothing_recorded(cluster)
    head = next((node for node in nodes if node.is_head), None)
    jobs = jobs_of(cluster, head) if head is not None else []
    listed = list(map(job_line, jobs))
    if jobs and not force and not agreed(cluster, listed):
        return Result(code=ExitCode.FAILED)
    for job in listed:
        console.message(f"ending {job}")
    return down_result(end(cluster, nodes, parallel=parallel, jobs=jobs))


@command("rlinf doctor cluster.yaml")
def doctor(
    file: File,
    overrides: Overrides = None,
    name: Name = None,
    link_seconds: Annotated[
        float, opt("--link-seconds SECONDS", "Time limit for measuring links, in seconds; 0 skips it.", min=0)
    ] = 60.0,
    parallel: Parallel = 128,
) -> Result:
    """Check the machines of a file before a job starts on them.

    Checks interpreters, Ray, clocks, ports, disks, accelerators, robots, cameras, and the links between nodes that the
    job will use. Nothing is started or changed. KEY=VALUE replaces a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.cluster.doctor_report import examined

    return examined(file, overrides, name, link_seconds=link_seconds, parallel=parallel)
