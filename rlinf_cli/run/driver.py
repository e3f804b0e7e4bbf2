"""The place of a job's driver: the cluster that it joins, a remote head, or the background, without its terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlinf_cli import console
from rlinf_cli.job.job_file import SoundJob
from rlinf_cli.runs.logs import open_log_of
from rlinf_core import env_vars
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.errors import ClusterError, ConfigError, RLinfError
from rlinf_core.node import attach, cluster_records
from rlinf_core.node.attach import Known
from rlinf_core.node.cluster_records import ClusterRecord, section_digest

_CLUSTER: Final = env_vars.CLUSTER.name


def cluster_elsewhere(job: SoundJob, file: str) -> ClusterRecord | None:
    """Return the remote cluster whose head must run the driver; None if it can run here.

    Raises:
        ClusterError: the file names hosts, none of which is this machine, and they were not brought up from here;
            or the cluster that is recorded under the file's name was brought up from other machines.
    """
    from rlinf_cli.cluster import identity

    if env_vars.ADDRESS.get() or attach.may_be_embedded(1, job.cluster):
        return None
    name = env_vars.CLUSTER.get() or identity.cluster_name(file)
    record = cluster_records.load(name)
    if record is not None:
        if env_vars.CLUSTER.get() is None and not _of_the_file(job, record.path, record.section):
            reason = f"it was brought up from {record.path or record.file}, whose `cluster` section differs"
            raise _another_cluster(job.name, name, reason, file)
        return None if record.here() is not None else record
    if attach.known() is not None:
        return None
    raise ClusterError(
        "the file's machines are not up",
        where=job.name,
        why="the file names hosts, this machine is not one of them, and no `rlinf up` of this file is recorded here",
        help="run `rlinf up FILE`, or set `RLINF_CLUSTER` to a cluster with another name",
    )


def refuse_elsewhere(job: SoundJob, file: str, why: str, do: str) -> None:
    """Refuse an operation that is only possible on the head of the job's cluster, if the head is another machine.

    Raises:
        ConfigError: the head is another machine; the message has the reason `why` and suggests to `do` it there.
    """
    if cluster_elsewhere(job, file) is not None:
        what = f"the head of this file's cluster is another machine, {why}"
        raise ConfigError(what, where=job.name, help=f"log in to the head, and {do} there")


def train_there(record: ClusterRecord, job: SoundJob, *, detached: bool) -> int:
    """Run the job's driver on the head, forward its output, and return its exit code.

    The job is sent as a single resolved file, together with the values of the `cluster.forward_env` variables here.

    Raises:
        ConfigError: one of these variables is not set.
    """
    from rlinf_cli.cluster.node.node_requests import run_on_head
    from rlinf_core.node.environment import forwarded_values

    forwarded = forwarded_values(job.cluster.forward_env, os.environ) | {env_vars.CLAIMS.name: env_vars.CLAIMS.get()}
    head = record.nodes[0].host
    console.message(f"the driver and the run folder are on {head}")
    flags = [
        "--remote-driver",
        *(["--detach"] if detached else []),
        *(["--quiet"] if console.verbosity.quiet else []),
        *(["--verbose"] if console.verbosity.verbose else []),
        *(["--json"] if console.verbosity.json else []),
    ]
    # -P keeps the home folder off `sys.path`: a `random.py` there would shadow the standard library's module.
    arguments = ["-P", "-m", "rlinf_cli", "train", "-", *flags]
    return run_on_head(record, arguments, stdin=resolved_text(job.tree).encode(), env=forwarded)


def choose_cluster(job: SoundJob, file: str, *, already_shown: bool) -> None:
    """Choose the cluster that this process's driver will join, set it in the environment, and print it in one line.

    A cluster named in the environment comes first. Otherwise the driver joins a cluster that runs here and was brought
    up for the job's machines by the same interpreter; any other cluster belongs to other work.

    Args:
        job: the job.
        file: the file as named on the command line.
        already_shown: whether the user already knows the choice.

    Raises:
        ClusterError: a cluster is needed and none runs here, or several fit.
    """
    num_nodes = job.cluster.num_nodes
    may_start = attach.may_be_embedded(num_nodes, job.cluster)
    others: dict[str, str] = {}
    if env_vars.ADDRESS.get() is None and env_vars.CLUSTER.get() is None:
        running = list(attach.running_here())
        others = {cluster.name: reason for cluster in running if (reason := _unlike(job, cluster))}
        own = [cluster.name for cluster in running if cluster.name not in others]
        if len(own) > 1:
            listed = ", ".join(f"`{name}`" for name in own)
            raise ClusterError(
                f"several clusters of the file's machines run here: {listed}", help=f"say which by `{_CLUSTER}`"
            )
        if own:
            os.environ[_CLUSTER] = own[0]
        elif may_start:
            os.environ[env_vars.ADDRESS.name] = attach.LOCAL
        elif others:
            name, reason = next(iter(others.items()))
            raise _another_cluster(job.name, name, reason, file)
    cluster = attach.destination(None, num_nodes, may_start=may_start)
    if cluster is None:
        text = "a private Ray on this machine"
    elif isinstance(cluster, attach.Known):
        text = f"cluster {cluster.name}, head {cluster.address}"
    else:
        text = f"the cluster at {cluster}"
    if not already_shown:
        console.message(f"runs on {text}")
        for name, reason in others.items() if cluster is None else ():
            console.message(f"cluster `{name}` runs here too: {reason}; `{_CLUSTER}={name}` runs the job on it")


def _unlike(job: SoundJob, cluster: Known) -> str:
    """Return why a cluster on this machine is not the job's; an empty text if it is."""
    from rlinf_cli.cluster.inventory import targets

    if not _of_the_file(job, cluster.path, cluster.section) and not _recorded_for(job, cluster.name):
        source = f"it was brought up from {cluster.path}" if cluster.path else "it was brought up from another file"
        return f"{source}, whose `cluster` section differs"
    if cluster.num_nodes not in (None, job.cluster.num_nodes):
        return f"its `num_nodes` is {cluster.num_nodes}, the file's {job.cluster.num_nodes}"
    own = targets(job.cluster)[cluster.rank].interpreter
    # Compare folders, because `python` and `python3` of one environment are links to a file outside it.
    folders = {os.path.realpath(os.path.dirname(interpreter)) for interpreter in (own, cluster.interpreter)}
    return f"it runs with {cluster.interpreter}, the job with {own}" if len(folders) > 1 else ""


