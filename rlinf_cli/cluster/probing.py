"""Probing of nodes for `doctor`, `status` and `inspect hardware`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from rlinf_cli.console import console

if TYPE_CHECKING:
    from rlinf_cli.cluster import doctor, status
    from rlinf_cli.cluster.checks.finding import Finding
    from rlinf_cli.cluster.inventory import NodeTarget
    from rlinf_core.config.machines.cluster import ClusterConfig
    from rlinf_core.job.load import Probe
    from rlinf_core.job.recipe import Trial
    from rlinf_core.node.cluster_records import ClusterRecord
    from rlinf_core.topology import NodeInfo


class _CheckedFile(NamedTuple):
    cluster: ClusterConfig
    name: str
    nodes: tuple[NodeTarget, ...]
    recipe: str | None
    trials: tuple[Trial, ...]
    log_path: Path
    experiment: str


def _read(file: str, overrides: list[str] | None, name: str | None) -> _CheckedFile:
    """Return the machines of a file.

    Raises:
        ConfigError: it has several nodes, and nothing says how to reach them.
    """
    from rlinf_cli.cluster import identity
    from rlinf_cli.file.job_file import load_sound
    from rlinf_core.job.find_recipe import recipe_of

    job = load_sound(file, overrides)
    nodes = _reachable(job.cluster)
    recipe = getattr(job.model, "recipe", None)
    own = recipe_of(job.model) if recipe else None
    function = own.load(own.trials) if own is not None else None
    trials = tuple(function(job.model)) if function is not None else ()
    logger = getattr(getattr(job.model, "runner", None), "logger", None)
    return _CheckedFile(
        job.cluster,
        identity.cluster_name(file, name),
        nodes,
        str(recipe) if recipe else None,
        trials,
        Path(getattr(logger, "log_path", "runs")),
        # As `RunFolder.create` names it.
        str(getattr(logger, "experiment_name", None) or recipe or ""),
    )


def examine(
    file: str, overrides: list[str] | None, name: str | None, *, link_seconds: float, parallel: int
) -> doctor.DoctorReport:
    """Run the preflight checks on a file's machines."""
    from rlinf_cli.cluster import doctor, identity
    from rlinf_cli.cluster.node import node_inspect, node_probe
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run
    from rlinf_core.node import cluster_records

    asked = _read(file, overrides, name)
    environ = dict(os.environ)
    request = doctor.DoctorRequest(
        cluster=asked.cluster,
        nodes=asked.nodes,
        cluster_id=identity.cluster_id(asked.name),
        fingerprint=node_probe.software(environ)["fingerprint"],
        recipe=asked.recipe,
        own_recipe=node_inspect.recipe_of(asked.recipe, environ) if asked.recipe else None,
        recorded=cluster_records.load(asked.name),
        link_seconds=link_seconds,
        links_at_once=max(1, parallel // 2),
        trials=asked.trials,
    )

    async def work() -> doctor.DoctorReport:
        # A link is measured from both of its ends at once.
        return await doctor.examine(request, NodeRoutes(parallel=max(2, parallel)), console.message)

    report = run(work())
    return report._replace(findings=(*report.findings, *_first_contact(asked)))


def _first_contact(asked: _CheckedFile) -> list[Finding]:
    """Return what the newest run of the experiment compared before its first step; nothing where none did."""
    from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding
    from rlinf_cli.live.run_summary import shown
    from rlinf_cli.runs.run_lookup import all_runs
    from rlinf_core.runners.storage.first_contact import FILE, comparisons_text, read_comparisons

    runs = [folder for folder in all_runs(asked.log_path) if folder.state.experiment == asked.experiment]
    for folder in sorted(runs, key=lambda folder: folder.state.created, reverse=True):
        if checks := read_comparisons(folder.path):
            differing = [f"{check.what} against {check.with_}" for check in checks if check.verdict == "differs"]
            what = f"checks of the newest run: {comparisons_text(checks)} (`{shown(folder.path)}/{FILE}`)"
            data = {"run": str(folder.path), "seconds": sum(check.seconds or 0.0 for check in checks)}
            if not differing:
                return [Finding("first contact", CheckVerdict.OK, what, where="run", data=data)]
            what = f"{what}; these differ: {'; '.join(differing)}"
            help = f"look at `rlinf why {shown(folder.path)}`"
            return [Finding("first contact", CheckVerdict.WARNING, what, where="run", help=help, data=data)]
    return []


def _reachable(cluster: ClusterConfig) -> tuple[NodeTarget, ...]:
    """Return the machines of a cluster, by rank.

    Raises:
        ConfigError: it has several nodes and no hosts to reach them by.
    """
    from rlinf_cli.cluster.inventory import targets
    from rlinf_core.errors import ConfigError

    nodes = targets(cluster)
    if len(nodes) > 1 and nodes[0].host is None:
        raise ConfigError(
            f"the file has {len(nodes)} nodes and no hosts",
            why="there is no way to reach them",
            help="give `hosts` in its node groups, or `cluster.hosts`",
        )
    return nodes


def prober(file: str, assume: Sequence[str] | None = None, *, live: bool = True) -> Probe | None:
    """Return a function that probes the nodes of a file for their accelerators, or None without `live`.

    It raises `ClusterError` where a node cannot be probed.

    Raises:
        typer.BadParameter: accelerators are assumed, too.
    """
    if not live:
        return None
    if assume:
        raise typer.BadParameter("`--assume` and `--live` exclude each other: give one of them")

    def probe(cluster: ClusterConfig) -> Sequence[NodeInfo]:
        from rlinf_cli.cluster import doctor, identity
        from rlinf_cli.cluster.checks.devices import node_info
        from rlinf_cli.cluster.transports.routes import NodeRoutes, run
        from rlinf_core.errors import ClusterError

        nodes, cluster_id = _reachable(cluster), identity.cluster_id(identity.cluster_name(file, None))

        async def work() -> doctor.Look:
            return await doctor.look_at(nodes, cluster_id, NodeRoutes(), console.message)

        look = run(work())
        if look.findings:
            lines = [f"{finding.where}: {finding.what}" for finding in look.findings]
            missing = f"{len(lines)} of {len(nodes)} nodes could not be probed"
            raise ClusterError(missing, why="\n".join(lines), help=look.findings[0].help or None)
        return [node_info(machine) for machine in look.probed]

    return probe


def look_at_hardware(
    file: str | None, overrides: list[str] | None, name: str | None, *, parallel: int
) -> tuple[Sequence[NodeTarget], doctor.Look]:
    """Return the hardware of a file's nodes, or of the running cluster's nodes.

    Raises:
        ClusterError: no file is given, and no cluster is up.
    """
    from rlinf_cli.cluster import doctor, identity
    from rlinf_cli.cluster.inventory import recorded_targets
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run

    if file is not None:
        asked = _read(file, overrides, name)
        cluster, nodes = asked.name, asked.nodes
    else:
        record = recorded_cluster(name)
        cluster, nodes = record.name, recorded_targets(record)

    async def work() -> doctor.Look:
        return await doctor.look_at(nodes, identity.cluster_id(cluster), NodeRoutes(parallel=parallel), console.message)

    return nodes, run(work())


def recorded_cluster(name: str | None) -> ClusterRecord:
    """Return the cluster that is up, or the one of that name.

    Raises:
        ClusterError: it does not exist.
    """
    from rlinf_core import env_vars
    from rlinf_core.errors import ClusterError
    from rlinf_core.node import cluster_records

    record = cluster_records.recorded(name)
    if record is not None:
        return record
    recorded, name = cluster_records.names(), name or env_vars.CLUSTER.get()
    what = f"no cluster `{name}` is known on this machine" if name else "no cluster is known on this machine"
    others = f"known clusters: {', '.join(f'`{known_name}`' for known_name in recorded)}" if recorded else ""
    hint = f"bring one up with `rlinf up FILE`, or set `{env_vars.ADDRESS.name}` to one started by hand"
    raise ClusterError(what, why=others or None, help=hint)


def ask_status(name: str | None, *, parallel: int) -> status.StatusReport:
    """Return the status of a cluster: the one of that name, else the one at `RLINF_ADDRESS`, else the recorded one,
    else the one whose node was started on this machine by hand.

    Raises:
        ClusterError: it does not exist, or it does not answer.
    """
    from rlinf_cli.cluster import status
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run
    from rlinf_core import env_vars
    from rlinf_core.node import attach, cluster_records

    address = env_vars.ADDRESS.get() if name is None else None
    if address is not None and address != attach.LOCAL:
        return _ask_ray(address)
    # Where each node was started by hand, the record is on the head's machine.
    here = attach.known() if name is None and cluster_records.recorded() is None else None
    if here is not None:
        attach.prepare(here)
        return _ask_ray(here.address, here.name)
    record = recorded_cluster(name)

    async def work() -> status.StatusReport:
        return await status.ask_all(record, NodeRoutes(parallel=parallel), console.message)

    return run(work())


def _ask_ray(address: str, name: str | None = None) -> status.StatusReport:
    """Return the status of the nodes that the Ray at an address lists."""
    from rlinf_cli.cluster.jobs import cluster_status
    from rlinf_core import env_vars

    console.message(f"asking the cluster at {address}, at most {env_vars.CONNECT_TIMEOUT.get():g} s per node")
    return cluster_status(address, name)
