"""`rlinf up`, `rlinf down` over simulated nodes, `rlinf doctor`, and commands that ask nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_cli.cluster import block
from rlinf_cli.cluster.checks import CheckVerdict, Finding
from rlinf_cli.cluster.doctor import DoctorReport
from rlinf_cli.cluster.doctor_report import doctor_text
from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.transport import CommandOutcome, Transport
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.node import attach, cluster_records
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode
from rlinf_core.process import proc
from rlinf_core.runners.storage.first_contact import ContactCheck, note_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.cluster.conftest import CODE, FakeCluster
from tests.unit.cli.typed import Cli, text_file
from tests.waiting import until

FILE = """\
cluster:
  num_nodes: 3
  node_groups:
    - label: a
      node_ranks: 0-2
      hosts: h[0-2]
      env_configs:
        - node_ranks: 1
          python_interpreter_path: /opt/b/bin/python
          env_vars: [{API_TOKEN: "${env:PATH}"}, {PLAIN: x}]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster(3)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Transport, "run", fake.run)
    monkeypatch.setattr(node_probe, "software", lambda env: {"fingerprint": CODE})
    (tmp_path / "lab.yaml").write_text(FILE)
    return fake


def test_up_tells_each_step_and_ends_with_one_line(cli: Cli, site: FakeCluster) -> None:
    ended = cli("up", "lab.yaml")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("cluster lab is up: 3 nodes, head 10.0.0.1:20000 (3 started), ")
    assert "node 2 (h2): join ok (10.0.0.3)" in ended.err.splitlines()
    again = cli("up", "lab.yaml", "--quiet")
    assert "(nothing to start)" in again.out
    assert again.err == ""


def test_json_keeps_its_contract(cli: Cli, site: FakeCluster, contract: Callable[[str, str], Any]) -> None:
    site.nodes[2].ssh = CommandOutcome.KEY_REFUSED
    out = cli.printed(3, "up", "lab.yaml", "--json")
    report = contract("up", out)
    assert (report["ok"], report["address"]) == (False, "10.0.0.1:20000")
    assert [node["up"] for node in report["nodes"]] == [True, True, False]
    assert report["failures"][0]["help"] == "what to do about ssh"
    site.nodes[2].ssh = None
    assert contract("down", cli.out("down", "--json"))["ok"] is True


def test_a_failure_names_node_phase_cause_and_remedy(cli: Cli, site: FakeCluster) -> None:
    site.nodes[1].start_error = {"message": "Ray ended", "why": "exit code 9: x", "help": "h", "rc": 9, "lines": "a\nb"}
    ended = cli("up", "lab.yaml")
    assert ended.code == 3
    block = ended.err[ended.err.index("error:") :].splitlines()
    assert block[:7] == [
        "error: join: Ray ended",
        "  where: node 1 (h1)",
        "    why: exit code 9: x",
        "         last lines:",
        "         a",
        "         b",
        "     do: h",
    ]
    assert ended.out.startswith("cluster lab is incomplete: 2 of 3 nodes are up, head 10.0.0.1:20000 (2 started)")
    assert "`rlinf down` to end all" in ended.err


def test_rollback_takes_down_what_was_started(cli: Cli, site: FakeCluster) -> None:
    site.nodes[1].ssh = CommandOutcome.UNREACHABLE
    assert cli("up", "lab.yaml", "--rollback").code == 3
    assert all(node.record is None for node in site.nodes.values())
    assert cluster_records.recorded() is None
    assert [rank for rank, verb in site.log if verb == "stop"] == [2, 0]


