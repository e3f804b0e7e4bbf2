"""Clusters from their names to their end: nodes started by hand, guardians, taking down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.down import DownReport, running_jobs, take_down
from rlinf_cli.cluster.identity import cluster_id
from rlinf_cli.cluster.inventory import NodeTarget, here, place, recorded_targets
from rlinf_cli.cluster.progress import Event, Phase
from rlinf_cli.cluster.transport import CommandOutcome
from rlinf_cli.cluster.up import UpRequest, bring_up
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.node import cluster_records
from rlinf_core.node.cluster_records import ClusterRecord, token_file
from rlinf_core.node.node_facts import folder_of
from rlinf_core.process import proc
from rlinf_core.process.proc import MARK, alive
from tests.unit.cli.cluster.conftest import CODE, FakeCluster
from tests.unit.cli.typed import text_file
from tests.waiting import until

Nodes = Callable[..., tuple[NodeTarget, ...]]


class Site:
    """A cluster of three that is up."""

    def __init__(self, nodes: tuple[NodeTarget, ...]) -> None:
        self.nodes = nodes
        self.fake = FakeCluster(3)
        asyncio.run(bring_up(UpRequest("c", "c.yaml", nodes, fingerprint=CODE), self.fake, self.quiet))
        self.fake.log.clear()

    def quiet(self, event: Event) -> None:
        pass

    def down(self) -> DownReport:
        record = cluster_records.recorded("c")
        nodes = recorded_targets(record) if record else self.nodes
        return asyncio.run(take_down("c", nodes, self.fake, self.quiet))


@pytest.fixture
def site(make_nodes: Nodes) -> Site:
    return Site(make_nodes(3))


def test_all_go_the_head_last_and_nothing_is_remembered(site: Site) -> None:
    report = site.down()
    assert report.ok
    assert all(node.found and node.reached and not node.left for node in report.nodes)
    assert site.fake.log[-1] == (0, "stop")
    assert cluster_records.recorded("c") is None
    assert not cluster_records.token_file("c").exists()
    again = site.down()
    assert again.ok
    assert not any(node.found for node in again.nodes)


def test_a_node_that_is_not_reached_stays_recorded(site: Site) -> None:
    site.fake.nodes[2].ssh = CommandOutcome.UNREACHABLE
    report = site.down()
    [failure] = report.failures
    assert (failure.rank, failure.phase, failure.message) == (2, Phase.STOP, "unreachable")
    record = cluster_records.recorded("c")
    assert record is not None
    assert [node.folder is not None for node in record.nodes] == [False, False, True]
    site.fake.nodes[2].ssh = None
    assert site.down().ok
    assert cluster_records.recorded("c") is None


def test_what_is_left_is_told(site: Site) -> None:
    site.fake.nodes[1].left = ["pid 7, `raylet`"]
    report = site.down()
    [failure] = report.failures
    assert failure.why == "process pid 7, `raylet`"
    assert report.nodes[1].left == ("process pid 7, `raylet`",)
    assert cluster_records.recorded("c") is not None


def test_jobs_are_the_heads_to_tell(site: Site) -> None:
    site.fake.jobs = [{"address": "10.0.0.1", "pid": 42, "command": "python train.py", "started": 1.0, "id": "01"}]
    jobs = asyncio.run(running_jobs("c", site.nodes[0], site.fake))
    assert [(job.pid, job.command) for job in jobs] == [(42, "python train.py")]
    record: Any = site.fake.nodes[0].record
    record["alive"] = False
    assert asyncio.run(running_jobs("c", site.nodes[0], site.fake)) == []


SLURM = {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "gpu[07-09,12]"}
BROKEN = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu["}


@pytest.mark.parametrize(
    ("file", "rank", "address", "environ", "expected"),
    [
        ("{num_nodes: 4}", 3, "10.0.0.1", SLURM, (3, "10.0.0.1")),
        ("{num_nodes: 4}", None, None, SLURM, (2, "gpu07")),
        ("{num_nodes: 4}", 1, None, SLURM, (1, "gpu07")),
        ("{num_nodes: 4}", 0, None, {}, (0, None)),
        # What the file says comes before Slurm, and after the option.
        ("{num_nodes: 4, head_address: 10.7.7.7}", None, None, SLURM, (2, "10.7.7.7")),
        ("{num_nodes: 4, head_address: 10.7.7.7}", 1, None, {}, (1, "10.7.7.7")),
        ("{num_nodes: 4, head_address: 10.7.7.7}", 1, "10.0.0.1", {}, (1, "10.0.0.1")),
        ("{num_nodes: 3, hosts: 'h[0-2]', head_address: 10.7.7.7}", None, None, {}, (None, "10.7.7.7")),
        ("{num_nodes: 4}", 1, "2001:db8::7", {}, "is an IPv6 address or has a port"),
        # Hosts, or a single node, are started from here.
        ("{num_nodes: 3, hosts: 'h[0-2]'}", None, None, SLURM, (None, None)),
        ("{num_nodes: 1}", None, None, SLURM, (None, None)),
        # Nothing says how to reach the nodes.
        ("{num_nodes: 4}", None, None, {}, "4 nodes and no hosts"),
        ("{num_nodes: 4}", 1, None, {}, "the address of node 0 is missing"),
        ("{num_nodes: 4}", 4, "h", {}, "the file has no node 4"),
        ("{num_nodes: 4}", None, "h", {}, "requires `--node-rank`"),
        ("{num_nodes: 4}", 1, None, BROKEN, "the address of node 0 is missing"),
    ],
)
def test_what_is_asked_for_and_what_slurm_says(
    make_nodes: Nodes,
    file: str,
    rank: int | None,
    address: str | None,
    environ: dict[str, str],
    expected: tuple[int | None, str | None] | str,
) -> None:
    nodes = make_nodes(text=f"cluster: {file}")
    declared = "10.7.7.7" if "head_address" in file else None
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            place(nodes, rank, address, environ, declared)
    else:
        assert place(nodes, rank, address, environ, declared) == expected
    # Nodes that start themselves are reached without ssh.
    assert {node.host for node in here(nodes)} == {None}


def test_the_token_is_the_heads(tmp_path: Path) -> None:
    assert identity.shared_token("c", None, None, 1.0) is None
    assert identity.shared_token("c", None, 0, 1.0) is None
    token = identity.token_of("c")
    assert identity.shared_token("c", None, 1, 1.0) == token
    other = text_file(tmp_path / "token", "t" * 64)
    other.chmod(0o600)
    assert identity.shared_token("c", str(other), 1, 1.0) == "t" * 64
    for content in (b"", b" \n", b"\xff\xfe" * 32, b"cluster:\n  num_nodes: 2\n"):
        other.write_bytes(content)
        with pytest.raises(RLinfError, match="the file holds no token of a cluster"):
            identity.shared_token("c", str(other), 1, 1.0)
    other.chmod(0o640)
    with pytest.raises(RLinfError, match="readable by others"):
        identity.shared_token("c", str(other), 1, 1.0)


def test_a_token_that_does_not_come_is_told_in_time() -> None:
    with pytest.raises(RLinfError, match="this node has no token") as caught:
        identity.shared_token("c", None, 1, 0.3)
    assert "--token-file" in str(caught.value.help)


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
        (self.folder / "node.json").write_text(json.dumps({"process": proc.identity(self.ray.pid), "since": 0.0}))
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
        assert alive(proc.identity(node.ray.pid))
        assert node.folder.exists()
        assert cluster_records.load("lab") is not None
    finally:
        node.ray.kill()
        node.ray.wait(timeout=30)
        node.short.cleanup()


def test_a_token_is_made_once() -> None:
    first = identity.token_of("a")
    assert identity.token_of("a") == first
    assert identity.token_of("a", fresh=True) != first
    # One that others could read is not used.
    token_file("a").chmod(0o644)
    with pytest.raises(RLinfError, match="readable by others"):
        identity.token_of("a")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("conf/hetero18.yaml", "hetero18"), ("-", "default"), ("a b;$(c).yaml", "a-b-c"), ("hetero18", "hetero18")),
        *(("机器.yaml", "cluster-ece969c3"), ("训练.yaml", "cluster-a29c0de1")),
    ],
)
def test_a_cluster_is_named_like_its_file(file: str, name: str) -> None:
    assert identity.cluster_name(file) == name


def test_full_disk_of_the_records_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing := Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(os, "pwrite", failing)
    with identity.locked("a"), pytest.raises(RLinfError, match="folder of cluster records cannot be used") as caught:
        identity.token_of("a")
    assert "No space left on device" in (caught.value.why or "")
    assert [path.name for path in cluster_records.folder().iterdir()] == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", "a b", "x" * 65])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        identity.cluster_name("a.yaml", name)


def test_the_lock_goes_with_the_clusters_record() -> None:
    with identity.locked("a"):
        assert (cluster_records.folder() / "a.lock").exists()
    assert not (cluster_records.folder() / "a.lock").exists()
    cluster_records.save(ClusterRecord("a", "1", "a.yaml", "", False, (1, 2)))
    with identity.locked("a"):
        pass
    assert (cluster_records.folder() / "a.lock").exists()


def test_the_lock_is_waited_for_and_held_alone() -> None:
    holder = "import sys\nfrom rlinf_cli.cluster.identity import locked\n"
    holder += "with locked('a'):\n print('held', flush=True)\n sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RLinfError, match="is working"), identity.locked("a", seconds=0.3):
            pass
        process.stdin.close()
        with identity.locked("a", seconds=30), pytest.raises(RLinfError), identity.locked("a"):
            pass
