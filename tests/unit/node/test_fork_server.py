"""Processes forked from a server that has imported their modules, and what happens where none can be."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.node.fork_server import ForkClient, ForkSettings

ENTRY = """
import json, os, random, socket, sys
def begin(number, name, *arguments):
    connection = socket.socket(fileno=number)
    said = {"pid": os.getpid(), "parent": os.getppid(), "mark": os.environ.get("MARK"), "name": name,
            "loaded": getattr(sys.modules.get("heavy"), "pid", None), "arguments": arguments,
            "drawn": random.random(), "threads": os.environ.get("OMP_NUM_THREADS")}
    connection.sendall(json.dumps(said).encode() + b"\\n")
    print("a line of", name, flush=True)
    connection.recv(1)
    raise SystemExit(3)
"""


class Host:
    """A folder with modules, and this process in the place of a group's host."""

    def __init__(self, folder: Path, heavy: str = "import os\npid = os.getpid()\n") -> None:
        self.folder = folder
        (folder / "entry.py").write_text(ENTRY)
        (folder / "heavy.py").write_text(heavy)
        path = (str(folder), *sys.path)
        self.client = ForkClient(ForkSettings("entry:begin", ("heavy",), path, str(folder), "01", ("$HOME", 2)))
        self.client.socket.settimeout(60)
        self.connections: dict[str, socket.socket] = {}

    def start(self, name: str) -> dict[str, Any]:
        """Start a process; return what it says."""
        self.connections[name] = self.client.start(name)
        message = self.client.receive()
        said = json.loads(self.connections[name].makefile().readline())
        assert message == {"name": name, "pid": said["pid"]}
        return said

    def close(self) -> None:
        for open_socket in (*self.connections.values(), self.client.socket):
            open_socket.close()


def has_ended(pid: int) -> bool:
    """Return whether a process that is no child of this one ends within a minute."""
    try:
        opened = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([opened], [], [], 60)[0])
    finally:
        os.close(opened)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARK", "$1")
        made = Host(tmp_path)
        yield made
        made.close()


def test_processes_are_forked_from_one_that_has_the_module(host: Host) -> None:
    first, second = host.start("a:0"), host.start("a:1")
    assert first["parent"] == second["parent"] == first["loaded"] == second["loaded"]
    assert first["pid"] != second["pid"]
    assert first["drawn"] != second["drawn"]
    assert (first["mark"], first["name"], first["arguments"]) == ("$1", "a:0", ["$HOME", 2])
    assert first["threads"] == os.environ.get("OMP_NUM_THREADS")


def test_ends_are_reported_with_their_status(host: Host) -> None:
    host.start("a:0")
    killed = host.start("a:1")
    host.connections["a:0"].send(b"x")
    assert host.client.receive() == {"name": "a:0", "end": 3 << 8}
    os.kill(killed["pid"], signal.SIGTERM)
    assert host.client.receive() == {"name": "a:1", "end": signal.SIGTERM}


def test_a_process_is_killed_by_name(host: Host) -> None:
    host.start("a:0")
    host.client.kill("a:9")
    host.client.kill("a:0")
    assert host.client.receive() == {"name": "a:0", "end": signal.SIGKILL}


def test_the_output_goes_where_ray_reads_it(host: Host) -> None:
    pid = host.start("a:0")["pid"]
    host.connections["a:0"].send(b"x")
    host.client.receive()
    (file,) = host.folder.glob(f"worker-*-01-{pid}.out")
    assert file.read_text() == ":actor_name:a:0\na line of a:0\n"


def test_all_end_with_the_host(host: Host) -> None:
    said = host.start("a:0")
    host.client.socket.close()
    assert has_ended(said["pid"])
    assert has_ended(said["parent"])


def test_a_killed_server_is_noticed(host: Host) -> None:
    os.kill(host.start("a:0")["parent"], signal.SIGKILL)
    assert host.client.receive() is None
    with pytest.raises(OSError, match=r".+"):
        host.client.start("a:1")


def test_a_module_that_starts_a_thread_is_left_to_the_processes(tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    host = Host(tmp_path, heavy=thread)
    said = host.start("a:0")
    assert (said["loaded"], said["name"], said["arguments"]) == (None, "a:0", ["$HOME", 2])
    host.connections["a:0"].send(b"x")
    assert host.client.receive() == {"name": "a:0", "end": 3 << 8}
    host.close()


def test_unimportable_module_is_left_to_the_processes(tmp_path: Path) -> None:
    host = Host(tmp_path, heavy="raise RuntimeError('no such device')\n")
    assert host.start("a:0")["loaded"] is None
    host.close()


def test_a_process_that_cannot_be_forked_is_reported(tmp_path: Path) -> None:
    host = Host(tmp_path, heavy="import os\ndef fork():\n    raise OSError(11, 'no more processes')\nos.fork = fork\n")
    connection = host.client.start("a:0")
    assert host.client.receive() == {"name": "a:0", "end": "[Errno 11] no more processes"}
    connection.close()
    host.close()
