"""`rlinf train` from a machine that is no node: the driver goes to the head, with the job as one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.bootstrap import attach, node_facts, state
from rlinf_core.bootstrap.state import ClusterRecord, RecordedNode
from rlinf_core.job.load import load_job

Cli = Callable[..., Any]
FILE = """\
recipe: fake
cluster:
  num_nodes: 1
  hosts: [trainer]
  component_placement:
    actor: {node_group: node, placement: 0}
fake: {fail: "${env:HOW:-bug}"}
"""


class Head:
    """Stands for the head: remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], str]] = []

    def __call__(self, record: ClusterRecord, arguments: list[str], *, stdin: bytes = b"", **_: Any) -> int:
        self.asked.append((record.name, arguments, stdin.decode()))
        return 143


@pytest.fixture
def head(fake_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    made = Head()
    monkeypatch.setattr("rlinf_core.bootstrap.driver.run_on_head", made)
    monkeypatch.setattr(attach, "known", lambda: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(fake_recipe / "state"))
    for name in ("RLINF_ADDRESS", "RLINF_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    (fake_recipe / "farm.yaml").write_text(FILE)
    return made


def record(name: str, machine: str = "another") -> None:
    node = RecordedNode(0, "trainer", ("cluster",), "/usr/bin/python3", {}, machine=machine)
    state.save(ClusterRecord(name, "1234", "farm.yaml", "10.0.0.1:6379", False, (20000, 20999), (node,)))


def test_the_driver_goes_to_the_head(cli: Cli, head: Head, fake_recipe: Path) -> None:
    record("farm")
    ended = cli("train", "farm.yaml", "runner.max_steps=7", "--output", "json", "--verbose")
    assert (ended.code, ended.out) == (143, "")
    assert "the driver runs on trainer, and the run folder is there" in ended.err
    ((name, arguments, text),) = head.asked
    assert name == "farm"
    assert arguments == ["-m", "rlinf_cli", "train", "-", "--output", "json", "--told", "--verbose"]
    # Overrides and references have been followed.
    job = load_job("-", stdin=text.encode(), environ={})
    assert job.ok
    config: Any = job.config
    assert (config.runner.max_steps, config.fake.fail) == (7, "bug")
    assert not (fake_recipe / "runs").exists()


def test_what_the_file_says_is_told_once(cli: Cli, head: Head, rlinf: Cli) -> None:
    record("farm")
    table = "component  processes  group  nodes  units   per process"
    here = cli("train", "farm.yaml")
    assert here.err.count(table) == 1
    ((_, arguments, text),) = head.asked
    there = rlinf(*arguments[2:], stdin=text.encode(), environ={"RLINF_ADDRESS": "10.0.0.1:6379"})
    assert there.code == 0
    assert table not in there.err
    assert "run folder: runs/" in there.err


def test_a_node_of_the_cluster_runs_its_driver_itself(cli: Cli, head: Head) -> None:
    record("farm", machine=node_facts.machine())
    assert cli("train", "farm.yaml", "runner.max_steps=2", "-q").code == 0
    assert head.asked == []


def test_an_address_is_joined_from_here(cli: Cli, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_ADDRESS", "10.0.0.1:6379")
    assert cli("train", "farm.yaml", "runner.max_steps=2", "-q").code == 0
    assert head.asked == []


def test_hosts_that_nobody_brought_up(cli: Cli, head: Head, fake_recipe: Path) -> None:
    ended = cli("train", "farm.yaml", "-q")
    assert (ended.code, ended.out) == (3, "")
    assert "error: the machines of the file are not up\n  where: farm.yaml\n" in ended.err
    assert not (fake_recipe / "runs").exists()
