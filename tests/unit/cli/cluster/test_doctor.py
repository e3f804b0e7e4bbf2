"""The preflight, and links between nodes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rlinf_cli.cluster import checks, doctor
from rlinf_cli.cluster.checks import CheckVerdict, Measured, NodeLink, ProbedNode
from rlinf_cli.cluster.doctor_report import doctor_record, doctor_text
from rlinf_cli.cluster.inventory import NodeTarget, address_of
from rlinf_cli.cluster.node import node_agent
from rlinf_cli.cluster.node.node_agent import measure
from rlinf_cli.cluster.transport import CommandOutcome, CommandResult, OnLine, Transport
from rlinf_core import env_vars
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import Trial
from tests.unit.cli.cluster.conftest import request_in

Nodes = Callable[..., tuple[NodeTarget, ...]]
FILE = """\
cluster:
  num_nodes: 3
  component_placement:
    actor: {node_group: gpu, placement: 0-3}
    env: {node_group: sim, placement: 0}
  node_groups:
    - {label: gpu, node_ranks: 0-1, hosts: "h[0-1]"}
    - {label: sim, node_ranks: 2, hosts: h2, ignore_hardware: true}
"""


class Machines(Transport):
    """Three machines with two accelerators each; what a test changes is what is wrong with one."""

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, Any]] = {0: {}, 1: {}, 2: {}}
        self.results: dict[int, CommandResult] = {}
        self.asked: list[tuple[int, str]] = []
        self.trials: list[tuple[int, str, Any]] = []
        self.arguments: list[list[str]] = []
        self.tried: dict[str, Any] = {"found": {"verdict": "ok", "what": "a frame", "help": ""}}

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> CommandResult:
        size, _, rest = stdin.lstrip().partition(b"\n")
        request = json.loads(rest[int(size) :])
        self.asked.append((node.rank, request["verb"]))
        await asyncio.sleep(0)
        if node.rank in self.results:
            return self.results[node.rank]
        answer = getattr(self, f"_{request['verb']}")(node, request)
        line = json.dumps(answer).encode()
        if on_line is not None:
            on_line(line)
        if request["verb"] == "serve":
            await asyncio.sleep(60)
        return CommandResult(0, line + b"\n", b"")

    def _inspect(self, node: NodeTarget, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "event": "result", "machine": f"m{node.rank}", "address": f"10.0.0.{node.rank + 1}", "primary": "10.0.0.9",
            "record": None, "places": {"rlinf_core": "/a", "recipes": "/b"}, "time": time.time(),
            "accelerators": {"found": {"type": "NVIDIA", "models": ["A800"] * 2}}, "cameras": {}, "robots": [],
            "files_soft": 4096, "files_hard": 1 << 20, "python": [3, 11, 7], "ray": "2.60.0", "rlinf": "0.1.0",
            "fingerprint": "c0de", "folder": "/tmp/x", "disk_free": 1 << 40, "shm_free": 1 << 34, "taken": [],
            "ephemeral": [32768, 60999], **self.facts[node.rank],
        }  # fmt: skip

    def _try(self, node: NodeTarget, request: dict[str, Any]) -> dict[str, Any]:
        self.trials.append((node.rank, request["module"], request["environment"]))
        self.arguments.append(request["arguments"])
        return {"event": "result", **self.tried}

    def _serve(self, node: NodeTarget, request: dict[str, Any]) -> dict[str, Any]:
        assert request["address"] == f"10.0.0.{node.rank + 1}"
        return {"event": "listening", "port": 20016}

    def _measure(self, node: NodeTarget, request: dict[str, Any]) -> dict[str, Any]:
        return {"event": "result", "fault": None, "latency": 1e-4, "bandwidth": 1e9}


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
def examine(machines: Machines, make_nodes: Nodes) -> Callable[..., doctor.DoctorReport]:
    def run(text: str = FILE, **changes: Any) -> doctor.DoctorReport:
        cluster = load_job("-", stdin=text.encode()).cluster
        assert cluster is not None
        request = doctor.DoctorRequest(cluster, make_nodes(text=text), "id", {"fingerprint": "c0de"}, **changes)
        return asyncio.run(doctor.examine(request, machines, lambda _: None))

    return run


Examine = Callable[..., doctor.DoctorReport]


def test_nothing_is_wrong_with_sound_machines(examine: Examine, machines: Machines) -> None:
    report = examine()
    assert report.ok
    assert {finding.verdict for finding in report.findings} == {CheckVerdict.OK}
    text = doctor_text(report)
    assert "3 of 3 nodes asked: all checks passed" in text
    assert "nodes 0-2" in text
    # Ray's two ways, and the one between the node of env and that of the other actors; all in both of their roles.
    assert sorted(rank for rank, verb in machines.asked if verb == "measure") == [1, 2, 2]
    ways = [finding for finding in report.findings if finding.check == "link"]
    uses = {tuple(finding.data["uses"]) for finding in ways}
    assert uses == {("Ray", "actor"), ("Ray", "actor-env"), ("actor-env",)}
    # Many good ones are told in one line.
    many = report._replace(findings=tuple(ways[0]._replace(where=str(index)) for index in range(20)))
    assert "20 links: 0.1 ms, 1 GB/s" in doctor_text(many)
    assert doctor_text(many, every_node=True).count("0.1 ms") == 20
    # Without time for links none is measured.
    machines.asked.clear()
    assert not [finding for finding in examine(link_seconds=0).findings if finding.check == "link"]
    assert {verb for _, verb in machines.asked} == {"inspect"}


def test_programs_of_the_recipe_are_run_where_their_component_is(examine: Examine, machines: Machines) -> None:
    trial = Trial("env", "simulator", "my.probe", ("metaworld",), each_process=True)
    own = "env_configs: [{node_ranks: 2, python_interpreter_path: /opt/sim/bin/python, env_vars: [{GL: egl}]}]"
    report = examine(FILE.replace("ignore_hardware: true", own), trials=(trial,))
    (results,) = [finding for finding in report.findings if finding.check == "simulator"]
    assert (results.verdict, results.rank, results.what) == (CheckVerdict.OK, 2, "a frame")
    environment = {"interpreter": "/opt/sim/bin/python", "env": {"GL": "egl"}, "prepended": []}
    assert machines.trials == [(2, "my.probe", environment)]
    (arguments,) = machines.arguments
    assert arguments[0] == "metaworld"
    (variables,) = json.loads(arguments[1])
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("0", "1")
    machines.tried = {"fault": "No module named 'metaworld'"}
    (results,) = [finding for finding in examine(trials=(trial,)).findings if finding.check == "simulator"]
    assert results.verdict is CheckVerdict.FAULT
    assert "cannot run `my.probe`: No module named 'metaworld'" in results.what


def test_unreachable_node_is_reported_and_others_are_checked(examine: Examine, machines: Machines) -> None:
    machines.results[1] = CommandResult(255, b"", b"refused", CommandOutcome.UNREACHABLE, "check that it is on")
    machines.facts[2] = {"ray": None}
    report = examine()
    assert (report.reached, report.ok, report.num_reached) == (False, False, 2)
    lost = next(finding for finding in report.findings if finding.verdict is CheckVerdict.UNREACHABLE)
    assert (lost.rank, lost.what, lost.help) == (1, "unreachable: refused", "check that it is on")
    assert [finding.rank for finding in report.findings if finding.verdict is CheckVerdict.FAULT] == [2]
    machines.results = {rank: CommandResult(-1, b"", b"", CommandOutcome.TIMEOUT, "see to it") for rank in range(3)}
    report = examine()
    assert (report.num_reached, len(report.findings)) == (0, 3)


def test_a_node_without_its_interpreter_was_reached(examine: Examine, machines: Machines) -> None:
    machines.results[2] = CommandResult(127, b"", b"sh: no such file", CommandOutcome.DONE)
    report = examine()
    assert (report.reached, report.ok, report.num_reached) == (True, False, 3)
    fault = next(finding for finding in report.findings if finding.verdict is CheckVerdict.FAULT)
    assert (fault.check, fault.rank) == ("interpreter", 2)
    assert "`/opt/python` does not exist" in fault.what


def test_data_says_what_the_text_says(examine: Examine, machines: Machines) -> None:
    machines.facts[1] = {"disk_free": 0}
    report = examine()
    data = json.loads(json.dumps(doctor_record(report)))
    assert (data["schema"], data["ok"], data["nodes"], data["reached"]) == ("rlinf.doctor/1", False, 3, 3)
    (fault,) = [finding for finding in data["findings"] if finding["verdict"] == "fault"]
    assert fault["check"] == "disk"
    assert fault["what"] in doctor_text(report)
    assert fault["help"] in doctor_text(report)
    assert {tuple(sorted(finding)) for finding in data["findings"]} == {
        ("check", "data", "help", "rank", "verdict", "what", "where")
    }


def test_each_interpreter_of_a_node_is_judged_in_its_environment(examine: Examine, machines: Machines) -> None:
    env = "env_configs: [{node_ranks: all, python_interpreter_path: /opt/%s/python, env_vars: {WHO: %s}}]"
    text = "".join(f"    - {{label: {word}, node_ranks: 2, {env % (word, word)}}}\n" for word in ("a", "b"))
    said = {"python": [3, 11, 7], "ray": "2.60.0", "rlinf": "0.1.0", "fingerprint": "c0de", "places": {"recipes": "/b"}}
    missing = {**said, "ray": None, "fingerprint": None, "fault": "No such file or directory"}
    machines.facts[2] = {"environments": [said, missing]}
    report = examine(FILE + text, link_seconds=0)
    (fault,) = [finding for finding in report.findings if finding.verdict is CheckVerdict.FAULT]
    assert (fault.check, fault.rank) == ("interpreter", 2)
    assert fault.what == "`/opt/b/python` cannot report its versions: No such file or directory"
    whats = [finding.what for finding in report.findings if finding.check == "interpreter" and finding.rank == 2]
    assert whats[:2] == ["`/opt/python` is Python 3.11.7", "`/opt/a/python` is Python 3.11.7"]
    # Both interpreters have the same Ray and code, which is said once.
    assert [finding.check for finding in report.findings if finding.rank == 2].count("ray") == 1
    assert "nodes 0-2" in doctor_text(report)


def test_missing_accelerators_are_named_as_the_reason(examine: Examine, machines: Machines) -> None:
    for rank in range(3):
        machines.facts[rank] = {"accelerators": {"found": {"type": "none", "models": []}}}
    (fault,) = [finding for finding in examine(link_seconds=0).findings if finding.check == "placement"]
    assert fault.verdict is CheckVerdict.FAULT
    assert "no accelerator found, so ranks count nodes" in fault.help
    report = examine(FILE.replace("0-3", "0-1"), link_seconds=0)
    (warning,) = [finding for finding in report.findings if finding.check == "placement"]
    assert report.ok
    assert warning.what == "no accelerator found: `actor` is placed by rank, and would run on the CPU"
    assert {finding.what for finding in report.findings if finding.check == "accelerators"} == {"no accelerator found"}


def test_a_variable_that_is_to_be_forwarded_must_be_set(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARK", raising=False)
    (fault,) = [
        finding
        for finding in examine(FILE + "  forward_env: [MARK]\n").findings
        if finding.verdict is not CheckVerdict.OK
    ]
    assert (fault.check, fault.where) == ("environment", "this machine")
    assert fault.what == "`cluster.forward_env` names `MARK`, which is not set here"


def test_component_nodes_all_have_links_to_other_components() -> None:
    result = checks.links_of({"actor": range(4), "rollout": [4, 5], "env": [6]}, 7)
    assert all(link.one > link.other for link in result)
    ends = {
        use: {(link.one, link.other) for link in result if use in link.uses} for link in result for use in link.uses
    }
    assert ends == {
        "Ray": {(rank, 0) for rank in range(1, 7)},
        "actor": {(1, 0), (2, 1), (3, 2), (3, 0)},
        "rollout": {(5, 4)},
        "actor-rollout": {(4, 0), (5, 1), (4, 2), (5, 3)},
        "actor-env": {(6, rank) for rank in range(4)},
        "rollout-env": {(6, 4), (6, 5)},
    }
    assert checks.links_of({"actor": [0], "rollout": [0]}, 1) == []
    # There are no more ways than a few for each node.
    assert len(checks.links_of({"a": range(1000), "b": range(1000), "c": range(500, 1000)}, 1000)) < 5 * 1000


@pytest.mark.parametrize(
    ("facts", "declared", "address"),
    [
        ({"address": "10.0.0.5", "primary": "10.9.9.9"}, None, "10.0.0.5"),
        ({"address": "10.0.0.5", "primary": "10.9.9.9"}, "10.7.7.7", "10.7.7.7"),
        ({"address": "127.0.0.1", "primary": "10.9.9.9"}, None, "10.9.9.9"),
        ({"address": "2001:db8::7", "primary": "10.9.9.9"}, None, "10.9.9.9"),
        ({"address": None, "primary": "10.9.9.9", "record": {"alive": True, "address": "10.1.1.1"}}, None, "10.1.1.1"),
        ({"address": None, "primary": "10.9.9.9", "record": {"alive": False, "address": "10.1.1.1"}}, None, "10.9.9.9"),
    ],
)
def test_a_node_is_reached_where_the_others_will(facts: dict[str, object], declared: str | None, address: str) -> None:
    assert address_of(facts, declared) == address


@pytest.fixture
def here(make_nodes: Nodes) -> dict[int, ProbedNode]:
    """Two nodes that are both this machine."""
    text = "cluster: {num_nodes: 2, ports: 21300-21399}"
    nodes = [replace(node, interpreter=sys.executable) for node in make_nodes(text=text)]
    facts = {"address": None, "primary": "127.0.0.1", "record": None}
    return {node.rank: ProbedNode(node, facts, 0.0, 0.0) for node in nodes}


def test_a_way_is_measured(here: dict[int, ProbedNode]) -> None:
    link = NodeLink(1, 0, ("Ray",))
    (result,), left = asyncio.run(checks.measure([link], here, Transport(), seconds=30))
    assert (result.fault, left) == (None, [])
    assert 0 < result.latency < 1
    assert result.bandwidth > 1e6
    # Those for which there is no time are told.
    measured, left = asyncio.run(checks.measure([link], here, Transport(), seconds=-1))
    assert (measured, left) == ([], [link])
    (finding,) = checks.findings_of(measured, left, here)
    assert (finding.verdict, "1 of 1" in finding.what) == (CheckVerdict.SKIPPED, True)


class Busy(Transport):
    """Nodes that measure at once, and refuse to be asked for two links."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.most = 0

    async def run(
        self, node: NodeTarget, argv: Any, stdin: bytes = b"", *, deadline: float, on_line: OnLine | None = None
    ) -> CommandResult:
        assert node.rank not in self.busy
        self.busy.add(node.rank)
        self.most = max(self.most, len(self.busy))
        try:
            await asyncio.sleep(0)
            if request_in(stdin)["verb"] == "measure":
                return CommandResult(0, b'{"event": "result", "fault": null, "latency": 1e-3, "bandwidth": 1e9}', b"")
            assert on_line is not None
            on_line(b'{"event": "listening", "port": 1}')
            await asyncio.sleep(60)
            raise AssertionError("the measurement does not end")
        finally:
            self.busy.remove(node.rank)