def _of_the_file(job: SoundJob, path: str, section: str) -> bool:
    """Return whether a cluster was brought up from an equal `cluster` section or from a base file of the job."""
    return section == section_digest(job.cluster) or path in map(os.path.realpath, job.files[1:])


def _recorded_for(job: SoundJob, name: str) -> bool:
    """Return whether the newest `rlinf up` of a cluster was for the job; the nodes know only their first `rlinf up`."""
    try:
        record = cluster_records.load(name)
    except RLinfError:
        return False
    return record is not None and _of_the_file(job, record.path, record.section)


def _another_cluster(where: str, name: str, reason: str, file: str) -> ClusterError:
    return ClusterError(
        f"cluster `{name}` is up, but not for this file",
        where=where,
        why=reason,
        help=f"`{_CLUSTER}={name}` runs the job on it; `rlinf up {file}` brings up the file's own machines",
    )


# Called by the child when it is ready, with its message to the parent and its output file.
Settle: TypeAlias = Callable[[Any, Path], None]


def detached(work: Callable[[Settle], int]) -> tuple[Any, int]:
    """Run `work` in a child process with its own session. This process must not have started threads.

    Until the child settles, it shares this process's output, so startup errors are visible.

    Args:
        work: the child's function; it returns the exit code.

    Returns:
        In the parent: the child's message and 0; or None and the exit code of a child that ended before settling.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        # Otherwise both processes would print the buffered output.
        stream.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _exit(_settled(work, writing))
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        try:
            text = pipe.read()
        except (KeyboardInterrupt, SystemExit) as end:
            # The child has left this terminal's session, but its last output is still read here.
            os.kill(child, signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM)
            os.waitpid(child, 0)
            raise
    if text:
        return json.loads(text), 0
    _, status = os.waitpid(child, 0)
    return None, os.waitstatus_to_exitcode(status)


def _settled(work: Callable[[Settle], int], writing: int) -> int:
    os.setsid()

    def settle(message: Any, output: Path) -> None:
        _redirect(output)
        os.write(writing, json.dumps(message).encode())
        os.close(writing)

    return work(settle)


def _redirect(output: Path) -> None:
    """Redirect standard output and error to a file, and standard input from /dev/null."""

    nothing = os.open(os.devnull, os.O_RDONLY)
    file = open_log_of(output)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for descriptor in (nothing, file):
        os.close(descriptor)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
