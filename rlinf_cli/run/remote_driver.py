"""The cluster that a job's driver joins: one of this machine, or one whose head it has to run on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlinf_cli.arguments.options import Output
from rlinf_cli.console import console

if TYPE_CHECKING:
    from rlinf_cli.file.job_file import SoundJob
    from rlinf_core.node.cluster_records import ClusterRecord


def cluster_elsewhere(job: SoundJob, file: str) -> ClusterRecord | None:
    """Return the cluster that the driver has to go to; None where it can run here.

    Raises:
        ClusterError: the file names hosts, this machine runs no node of theirs, and nobody has brought them up from
            here.
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
        "the machines of the file are not up",
        where=job.name,
        why="it names hosts, this machine runs none of their nodes, and no `rlinf up` of this file is recorded here",
        help="`rlinf up FILE` brings them up; one that has another name is named by `RLINF_CLUSTER`",
    )


def train_there(record: ClusterRecord, job: SoundJob, output: Output, *, detached: bool) -> int:
    """Run the job's driver on the head, and return its exit code. What it prints is printed here.

    The job travels as one file, with its overrides and what its references stand for, and with it the values that
    variables of `cluster.forward_env` have here.

    Raises:
        ConfigError: one of them is not set.
    """
    from rlinf_cli.bootstrap.transports.head_driver import run_on_head
    from rlinf_core.config.composing.origins import resolved_text
    from rlinf_core.placement.environment import forwarded_values

    forwarded = forwarded_values(job.cluster.forward_env, os.environ)
    head = record.nodes[0].host
    console.message(f"the driver runs on {head}, and the run folder is there")
    flags = [
        "--told",
        *(["--detach"] if detached else []),
        *(["--quiet"] if console.verbosity.quiet else []),
        *(["--verbose"] if console.verbosity.verbose else []),
    ]
    # Without what the login's home holds: a `random.py` there is not the standard library's.
    arguments = ["-P", "-m", "rlinf_cli", "train", "-", "--output", str(output), *flags]
    return run_on_head(record, arguments, stdin=resolved_text(job.tree).encode(), env=forwarded)


def choose_cluster(job: SoundJob, file: str, *, told: bool) -> None:
    """Choose the cluster that the driver of this process will join, and say which in one line.

    It is the one that the environment names, else the one that `rlinf up` made of the same file, else any on this
    machine with as many nodes.

    Args:
        job: what is to be trained.
        file: as it was named.
        told: whether the person knows it already.

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
    found = attach.destination(None, num_nodes, may_start=may_start)
    if found is None:
        text = "a Ray of its own on this machine"
    elif isinstance(found, attach.Known):
        text = f"cluster {found.name}, head {found.address}"
    else:
        text = f"the cluster at {found}"
    if not told:
        console.message(f"runs on {text}")