@pytest.mark.parametrize("most", [1, 3, 64])
def test_no_node_has_two_measurements_at_once(make_nodes: Nodes, most: int) -> None:
    wanted = checks.links_of({"actor": range(6), "rollout": range(3, 9)}, 9)
    probed = {node.rank: ProbedNode(node, {"primary": "h"}, 0.0, 0.0) for node in make_nodes(9)}
    transport = Busy()
    measured, left = asyncio.run(checks.measure(wanted, probed, transport, seconds=60, most=most))
    assert (sorted(result.link for result in measured), left) == (sorted(wanted), [])
    assert {result.latency for result in measured} == {1e-3}
    assert transport.most <= 2 * most


def test_clients_without_the_secret_are_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(30)
        secret = hashlib.sha256(b"one").hexdigest()
        peer = stranger.getsockname()

        async def both() -> dict[str, object]:
            asked = asyncio.to_thread(measure, {"secret": secret, "peer": list(peer), "seconds": 0.1})
            task = asyncio.ensure_future(asked)
            line, _ = await asyncio.to_thread(stranger.accept)
            with line:
                # It throws back what it gets, which proves nothing.
                said = b""
                while len(said) < 64:
                    part = await asyncio.to_thread(line.recv, 64)
                    said += part
                    line.sendall(part)
                return await task

        assert asyncio.run(both()) == {"fault": "something else answers there"}


