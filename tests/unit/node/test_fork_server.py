"""Processes forked from a server that has imported their modules, and what happens where none can be."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.node import fork_server

SCRIPT = """
import json, os, random, sys
said = {"pid": os.getpid(), "parent": os.getppid(), "mark": os.environ.get("MARK"), "folder": os.getcwd(),
        "loaded": getattr(sys.modules.get("heavy"), "pid", None), "words": sys.argv[1:], "drawn": random.random(),
        "name": __name__, "script_folder": "fork_server.py" in os.listdir(sys.path[0] or ".")}
print(json.dumps(said), flush=True)
if "stay" in sys.argv:
    __import__("threading").Event().wait()
raise SystemExit(3)
"""


class Node:
    """A folder with a script and a module, and a process in the place of Ray's node manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "modules").mkdir()
        (folder / "work").mkdir()
        (folder / "script.py").write_text(SCRIPT)
        self.write_module("import os\npid = os.getpid()\n")
        self.socket = str(folder / ("long" * 40) / "fork")
        os.mkdir(os.path.dirname(self.socket))
        # `read` keeps the shell, whose children the started processes are as those of a node manager.
        self.manager = subprocess.Popen(
            ["bash", "-c", 'while read -r line; do eval "$line"; done'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder / "modules")},
        )

    def write_module(self, text: str) -> None:
        (self.folder / "modules" / "heavy.py").write_text(text)

    def start(self, *words: str, mark: str = "") -> dict[str, Any]:
        """Start the script; return what it says."""
        assert self.manager.stdin is not None
        assert self.manager.stdout is not None
        command = fork_server.command([sys.executable], self.socket, ["heavy"])
        line = shlex.join([*command, str(self.folder / "script.py"), *words])
        self.manager.stdin.write(f"cd {shlex.quote(str(self.folder / 'work'))}; MARK={mark} {line}\n")
        self.manager.stdin.flush()
        return json.loads(self.manager.stdout.readline())

    def end(self) -> None:
        self.manager.kill()
        self.manager.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()


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


def test_processes_are_forked_from_one_that_has_the_module(node: Node) -> None:
    first, second = node.start("$HOME", "two words", mark="1"), node.start(mark="2")
    assert first["parent"] == second["parent"] == first["loaded"] == second["loaded"]
    assert first["pid"] != second["pid"]
    assert (first["mark"], second["mark"]) == ("1", "2")
    assert first["words"] == ["$HOME", "two words"]
    assert first["folder"] == str(node.folder / "work")
    assert first["name"] == "__main__"
    assert first["drawn"] != second["drawn"]
    assert not first["script_folder"]


def test_only_the_user_may_ask_a_server(node: Node) -> None:
    node.start()
    assert stat.S_IMODE(os.stat(node.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(f"{node.socket}.lock").st_mode) == 0o600


def test_a_server_ends_with_the_node_manager(node: Node) -> None:
    said = node.start("stay")  # a server without children would end by itself
    try:
        assert said["parent"] == said["loaded"]
        node.manager.kill()
        node.manager.wait()
        assert has_ended(said["parent"])
    finally:
        os.kill(said["pid"], signal.SIGKILL)


@pytest.mark.nightly
def test_a_server_without_children_ends_and_another_is_started(node: Node) -> None:
    first = node.start()
    assert has_ended(first["parent"])
    second = node.start()
    assert first["parent"] == first["loaded"] != second["parent"] == second["loaded"]


def test_a_module_that_starts_a_thread_is_left_to_the_processes(node: Node) -> None:
    node.write_module("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    said = node.start("a", mark="1")
    assert said["parent"] == node.manager.pid
    assert (said["mark"], said["words"], said["loaded"]) == ("1", ["a"], None)


def test_unimportable_module_is_left_to_the_processes(node: Node) -> None:
    node.write_module("raise RuntimeError('no such device')\n")
    said = node.start()
    assert said["loaded"] is None
    assert said["parent"] != node.manager.pid


def test_a_server_that_dies_is_replaced(node: Node) -> None:
    first = node.start()
    assert first["parent"] == first["loaded"]
    os.kill(first["parent"], signal.SIGKILL)
    assert has_ended(first["parent"])
    second = node.start()
    assert first["parent"] != second["parent"] == second["loaded"]
