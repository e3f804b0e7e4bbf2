"""Nodes that are simulated: they get what the agent would get, and answer as it would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster import inventory
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.transport import CommandOutcome, CommandResult, OnLine, Transport
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.job.load import load_job

CODE = "c0de"


def cluster_of(text: str) -> ClusterConfig:
    """Return the `cluster` section of a file without mistakes."""
    job = load_job("-", stdin=text.encode())
    job.raise_if_bad()
    assert job.cluster is not None
    return job.cluster


def request_in(stdin: bytes) -> dict[str, Any]:
    """Return the request behind the agent's source."""
    size, _, rest = stdin.lstrip().partition(b"\n")
    return json.loads(rest[int(size) :])


@dataclass
class FakeNode:
    """One simulated machine; what a test changes is what is wrong with it."""

    python: tuple[int, int, int] = (3, 11, 7)
    ray: str | None = "2.60.0"
    fingerprint: str | None = CODE
    machine: str = ""
    taken: list[list[Any]] = field(default_factory=list)
    disk_free: int = 1 << 40
    shm_free: int = 1 << 34
    record: dict[str, Any] | None = None
    ssh: CommandOutcome | None = None
    start_error: dict[str, Any] | None = None
    unlisted: bool = False
    hangs_in: str | None = None
    left: list[str] = field(default_factory=list)


class FakeCluster(Transport):
    """The simulated machines by rank, and the requests that they got, in order."""

    def __init__(self, count: int) -> None:
        self.nodes = {rank: FakeNode(machine=f"machine-{rank}") for rank in range(count)}
        self.log: list[tuple[int, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.argv: list[Sequence[str]] = []

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> CommandResult:
        request = request_in(stdin)
        verb = request["verb"]
        fake = self.nodes[node.rank]
        self.argv.append(argv)
        self.log.append((node.rank, verb))
        self.requests.append({**request, "to": node.rank})
        await asyncio.sleep(0)
        if fake.ssh is not None:
            return CommandResult(255, b"", b"ssh: as told", fake.ssh, "what to do about ssh")
        hello = b'{"event": "hello"}\n'
        if on_line is not None:
            on_line(hello.strip())
        if fake.hangs_in == verb:
            return CommandResult(-1, hello, b"", CommandOutcome.TIMEOUT)
        answer = getattr(self, f"_{verb}")(node, fake, request)
        return CommandResult(0, hello + json.dumps(answer).encode(), b"")

    def _probe(self, node: NodeTarget, fake: FakeNode, request: dict[str, Any]) -> dict[str, Any]:
        own_name = {"event": "result", "hostname": f"h{node.rank}", "user": 0, "machine": fake.machine}
        room = {"folder": "/tmp/x", "disk_free": fake.disk_free, "shm_free": fake.shm_free, "taken": fake.taken}
        soft = {"python": list(fake.python), "ray": fake.ray, "rlinf": "0.1.0", "fingerprint": fake.fingerprint}
        place = {"address": f"10.0.0.{node.rank + 1}", "primary": "10.9.9.9", "record": fake.record}
        return {**own_name, **room, **soft, **place, "places": {}}

    def _start(self, node: NodeTarget, fake: FakeNode, request: dict[str, Any]) -> dict[str, Any]:
        if fake.start_error is not None:
            return {"event": "error", "help": "", "rc": None, "lines": "", "why": "", **fake.start_error}
        address = f"10.0.0.{node.rank + 1}"
        from rlinf_core.node.node_facts import digest_of

        fake.record = {
            "process": f"{1000 + node.rank}:{len(self.log)}",
            "address": address,
            "gcs": f"{request['head_address'] or address}:{request['ports']['gcs']}",
            "folder": "/tmp/x",
            "spec": json.loads(json.dumps(request["spec"])),
            "head_process": request["head_process"],
            "from": request["from"],
            "alive": True,
            "token_digest": digest_of(request["token"]) if request["token"] else None,
        }
        return {"event": "result", **fake.record, "started": True}

    def _members(self, node: NodeTarget, fake: FakeNode, request: dict[str, Any]) -> dict[str, Any]:
        if fake.record is None or not fake.record["alive"]:
            return {"event": "error", "message": "the head is not up"}
        nodes = [
            {"rank": str(rank), "address": node.record["address"], "alive": not node.unlisted, "reason": "missed beats"}
            for rank, node in self.nodes.items()
            if node.record and node.record["alive"]
        ]
        return {"event": "result", "nodes": nodes, "jobs": self.jobs, "fault": None}

    def _end_jobs(self, node: NodeTarget, fake: FakeNode, request: dict[str, Any]) -> dict[str, Any]:
        return {"event": "result", "told": len(request["jobs"]), "left": 0}

    def _stop(self, node: NodeTarget, fake: FakeNode, request: dict[str, Any]) -> dict[str, Any]:
        result, fake.record = fake.record is not None, None
        rest = {"processes": fake.left, "ports": [], "files": [], "shared": []}
        return {"event": "result", "found": result, "ended": 6 if result else 0, **rest}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records go to the test's own folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


HOSTS = """\
cluster:
  num_nodes: {count}
  hosts: h[0-{last}]
"""


@pytest.fixture
def make_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[NodeTarget, ...]]:
    """`make_nodes(3)`: three nodes with hosts; `make_nodes(text=...)` those of a file."""

    def make(count: int = 3, text: str | None = None) -> tuple[NodeTarget, ...]:
        with monkeypatch.context() as patched:
            patched.setattr(inventory.sys, "executable", "/opt/python")
            return inventory.targets(cluster_of(text or HOSTS.format(count=count, last=count - 1)))

    return make