def test_the_plan_touches_nothing_and_hides_secrets(
    cli: Cli, site: FakeCluster, contract: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = cli.out("up", "lab.yaml", "--dry-run")
    assert "node 1  ssh h1  joins node 0\n  interpreter  /opt/b/bin/python\n" in out
    # What the file gives to processes is nothing that Ray is started with.
    assert "API_TOKEN" not in out
    assert "PLAIN" not in out
    assert "RLINF_NODE_RANK=1" in out
    assert os.environ["PATH"] not in out
    plan = contract("up-plan", cli("up", "lab.yaml", "--dry-run", "--json").out)
    assert [node["head"] for node in plan["nodes"]] == [True, False, False]
    assert site.log == []
    assert cluster_records.names() == []


def test_what_contradicts_is_an_error_of_status_1(cli: Cli, site: FakeCluster) -> None:
    cli("up", "lab.yaml")
    ended = cli("up", "lab.yaml", "cluster.ports=21000-21999")
    assert ended.code == 1
    assert "the running nodes do not match the file" in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    "typed",
    [
        *("none.yaml", "bare.yaml", "lab.yaml --node-rank 3", "lab.yaml --head-address h", "lab.yaml --name ../x"),
        *("lab.yaml --sync nowhere", "lab.yaml cluster.ports=20000-20010", "lab.yaml --with time=1"),
    ],
)
def test_a_wrong_file_and_wrong_options_are_status_2(cli: Cli, site: FakeCluster, tmp_path: Path, typed: str) -> None:
    (tmp_path / "bare.yaml").write_text("cluster: {num_nodes: 2}\n")
    err = cli.refuses(2, "up", *typed.split())
    assert err.startswith(("error", "none.yaml", "<overrides>"))
    assert site.log == []


def test_down_without_a_record_asks_the_nodes_of_the_file(
    cli: Cli, site: FakeCluster, contract: Callable[[str, str], Any]
) -> None:
    assert cli("down").out == "no cluster is up\n"
    assert cli("down", "--name", "lab").out == "cluster lab is not up\n"
    for arguments, name in (((), None), (("--name", "lab"), "lab")):
        data = contract("down", cli.out("down", "--json", *arguments))
        assert (data["ok"], data["cluster"], data["nodes"]) == (True, name, [])
    assert cli.out("down", "lab.yaml").startswith("cluster lab: found nothing on 3 nodes, ")
    assert [rank for rank, verb in site.log if verb == "stop"] == [1, 2, 0]


def test_down_on_the_machine_of_a_node_that_started_itself(
    cli: Cli, site: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "known", lambda: attach.Known("lab", "10.0.0.1:20000", None))
    err = cli.refuses(3, "down")
    assert "a node of cluster `lab` runs here" in err
    assert "rlinf down FILE --node-rank K" in err
    assert cli("down", "--name", "other").out == "cluster other is not up\n"
    assert "it requires FILE" in cli.fails(2, "down", "--node-rank", "1")


def test_down_asks_about_jobs(cli: Cli, site: FakeCluster) -> None:
    cli("up", "lab.yaml")
    site.jobs = [{"address": "10.0.0.1", "pid": 7, "command": "python train.py\nand more", "started": 1, "id": "1"}]
    err = cli.fails(1, "down")
    assert "1 job running on cluster lab" in err
    assert "pid 7 on 10.0.0.1: python train.py ..." in err
    assert site.nodes[0].record is not None
    ended = cli("down", "--force")
    assert ended.code == 0
    assert "ending pid 7 on 10.0.0.1: python train.py ..." in ended.err
    assert site.nodes[0].record is None
    # Drivers are told before any Ray is taken away.
    verbs = [verb for _, verb in site.log]
    assert verbs[-6:] == ["end_jobs"] * 3 + ["stop"] * 3


def test_of_several_clusters_one_is_named(cli: Cli, site: FakeCluster) -> None:
    cli("up", "lab.yaml")
    cli("down", "--name", "lab")
    cli("up", "lab.yaml", "--name", "one")
    for node in site.nodes.values():
        node.record = None
    cli("up", "lab.yaml", "--name", "two")
    assert "several clusters are up: `one`, `two`" in cli.fails(3, "down")


@pytest.mark.parametrize("template", ["slurm", "kuberay"])
def test_templates_are_printed(cli: Cli, site: FakeCluster, template: str) -> None:
    assert "lab" in cli.out("up", "lab.yaml", "--print", template)
    err = cli.refuses(2, "up", "lab.yaml", "agent.api_key=hunter2hunter2", "--print", template)
    assert "`agent.api_key` is a secret, and the script keeps the command line" in err
    assert "the script reads the file when it runs" in cli.refuses(2, "up", "-", "--print", template)
    assert site.log == []


def test_a_ray_job_with_a_base_of_its_own_is_refused(cli: Cli, site: FakeCluster) -> None:
    Path("job.yaml").write_text("extends: lab.yaml\ncluster: {head_address: 10.0.0.1}\n")
    arguments = ("up", "job.yaml", "--print", "kuberay", "--with", "volume=runs:/runs")
    assert "`lab.yaml` is not in its pods" in cli.refuses(2, *arguments, "--with", "job")
    assert "`cluster.head_address` has no effect" in cli(*arguments).err