def test_crowd_of_strangers_keeps_no_node_out(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = hashlib.sha256(b"one").hexdigest()
    said: queue.Queue[dict[str, Any]] = queue.Queue()
    measured = threading.Event()

    def say(line: dict[str, Any]) -> None:
        if measured.is_set():
            raise SystemExit  # as where nobody reads any more
        said.put(line)

    monkeypatch.setattr(node_agent, "say", say)
    request = {"secret": secret, "address": "127.0.0.1", "ports": [21400, 21499], "deadline": 60.0}

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            node_agent.serve(request)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    port = said.get(timeout=30)["port"]
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(60)]
    result = measure({"secret": secret, "peer": ["127.0.0.1", port], "seconds": 0.1})
    assert result["fault"] is None
    answering = [thread for thread in threading.enumerate() if "_answer" in thread.name]
    assert len(answering) <= 32
    for member in crowd:
        member.close()
    measured.set()
    serving.join(60)
    assert not serving.is_alive()


def test_what_is_found_is_told_in_figures(here: dict[int, ProbedNode]) -> None:
    link = NodeLink(1, 0, ("Ray", "actor-env"))
    fast, slow, none = checks.findings_of(
        [
            Measured(link, None, 0.00005, 1.5e9),
            Measured(link, None, 0.002, 11e6),
            Measured(link, "no answer at 10.0.0.1:20016"),
        ],
        [],
        here,
    )
    assert fast.what == "0.05 ms, 1.5 GB/s (Ray, actor-env)"
    assert slow.what == "slow: 2 ms, 11 MB/s (Ray, actor-env)"
    assert f"`{env_vars.NET_IF.name}`" in slow.help
    assert none.what == "no answer at 10.0.0.1:20016 (Ray, actor-env)"
    assert [item.verdict for item in (fast, slow, none)] == [CheckVerdict.OK, CheckVerdict.WARNING, CheckVerdict.FAULT]
    assert all(a.where == b.where for a, b in pairwise((fast, slow, none)))


def test_ranges_of_figures_share_a_unit() -> None:
    assert checks.figures([0.0001, 0.0002], [5e8, 2e9]) == "0.1-0.2 ms, 0.5-2 GB/s"
    assert checks.figures([0.12], [7.13e8]) == "120 ms, 710 MB/s"
