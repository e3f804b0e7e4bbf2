"""The preflight as a whole: who was reached, what was found, how it is told, and the status it ends with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlinf_cli.cluster import doctor
from rlinf_cli.cluster.checks.finding import CheckVerdict
from rlinf_cli.cluster.doctor_report import doctor_record, doctor_text
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.transports.transport import CommandOutcome, CommandResult, OnLine, Transport
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import Trial

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
        import time

        devices = {"found": {"type": "NVIDIA", "models": ["A800"] * 2}}
        software = {"python": [3, 11, 7], "ray": "2.60.0", "rlinf": "0.1.0", "fingerprint": "c0de"}
        room = {"folder": "/tmp/x", "disk_free": 1 << 40, "shm_free": 1 << 34, "taken": [], "ephemeral": [32768, 60999]}
        return {
            "event": "result",
            "machine": f"m{node.rank}",
            "address": f"10.0.0.{node.rank + 1}",
            "primary": "10.0.0.9",
            "record": None,
            "places": {"rlinf_core": "/a", "recipes": "/b"},
            "time": time.time(),
            "accelerators": devices,
            "cameras": {},
            "robots": [],
            "files_soft": 4096,
            "files_hard": 1 << 20,
            **software,
            **room,
            **self.facts[node.rank],
        }

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


def test_programs_of_the_recipe_are_run_where_their_component_is(examine: Examine, machines: Machines) -> None:
    trial = Trial("env", "simulator", "my.probe", ("metaworld",), each_process=True)
    own = "      env_configs: [{node_ranks: 2, python_interpreter_path: /opt/sim/bin/python, env_vars: [{GL: egl}]}]\n"
    report = examine(
        FILE.replace("ignore_hardware: true}", "}")
        .replace("{label: sim", "label: sim")
        .replace("label: sim, node_ranks: 2, hosts: h2, }", "label: sim\n      node_ranks: 2\n      hosts: h2")
        + own,
        trials=(trial,),
    )
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


def test_links_follow_what_was_found_where_nothing_is_declared(examine: Examine) -> None:
    uses = {tuple(finding.data["uses"]) for finding in examine().findings if finding.check == "link"}
    assert uses == {("Ray", "actor"), ("Ray", "actor-env"), ("actor-env",)}


def test_without_time_for_links_none_is_measured(examine: Examine, machines: Machines) -> None:
    assert not [finding for finding in examine(link_seconds=0).findings if finding.check == "link"]
    assert {verb for _, verb in machines.asked} == {"inspect"}


def test_unreachable_node_is_reported_and_others_are_checked(examine: Examine, machines: Machines) -> None:
    machines.results[1] = CommandResult(255, b"", b"refused", CommandOutcome.UNREACHABLE, "check that it is on")
    machines.facts[2] = {"ray": None}
    report = examine()
    assert (report.reached, report.ok, report.num_reached) == (False, False, 2)
    lost = next(finding for finding in report.findings if finding.verdict is CheckVerdict.UNREACHABLE)
    assert (lost.rank, lost.what, lost.help) == (1, "unreachable: refused", "check that it is on")
    assert [finding.rank for finding in report.findings if finding.verdict is CheckVerdict.FAULT] == [2]


def test_a_node_without_its_interpreter_was_reached(examine: Examine, machines: Machines) -> None:
    machines.results[2] = CommandResult(127, b"", b"sh: no such file", CommandOutcome.DONE)
    report = examine()
    assert (report.reached, report.ok, report.num_reached) == (True, False, 3)
    fault = next(finding for finding in report.findings if finding.verdict is CheckVerdict.FAULT)
    assert (fault.check, fault.rank) == ("interpreter", 2)
    assert "`/opt/python` does not exist" in fault.what


def test_no_node_at_all_is_told_of_each(examine: Examine, machines: Machines) -> None:
    for rank in range(3):
        machines.results[rank] = CommandResult(-1, b"", b"", CommandOutcome.TIMEOUT, "see to it")
    report = examine()
    assert (report.num_reached, len(report.findings)) == (0, 3)


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


def test_many_good_links_are_told_in_one_line(examine: Examine) -> None:
    report = examine()
    fine = [finding for finding in report.findings if finding.check == "link"]
    many = report._replace(findings=tuple(fine[0]._replace(where=str(index)) for index in range(20)))
    assert "20 links: 0.1 ms, 1 GB/s" in doctor_text(many)
    assert doctor_text(many, every_node=True).count("0.1 ms") == 20


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
