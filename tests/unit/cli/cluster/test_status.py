"""The state of nodes: of a cluster that is up, and of one on its way."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rlinf_cli import console
from rlinf_cli.cluster import inventory, status
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.lifecycle import job_line
from rlinf_cli.cluster.progress import Event, Phase, PhaseTable, Progress
from rlinf_cli.cluster.status import NodeStatus, State, status_record, status_text
from rlinf_cli.cluster.transport import CommandOutcome, CommandResult, OnLine, Transport
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.node import cluster_records
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode
from tests.unit.cli.cluster.conftest import request_in
from tests.unit.cli.typed import Cli

Ask = Callable[[ClusterRecord], status.StatusReport]
SECRET = "agent.api_key=hunter2hunter2"


class Nodes(Transport):
    """Machines that answer as the agent would: `records` by rank, and who the head lists."""

    def __init__(self) -> None:
        alive = {"alive": True, "folder": "/tmp/f"}
        self.records: dict[int, Any] = {rank: {**alive, "address": f"10.0.0.{rank}"} for rank in range(3)}
        self.listed: dict[int, bool] = dict.fromkeys(range(3), True)
        self.listed_besides: list[tuple[int, bool]] = []
        self.kinds: dict[int, CommandOutcome] = {}
        self.head_answers = True
        self.asked: list[int] = []
        self.holders: dict[str, list[Any]] = {"claims": [], "waiting": []}

    async def run(
        self, node: NodeTarget, argv: Any, stdin: bytes = b"", *, deadline: float, on_line: OnLine | None = None
    ) -> CommandResult:
        await asyncio.sleep(0)
        if node.rank in self.kinds:
            return CommandResult(255, b"", b"said so", self.kinds[node.rank], "look after it")
        if request_in(stdin)["verb"] == "members":
            return self._members()
        self.asked.append(node.rank)
        said = {"python": [3, 11, 7], "ray": "2.60.0", "rlinf": "0.1.0", "record": self.records[node.rank]}
        said["holders"] = self.holders if node.rank == 1 else {"claims": [], "waiting": []}
        return CommandResult(0, json.dumps({"event": "result", **said}).encode(), b"")

    def _members(self) -> CommandResult:
        if not self.head_answers:
            return CommandResult(1, b'{"event": "error", "message": "the head is not up"}\n', b"")
        members = [
            {"rank": str(rank), "address": f"10.0.0.{rank}", "alive": alive, "reason": "missed beats"}
            for rank, alive in [*self.listed.items(), *self.listed_besides]
        ]
        jobs = [{"address": "10.0.0.0", "pid": 77, "command": f"python train.py {SECRET}", "started": 1.8e9}]
        answer = {"event": "result", "nodes": members, "jobs": jobs, "fault": None}
        return CommandResult(0, json.dumps(answer).encode(), b"")


@pytest.fixture
def cluster() -> ClusterRecord:
    nodes = tuple(RecordedNode(rank, f"h{rank}", ("g",), "/opt/python", {}) for rank in range(3))
    return ClusterRecord("lab", "id", "lab.yaml", "10.0.0.0:20000", True, (20000, 20999), nodes)


@pytest.fixture
def machines() -> Nodes:
    return Nodes()


@pytest.fixture
def ask(machines: Nodes) -> Ask:
    return lambda cluster: asyncio.run(status.ask_all(cluster, machines, lambda _: None))


def states(report: status.StatusReport) -> list[State]:
    return [node.state for node in report.nodes]


def test_a_whole_cluster_and_its_jobs(ask: Ask, cluster: ClusterRecord) -> None:
    report = ask(cluster)
    assert report.all_up
    text = status_text(report)
    assert "cluster lab: 3 of 3 nodes are up, head 10.0.0.0:20000" in text
    assert "python train.py agent.api_key=*" in text
    assert "hunter2" not in text + job_line((report.jobs or ())[0])
    assert [line.split()[:3] for line in text.splitlines() if line.strip().startswith("2 ")] == [["2", "g", "h2"]]


@pytest.mark.parametrize(
    ("facts", "said", "state", "detail", "help"),
    [
        ("records", None, State.ABSENT, "the cluster does not run there", "rlinf up"),
        ("records", {"alive": False, "folder": "/tmp/f", "address": "a"}, State.DIED, "/tmp/f/up.log", "rlinf up"),
        ("listed", False, State.NOT_JOINED, "does not list it: missed beats", "rlinf up"),
        ("kinds", CommandOutcome.UNREACHABLE, State.UNREACHABLE, "unreachable: said so", "look after it"),
    ],
)
def test_a_node_that_is_missing_is_told_with_the_remedy(
    ask: Ask, machines: Nodes, cluster: ClusterRecord, facts: str, said: Any, state: State, detail: str, help: str
) -> None:
    getattr(machines, facts)[2] = said
    report = ask(cluster)
    assert not report.all_up
    assert states(report) == [State.UP, State.UP, state]
    assert detail in report.nodes[2].detail
    assert help in report.nodes[2].help
    assert f"node 2 (h2): {report.nodes[2].detail}" in status_text(report)


def test_the_dead_raylet_of_a_repaired_node_does_not_count(ask: Ask, machines: Nodes, cluster: ClusterRecord) -> None:
    machines.listed_besides = [(2, False)]
    assert ask(cluster).all_up
    machines.listed[2], machines.listed_besides = False, [(2, True)]
    assert ask(cluster).all_up


def test_without_the_head_nobody_knows_who_has_joined(ask: Ask, machines: Nodes, cluster: ClusterRecord) -> None:
    # Nodes that started themselves are known by the head: there is no way from here to them.
    machines.listed.pop(2)
    report = ask(replace(cluster, nodes=tuple(node._replace(host=None) for node in cluster.nodes)))
    assert states(report) == [State.UP, State.UP, State.NOT_JOINED]
    assert (machines.asked, report.nodes[1].address) == ([0], "10.0.0.1")
    machines.head_answers = False
    machines.records[0] = None
    report = ask(cluster)
    assert states(report) == [State.ABSENT, State.UNCERTAIN, State.UNCERTAIN]
    assert report.jobs is None
    assert "jobs: unknown" in status_text(report)


def test_a_cluster_that_was_started_by_other_means_has_no_name() -> None:
    node = NodeStatus(0, (), "pc", State.UP, "10.0.0.1", "3.11.7", "2.60.0", "0.1.0")
    report = status.StatusReport((node,), (), 0.5, address="10.0.0.1:6379")
    assert report.all_up
    assert status_text(report).startswith("a cluster not started by `rlinf up`: 1 node, head 10.0.0.1:6379\n")
    data = status_record(report)
    assert (data["cluster"], data["file"], data["authenticated"]) == (None, None, None)
    assert data["address"] == "10.0.0.1:6379"


def test_data_says_what_the_text_says(ask: Ask, machines: Nodes, cluster: ClusterRecord) -> None:
    machines.records[1] = None
    data = json.loads(json.dumps(status_record(ask(cluster))))
    assert (data["schema"], data["cluster"], data["whole"]) == ("rlinf.status/1", "lab", False)
    assert [node["state"] for node in data["nodes"]] == ["up", "not started", "up"]
    assert data["jobs"][0]["pid"] == 77
    assert data["jobs"][0]["command"] == "python train.py agent.api_key=**************"


def test_who_holds_devices_and_who_waits_is_shown(machines: Nodes, cluster: ClusterRecord, ask: Ask) -> None:
    about = {"run": "/runs/a", "step": 12, "total": 30, "left": 120.0, "since": 1.8e9}
    waits = {"command": "rlinf eval", "waits_for": "accelerator 0 of node 1: /runs/a", "since": 1.8e9}
    user = os.getuid()
    machines.holders = {
        "claims": [
            {"device": "NVIDIA:0", "pid": 77, "user": user, "about": about},
            {"device": "NVIDIA:1", "pid": 78, "user": user, "about": None},
        ],
        "waiting": [{"device": "", "pid": 79, "user": user, "about": waits}],
    }
    report = ask(cluster)
    text = status_text(report)
    for words in ("NVIDIA 0", "/runs/a", "step 12 of 30, about 2 min", "process 78, which does not answer"):
        assert words in text
    assert "rlinf eval, process 79" in text
    assert "accelerator 0 of node 1: /runs/a" in text
    nodes = status_record(report)["nodes"]
    assert nodes[0]["holdings"] == nodes[2]["waiting"] == []
    (first, second), (waiting,) = nodes[1]["holdings"], nodes[1]["waiting"]
    assert (first["device"], first["run"], first["step"], first["steps"]) == ("NVIDIA:0", "/runs/a", 12, 30)
    assert (second["answers"], second["run"], second["since"]) == (False, None, None)
    assert waiting["waits_for"] == "accelerator 0 of node 1: /runs/a"


def test_without_a_cluster_this_machines_holders_are_shown(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, cluster: ClusterRecord
) -> None:
    monkeypatch.setattr(status, "listing", lambda: {"claims": [], "waiting": []})
    assert "rlinf up FILE" in cli.fails(3, "status")
    assert "no cluster `other`" in cli.fails(3, "status", "--name", "other")
    one = {"device": "NVIDIA:0", "pid": 77, "user": os.getuid(), "about": {"run": "/runs/a", "step": 12}}
    monkeypatch.setattr(status, "listing", lambda: {"claims": [one], "waiting": []})
    text = cli.printed(3, "status")
    assert text.startswith("no cluster\n")
    assert "NVIDIA 0" in text
    assert "/runs/a" in text
    for name in ("one", "two"):
        cluster_records.save(replace(cluster, name=name))
    assert "`one`, `two`" in cli.fails(3, "status")


def table_of(count: int) -> PhaseTable:
    config = ClusterConfig.model_validate({"num_nodes": count, "hosts": [f"h{rank}" for rank in range(count)]})
    return PhaseTable(inventory.targets(config), Phase.VERIFY)


def test_each_step_of_few_nodes_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of(2)
    with table.shown():
        table.update(Event(1, Phase.JOIN, Progress.BEGUN, deadline=60))
        table.update(Event(1, Phase.JOIN, Progress.DONE, "10.0.0.2"))
        table.update(Event(0, Phase.HEAD, Progress.FAILED, "port 1 is taken"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["node 1 (h1): join ok (10.0.0.2)", "node 0 (h0): start head failed (port 1 is taken)"]
    # Of many nodes only failures are lines.
    table = table_of(100)
    for rank in range(100):
        table.update(Event(rank, Phase.PROBE, Progress.DONE if rank != 7 else Progress.FAILED, "x"))
    assert capsys.readouterr().err.splitlines() == ["node 7 (h7): probe failed (x)"]


def test_a_wait_is_told_with_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of(5)
    for rank in range(5):
        table.update(Event(rank, Phase.JOIN, Progress.BEGUN, deadline=60))
    table.remind()
    assert capsys.readouterr().err == ""
    table._word_at = 0.0
    table.remind()
    waits = ", ".join(f"node {rank} in join, 0 of 60 s" for rank in range(3))
    assert capsys.readouterr().err == f"waiting for {waits}, and 2 more\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("count", [3, 100])
def test_a_terminal_gets_a_table(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console.verbosity, "quiet", False)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = table_of(count)
    with table.shown():
        for rank in range(count):
            table.update(Event(rank, Phase.JOIN, Progress.BEGUN, deadline=60))
        table.update(Event(2, Phase.JOIN, Progress.FAILED, "a reason that is far too long for a terminal " * 3))
    shown = screen.getvalue()
    assert "join, 0 of 60 s" in shown
    assert "join failed" in shown
    if count > 24:
        assert "100 nodes: 100 in join" in shown


def test_answers_of_nodes_are_text_not_markup_or_control() -> None:
    table = table_of(1)
    row = table._rows[0]
    row.node = replace(row.node, host="[red]h0")
    row.detail = "\x1b]0;x\x07 [bold]"
    output = io.StringIO()
    Console(file=output, width=120, force_terminal=True).print(table._grid())
    assert "[red]h0" in output.getvalue()
    assert "[bold]" in output.getvalue()
    assert "\x1b]" not in output.getvalue()
