"""`rlinf up --block`: nodes that live as long as the command, and the guardian of a node on this machine.

    python -m rlinf_cli.cluster.block NAME RANK

The guardian takes the node down if the command dies without doing so. It is not a child of the command, so that it
survives when the command is killed with its children. It waits for the end of a pipe whose other end only the command
holds, and which the kernel closes however the command ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.node import node_ray
from rlinf_core.node import cluster_records, node_facts
from rlinf_core.process.proc import alive

if TYPE_CHECKING:
    from rlinf_cli.cluster.up import UpReport, UpRequest

# Seconds for running jobs to save and end after SIGTERM. Schedulers signal the driver at the same time, and by default
# kill all remaining processes 30 s later.
_JOBS_SECONDS: Final = 15.0
# Seconds that the guardian waits for other commands on the node before it gives up.
_PATIENCE_SECONDS: Final = 90.0
_PAUSE: Final = 1.0
_DONE: Final = b"done\n"


def hold(request: UpRequest, show: Callable[[UpReport], None], *, parallel: int) -> None:
    """Bring the nodes up, wait until Ray ends or this process is stopped, and take down what this command started.

    Raises:
        typer.Exit: the nodes did not come up, or Ray ended on its own.
    """
    # Imported here because the guardian, which must stay small, does not need it.
    import typer

    from rlinf_cli import console
    from rlinf_cli.cluster.lifecycle import end, jobs_of, watch
    from rlinf_cli.interrupts import ExitCode

    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    local = len(nodes) == 1 and nodes[0].host is None
    fresh = local and not _runs_here(request.name)
    ours = nodes if fresh else []
    with guarded(request.name, nodes[0].rank) if fresh else nullcontext(lambda: None) as dismiss:
        try:
            report = watch(request, parallel=parallel)
            show(report)
            if not report.ok:
                changed = {node.rank for node in report.nodes if node.changed}
                ours = ours or [node for node in nodes if node.rank in changed]
                raise typer.Exit(ExitCode.UNREACHABLE)
            ours = nodes
            console.message(f"{report.name}: {'this node runs' if local else 'the nodes run'} until stopped")
            while not local or _runs_here(request.name):
                time.sleep(_PAUSE)
        except SystemExit as error:
            # A repeated signal, as from Slurm, must not cut the end short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if error.code == ExitCode.TERMINATED and ours:
                # A driver that is saving needs all of its nodes.
                until = time.monotonic() + _JOBS_SECONDS
                while jobs_of(request.name, ours[0]) and time.monotonic() < until:
                    time.sleep(_PAUSE)
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ours and end(request.name, ours, parallel=parallel).ok:
                dismiss()
    console.error_block("Ray ended on this node", why="it was stopped, or its head ended")
    raise typer.Exit(ExitCode.FAILED)


def _runs_here(name: str) -> bool:
    record = node_facts.read_record(node_facts.folder_of(identity.cluster_id(name)))
    return record is not None and alive(record.get("process"))


@contextmanager
def guarded(name: str, rank: int) -> Generator[Callable[[], None], None, None]:
    """Start a guardian that watches this process within the block; yield the function that dismisses it."""
    paths = os.pathsep.join(path for path in sys.path if path)
    starter = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, name, str(rank)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    pipe = starter.stdin

    def dismiss() -> None:
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.write(_DONE)

    try:
        yield dismiss
    finally:
        if pipe is not None:
            pipe.close()
        starter.wait()


def guard(name: str, rank: int) -> None:
    """Wait for the end of the pipe, and take the node down unless dismissed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    if sys.stdin.buffer.read() != _DONE:
        _take_down(name, rank)


def _take_down(name: str, rank: int) -> None:
    """Take this node down, and if it is the head remove the cluster's record; write a failure to its `up.log`."""
    cluster = identity.cluster_id(name)
    until = time.monotonic() + _PATIENCE_SECONDS
    while fault := _fault_of_stopping(cluster):
        if time.monotonic() > until:
            with suppress(OSError), (Path(node_facts.folder_of(cluster)) / "up.log").open("a") as log:
                log.write(f"the guardian of `rlinf up --block` could not take this node down: {fault}\n")
            return
        time.sleep(_PAUSE)
    if rank == 0:
        with identity.locked(name, seconds=max(0.0, until - time.monotonic())):
            cluster_records.forget(name)


def _fault_of_stopping(cluster: str) -> str:
    try:
        left = node_ray.stop({"cluster": cluster})["processes"]
    except (node_ray.NodeError, OSError) as error:
        return str(error)
    return f"left: {', '.join(left)}" if left else ""


if __name__ == "__main__":
    guard(sys.argv[1], int(sys.argv[2]))
