"""The guardian of a node in the foreground: it takes the node down when `rlinf up --block` dies without doing so.

    python -m rlinf_cli.cluster.guardian NAME RANK

It is not a child of that command, so that what ends the command and its children leaves it alone. It waits for a pipe
whose other end only the command holds: the kernel closes it, however the command ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.node import node_ray
from rlinf_core.node import cluster_records, node_facts

_DONE: Final = b"done\n"
# Seconds for other commands that work on the node to end.
_PATIENCE_SECONDS: Final = 90.0
_PAUSE: Final = 0.5


class Guardian:
    """The guardian of the node that this process starts; within the block it watches this process.

    Args:
        name: the name of the cluster.
        rank: the rank of this node.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank

    def __enter__(self) -> Self:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._starter = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self._name, str(self._rank)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def dismiss(self) -> None:
        """Let it end without doing anything."""
        if self._starter.stdin is not None and not self._starter.stdin.closed:
            with suppress(BrokenPipeError):
                self._starter.stdin.write(_DONE)
                self._starter.stdin.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._starter.stdin is not None:
            self._starter.stdin.close()
        self._starter.wait()


def main(name: str, rank: int) -> None:
    """Wait for the end of the pipe, and take the node down unless dismissed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    if sys.stdin.buffer.read() == _DONE:
        return
    take_down(name, rank)


def take_down(name: str, rank: int) -> None:
    """Take this node of a cluster down, and forget the cluster if it is the head.

    What fails is written to the node's `up.log`.
    """
    cluster = identity.cluster_id(name)
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            left = node_ray.stop({"cluster": cluster})["processes"]
            fault = f"left: {', '.join(left)}" if left else ""
        except (node_ray.NodeError, OSError) as error:
            fault = str(error)
        if not fault:
            break
        if time.monotonic() > end:
            with suppress(OSError), (Path(node_facts.folder_of(cluster)) / "up.log").open("a") as log:
                log.write(f"the guardian of `rlinf up --block` could not take this node down: {fault}\n")
            return
        time.sleep(_PAUSE)
    if rank == 0:
        with identity.locked(name, seconds=max(0.0, end - time.monotonic())):
            cluster_records.forget(name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
