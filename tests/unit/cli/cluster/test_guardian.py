"""The guardian of a node in the foreground: it takes the node down when the command is killed, else it does nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlinf_cli.cluster.identity import cluster_id
from rlinf_core.node import cluster_records
from rlinf_core.node.cluster_records import ClusterRecord
from rlinf_core.node.node_facts import folder_of
from rlinf_core.process.proc import MARK, alive, identity
from tests.waiting import until

COMMAND = """\
import sys, time
from rlinf_cli.cluster.block import guarded
with guarded("lab", 0) as dismiss:
    print("guarded", flush=True)
    sys.stdin.read()
    dismiss()
"""


class Node:
    """A node with one process of a cluster, and the command that guards it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # A longer path would not be used: Ray's sockets would not fit.
        self.short = tempfile.TemporaryDirectory(prefix="g", dir="/tmp")
        monkeypatch.setenv("TMPDIR", self.short.name)
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        self.folder = Path(folder_of(cluster_id("lab")))
        self.folder.mkdir(parents=True, mode=0o700)
        env = {**os.environ, MARK: cluster_id("lab")}
        self.ray = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
        (self.folder / "node.json").write_text(json.dumps({"process": identity(self.ray.pid), "since": 0.0}))
        cluster_records.save(ClusterRecord("lab", cluster_id("lab"), "lab.yaml", "", False, (1, 2)))
        self.command = subprocess.Popen(
            [sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.command.stdout is not None
        assert self.command.stdout.readline() == "guarded\n"

    def guardians(self) -> list[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if _is_guardian(pid, Path(self.short.name))]


def _is_guardian(pid: int, folder: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"rlinf_cli.cluster.block" in words and os.fsencode(folder) in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_a_killed_command_leaves_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch)
    try:
        node.command.send_signal(signal.SIGKILL)
        assert node.ray.wait(timeout=60) == -signal.SIGTERM
        until(lambda: not node.folder.exists() and cluster_records.load("lab") is None, "the end of the node", 60)
        until(lambda: not node.guardians(), "the end of the guardian", 60)
        assert list(cluster_records.folder().iterdir()) == []
    finally:
        node.ray.kill()
        node.command.communicate(timeout=30)
        node.short.cleanup()


def test_a_dismissed_guardian_leaves_the_node_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch)
    try:
        node.command.communicate(timeout=60)
        assert node.command.returncode == 0
        until(lambda: not node.guardians(), "the end of the guardian", 60)
        assert alive(identity(node.ray.pid))
        assert node.folder.exists()
        assert cluster_records.load("lab") is not None
    finally:
        node.ray.kill()
        node.ray.wait(timeout=30)
        node.short.cleanup()