def test_starting_needs_neither_ray_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(FILE)
    code = (
        "import sys; from rlinf_cli.main import main\n"
        "assert main(['up', 'lab.yaml', '--dry-run']) == 0\n"
        "assert not {'ray', 'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_with_what_it_had_started(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "lab.yaml").write_text(FILE)
    pids = tmp_path / "pids"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 600\n")
    ssh.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{ssh.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    argv = [sys.executable, "-m", "rlinf_cli", "up", "lab.yaml"]
    with subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        until(lambda: pids.exists() and len(pids.read_text().split()) >= 3, "the start of three ssh", 60)
        run.send_signal(number)
        _, said = run.communicate(timeout=30)
    assert run.returncode == code
    assert b"Traceback" not in said
    for pid in pids.read_text().split():
        until(lambda pid=int(pid): proc.identity(pid) is None, f"the end of ssh ({pid})")


def test_block_takes_the_nodes_down_when_it_is_stopped(
    cli: Cli, site: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(block, "time", clock)
    assert "lab: the nodes run until stopped" in cli.fails(143, "up", "lab.yaml", "--block")
    assert all(node.record is None for node in site.nodes.values())
    assert cluster_records.recorded() is None


def test_block_lets_running_jobs_end_first(cli: Cli, site: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    site.jobs = [{"address": "10.0.0.1", "pid": 42, "command": "train", "started": 1.0, "id": "01"}]
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert all(node.record is not None for node in site.nodes.values())
        if len(waits) == 3:
            site.jobs = []
        # Asked again, it does not end sooner.
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(block, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert cli("up", "lab.yaml", "--block").code == 143
    assert len(waits) == 3
    assert all(node.record is None for node in site.nodes.values())


def test_block_leaves_no_node_when_one_fails(cli: Cli, site: FakeCluster) -> None:
    site.nodes[1].start_error = {"message": "Ray ended", "why": "w", "help": "h", "rc": 9, "lines": ""}
    assert cli("up", "lab.yaml", "--block").code == 3
    assert all(node.record is None for node in site.nodes.values())
    # What was up before is left alone.
    assert cli("up", "lab.yaml").code == 3
    assert cli("up", "lab.yaml", "--block").code == 3
    assert [rank for rank, node in site.nodes.items() if node.record is not None] == [0, 2]


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

    data = contract("doctor", cli("doctor", "embodied/pick-laptop", "--json").out)
    (line,) = [finding for finding in data["findings"] if finding["check"] == "first contact"]
    assert line["verdict"] == "warning"
    assert line["what"].startswith("checks of the newest run: 1 agree, 1 differ, 1.2 s (`runs/embodied-")
    assert line["what"].endswith("these differ: states against their description")
    assert line["help"].startswith("look at `rlinf why runs/embodied-")
    assert line["data"]["seconds"] == 1.25
    data = contract("doctor", cli("doctor", "math/sums-laptop", "--json").out)
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
    err = cli.fails(2, "validate", path, "--live", "--assume", "8")
    assert "`--assume` and `--live` exclude each other" in err
    # Nobody is asked about a file that is wrong.
    ended = cli("validate", file(DECLARED % (0, "nope")), "--live")
    assert (ended.code, "unknown-node-group" in ended.out, "asking" in ended.err) == (2, True, False)
    # The layout is that on what is found.
    path = file(UNDECLARED % "all")
    assert cli("inspect", "placement", path).code == 2
    assert "1 node · 1 process" in cli.out("inspect", "placement", path, "--live")
    assert cli("inspect", "env", path, "--live", "-c", "actor", "-r", "0").code == 0


def test_a_node_that_cannot_be_asked_is_3(cli: Cli, file: Callable[[str], Path]) -> None:
    path = file("cluster: {num_nodes: 2, hosts: 'nobody[0-1].invalid', ssh: {connect_timeout: 5}}\n")
    err = cli.fails(3, "validate", path, "--live")
    assert "2 of 2 nodes could not be probed" in err
    assert "node 1 (nobody1.invalid)" in err
