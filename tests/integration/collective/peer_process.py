"""The other process of a test: holds an endpoint, and runs functions whose source it is sent.

Started with `--server` it imports torch once, and forks such a process for each descriptor that it is sent.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Settings, StaticResolver
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.failures import PackedError


class Side:
    """One side of a test: an endpoint with one address, and groups with others."""

    def __init__(self, name: str, secret: bytes, ip: str, settings: Settings) -> None:
        self.me = WorkerAddress.from_name(name)
        self.endpoint = Endpoint(ClusterSecret(secret), ip=ip, settings=settings)
        self.resolver = StaticResolver({self.me: self.endpoint.info})
        self.kept: dict[str, Any] = {}

    def meet(self, name: str, info: Any) -> None:
        self.resolver.endpoints[WorkerAddress.from_name(name)] = info

    def group(self, *names: str) -> CollectiveGroup:
        members = [WorkerAddress.from_name(name) for name in names] or list(self.resolver.endpoints)
        return CollectiveGroup(self.endpoint, self.me, members, self.resolver)


def serve(pipe: Connection) -> None:
    side = Side(*pipe.recv())
    pipe.send(side.endpoint.info)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            break
        if request[0] == "meet":
            side.meet(*request[1:])
            pipe.send(None)
            continue
        source, name, args = request
        names: dict[str, Any] = {"__name__": "peer", "WorkerAddress": WorkerAddress}
        try:
            exec(source, names)  # noqa: S102 - the test sends its own functions
            answer: Any = (True, names[name](side, *args))
        except BaseException as error:
            traceback.print_exc()
            answer = (False, PackedError.of(error))
        try:
            pipe.send(answer)
        except OSError:
            return
    side.endpoint.close()


def fork_for_all(control: socket.socket) -> None:
    """Fork a process for each descriptor, and answer with its number; end with who asks."""
    import torch  # noqa: F401

    # Nobody waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            serve(Connection(descriptors[0]))
            # Taking torch down takes seconds.
            os._exit(0)
        os.close(descriptors[0])
        control.sendall(array.array("q", [pid]).tobytes())


if __name__ == "__main__":
    if sys.argv[1] == "--server":
        fork_for_all(socket.socket(fileno=int(sys.argv[2])))
    else:
        serve(Connection(int(sys.argv[1])))
