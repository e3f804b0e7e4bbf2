"""A job whose machines are others than this one: its driver runs on the head of their cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_cli import console
from rlinf_cli.options import Output

if TYPE_CHECKING:
    from rlinf_cli.files import SoundJob
    from rlinf_core.bootstrap.state import ClusterRecord


def cluster_elsewhere(job: SoundJob, file: str) -> ClusterRecord | None:
    """Return the cluster that the driver has to go to; None where it can run here.

    Raises:
        ClusterError: the file names hosts, this machine runs no node of theirs, and nobody has brought them up from
            here.
    """
    from rlinf_core import env_vars
    from rlinf_core.bootstrap import attach, state
    from rlinf_core.errors import ClusterError

    if env_vars.ADDRESS.get() or not _names_hosts(job):
        return None
    name = env_vars.CLUSTER.get() or state.cluster_name(file)
    record = state.load(name)
    if record is not None:
        return None if record.here() is not None else record
    if attach.known() is not None:
        return None
    raise ClusterError(
        "the machines of the file are not up",
        where=job.name,
        why="it names hosts, this machine runs none of their nodes, and no `rlinf up` of this file is recorded here",
        help="`rlinf up FILE` brings them up; one that has another name is named by `RLINF_CLUSTER`",
    )


def train_there(record: ClusterRecord, job: SoundJob, output: Output, *, detached: bool) -> int:
    """Run the job's driver on the head, and return its exit code. What it prints is printed here.

    The job travels as one file, with its overrides and what its references stand for.
    """
    from rlinf_core.bootstrap.driver import run_on_head
    from rlinf_core.config.dump import to_yaml

    head = record.nodes[0].host
    console.message(f"the driver runs on {head}, and the run folder is there")
    flags = [
        "--told",
        *(["--detach"] if detached else []),
        *(["--quiet"] if console.verbosity.quiet else []),
        *(["--verbose"] if console.verbosity.verbose else []),
    ]
    arguments = ["-m", "rlinf_cli", "train", "-", "--output", str(output), *flags]
    return run_on_head(record, arguments, stdin=to_yaml(job.tree).encode())


def _names_hosts(job: SoundJob) -> bool:
    return bool(job.cluster.hosts) or any(group.hosts for group in job.cluster.node_groups)
