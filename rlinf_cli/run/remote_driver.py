"""Choice of the cluster that a job's driver joins, and running the driver on a remote head."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlinf_cli.arguments.options import Output
from rlinf_cli.console import console

if TYPE_CHECKING:
    from rlinf_cli.file.job_file import SoundJob
    from rlinf_core.node.cluster_records import ClusterRecord


def cluster_elsewhere(job: SoundJob, file: str) -> ClusterRecord | None:
    """Return the remote cluster whose head must run the driver; None if it can run here.

    Raises:
        ClusterError: the file names hosts, none of their nodes is this machine, and they were not brought up from here.
    """
    from rlinf_cli.bootstrap import cluster_identity
    from rlinf_core import env_vars
    from rlinf_core.errors import ClusterError
    from rlinf_core.node import attach, cluster_records

    if env_vars.ADDRESS.get() or attach.may_be_embedded(1, job.cluster):
        return None
    name = env_vars.CLUSTER.get() or cluster_identity.cluster_name(file)
    record = cluster_records.load(name)
    if record is not None:
        return None if record.here() is not None else record
    if attach.known() is not None:
        return None
    raise ClusterError(
        "the file's machines are not up",
        where=job.name,
        why="the file names hosts, this machine is not one of them, and no `rlinf up` of this file is recorded here",
        help="run `rlinf up FILE`, or set `RLINF_CLUSTER` to a cluster with another name",
    )


def train_there(record: ClusterRecord, job: SoundJob, output: Output, *, detached: bool) -> int:
    """Run the job's driver on the head, forward its output, and return its exit code.

    The job is sent as a single resolved file, together with the values of the `cluster.forward_env` variables here.

    Raises:
        ConfigError: one of them is not set.
    """
    from rlinf_cli.bootstrap.transports.head_driver import run_on_head
    from rlinf_core.config.composing.origins import resolved_text
    from rlinf_core.placement.environment import forwarded_values

    forwarded = forwarded_values(job.cluster.forward_env, os.environ)
    head = record.nodes[0].host
    console.message(f"the driver and the run folder are on {head}")
    flags = [
        "--told",
        *(["--detach"] if detached else []),
        *(["--quiet"] if console.verbosity.quiet else []),
        *(["--verbose"] if console.verbosity.verbose else []),
    ]
    # -P keeps the login's home off `sys.path`: a `random.py` there would shadow the standard library's.
    arguments = ["-P", "-m", "rlinf_cli", "train", "-", "--output", str(output), *flags]
    return run_on_head(record, arguments, stdin=resolved_text(job.tree).encode(), env=forwarded)


def choose_cluster(job: SoundJob, file: str, *, already_shown: bool) -> None:
    """Choose the cluster that this process's driver will join, and print it in one line.

    The environment names it; else it is the one that `rlinf up` made from the same file, else one on this machine with
    as many nodes.

    Args:
        job: the job.
        file: the file as named on the command line.
        already_shown: whether the user knows it already.

    Raises:
        ClusterError: none runs here and one is needed, or several fit.
    """
    from rlinf_cli.bootstrap import cluster_identity
    from rlinf_core import env_vars
    from rlinf_core.node import attach

    num_nodes = job.cluster.num_nodes
    name = cluster_identity.cluster_name(file)
    if env_vars.ADDRESS.get() is None and env_vars.CLUSTER.get() is None and attach.is_known(name):
        os.environ[env_vars.CLUSTER.name] = name
    may_start = attach.may_be_embedded(num_nodes, job.cluster)
    cluster = attach.destination(None, num_nodes, may_start=may_start)
    if cluster is None:
        text = "a private Ray on this machine"
    elif isinstance(cluster, attach.Known):
        text = f"cluster {cluster.name}, head {cluster.address}"
    else:
        text = f"the cluster at {cluster}"
    if not already_shown:
        console.message(f"runs on {text}")
