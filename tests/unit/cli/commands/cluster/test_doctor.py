"""`rlinf doctor`, and commands that ask nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding
from rlinf_cli.cluster.doctor import DoctorReport
from rlinf_cli.cluster.doctor_report import doctor_text
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.node import cluster_records
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode
from rlinf_core.runners.storage.first_contact import ContactCheck, note_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.typed import Cli, text_file

Contract = Callable[[str, str], Any]


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        return text_file(tmp_path / "lab.yaml", text)

    return write


LAB = """\
cluster:
  num_nodes: 1
  ports: 21500-21699
  node_groups:
    - label: arm
      node_ranks: 0
      accelerators: {per_node: %d}
"""


def test_this_machine_is_looked_at(cli: Cli, contract: Contract, file: Callable[[str], Path]) -> None:
    ended = cli("doctor", file(LAB % 8), "--json")
    data = contract("doctor", ended.out)
    by_check = {finding["check"]: finding for finding in data["findings"]}
    assert ended.code == 1
    assert by_check["accelerators"]["verdict"] == "fault"
    assert "no accelerator found, 8 declared" in by_check["accelerators"]["what"]
    assert {by_check[name]["verdict"] for name in ("reach", "interpreter", "ray", "code", "clock", "ports")} == {"ok"}
    assert "asking 1 node," in ended.err


def test_checks_of_the_newest_run_are_told(
    cli: Cli, contract: Contract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first_step = ContactCheck("env", "first observations and step of env.train", "the spec of its environments")
    states = ContactCheck("actor", "states", "their description", "differs", 0.5, 0.1, seconds=1.25)
    for number, (experiment, checks) in enumerate(
        [("embodied", [states]), ("embodied", [first_step, states]), ("embodied", []), ("other", [first_step])]
    ):
        run = RunFolder.create(RunnerConfig.model_validate({"logger": {"experiment_name": experiment}}), "embodied")
        run.update(created=float(number))
        note_comparisons(run.path, checks)

    data = contract("doctor", cli("doctor", "laptop", "--json").out)
    (line,) = [finding for finding in data["findings"] if finding["check"] == "first contact"]
    assert line["verdict"] == "warning"
    assert line["what"].startswith("checks of the newest run: 1 agree, 1 differ, 1.2 s (`runs/embodied-")
    assert line["what"].endswith("these differ: states against their description")
    assert line["help"].startswith("look at `rlinf why runs/embodied-")
    assert line["data"]["seconds"] == 1.25
    data = contract("doctor", cli("doctor", "math_laptop", "--json").out)
    assert "first contact" not in [finding["check"] for finding in data["findings"]]


@pytest.mark.parametrize(("verdict", "help", "columns"), [(CheckVerdict.OK, "", 4), (CheckVerdict.FAULT, "end it", 5)])
def test_what_to_do_has_a_column_where_there_is_something(verdict: CheckVerdict, help: str, columns: int) -> None:
    report = DoctorReport((Finding("ports", verdict, "as seen", 0, "node 0 (h)", help),), 1, 1, 0.1)
    header, line = doctor_text(report).splitlines()[:2]
    assert header.split() == ["verdict", "check", "where", "what", "do"][:columns]
    assert line.endswith(help or "as seen")


def test_hardware_is_shown_declared_against_found(cli: Cli, contract: Contract, file: Callable[[str], Path]) -> None:
    assert cli.out("inspect", "hardware", file(LAB % 0)).splitlines()[1].split()[:3] == ["0", "arm", "this"]
    data = contract("hardware", cli("inspect", "hardware", file(LAB % 1), "--json").out)
    assert not data["ok"]
    (node,) = data["nodes"]
    assert node["declared"] == {"per_node": 1, "model": None}
    assert node["found"] == {"type": "none", "count": 0, "models": []}


@pytest.mark.parametrize("command", [("doctor",), ("inspect", "hardware")])
def test_nodes_that_nobody_can_reach_are_a_mistake_of_the_file(
    cli: Cli, file: Callable[[str], Path], command: tuple[str, ...]
) -> None:
    assert "has 2 nodes and no hosts" in cli.fails(2, *command, file("cluster: {num_nodes: 2}"))


def test_the_record_of_a_cluster_that_is_gone_is_told(cli: Cli, contract: Contract) -> None:
    import sys

    node = RecordedNode(0, None, (), sys.executable, {}, address="127.0.0.1")
    cluster_records.save(ClusterRecord("lab", "0badcafe", "lab.yaml", "127.0.0.1:21500", True, (21500, 21699), (node,)))
    ended = cli("status", "lab.yaml", "--json")
    data = contract("status", ended.out)
    assert ended.code == 3
    assert "no cluster `other` is known" in cli("status", "other.yaml").err
    assert (data["whole"], data["nodes"][0]["state"], data["jobs"]) == (False, "not started", None)


DECLARED = """\
cluster:
  num_nodes: 1
  node_groups:
    - {label: gpu, node_ranks: 0, accelerators: {per_node: %d}}
  component_placement: {actor: {node_group: %s, placement: all}}
"""
UNDECLARED = "cluster:\n  num_nodes: 1\n  component_placement: {actor: %s}\n"


def test_what_is_declared_must_be_found(cli: Cli, contract: Contract, file: Callable[[str], Path]) -> None:
    path = file(DECLARED % (8, "gpu"))
    assert cli("validate", path).code == 0
    ended = cli("validate", path, "--live", "--json")
    assert ended.code == 2
    (finding,) = contract("validate", ended.out)["diagnostics"]
    assert (finding["code"], finding["line"], finding["column"]) == ("accelerators-differ", 4, 35)
    assert finding["message"] == "group `gpu` declares 8 accelerators, found no accelerator on node 0"
    assert "asking 1 node" in ended.err
    assert cli("validate", file(DECLARED % (0, "gpu")), "--live").code == 0


def test_resource_ranks_are_checked_against_what_is_found(cli: Cli, file: Callable[[str], Path]) -> None:
    path = file(UNDECLARED % "0-7")
    assert "note[accelerators-unknown]" in cli("validate", path).out
    out = cli.printed(2, "validate", path, "--live")
    assert "asks for resources 1-7, but `cluster` has only resource 0" in out
    assert "accelerators-unknown" not in out


def test_the_layout_is_that_on_what_is_found(cli: Cli, file: Callable[[str], Path]) -> None:
    path = file(UNDECLARED % "all")
    assert cli("inspect", "placement", path).code == 2
    assert "1 node · 1 process" in cli.out("inspect", "placement", path, "--live")
    assert cli("inspect", "env", path, "--live", "-c", "actor", "-r", "0").code == 0


def test_nobody_is_asked_about_a_file_that_is_wrong(cli: Cli, file: Callable[[str], Path]) -> None:
    ended = cli("validate", file(DECLARED % (0, "nope")), "--live")
    assert ended.code == 2
    assert "unknown-node-group" in ended.out
    assert "asking" not in ended.err


def test_a_node_that_cannot_be_asked_is_3(cli: Cli, file: Callable[[str], Path]) -> None:
    path = file("cluster: {num_nodes: 2, hosts: 'nobody[0-1].invalid', ssh: {connect_timeout: 5}}\n")
    err = cli.fails(3, "validate", path, "--live")
    assert "2 of 2 nodes could not be probed" in err
    assert "node 1 (nobody1.invalid)" in err


def test_an_assumption_about_nodes_that_are_asked_is_refused(cli: Cli, file: Callable[[str], Path]) -> None:
    err = cli.fails(2, "validate", file(UNDECLARED % "all"), "--live", "--assume", "8")
    assert "`--assume` and `--live` exclude each other" in err
