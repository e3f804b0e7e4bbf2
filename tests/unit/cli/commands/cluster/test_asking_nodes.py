"""`--live`: what a file says against what its nodes have, here this machine alone; the real agent, no ssh, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.typed import Cli

Contract = Callable[[str, str], Any]

DECLARED = """\
cluster:
  num_nodes: 1
  node_groups:
    - {label: gpu, node_ranks: 0, accelerators: {per_node: %d}}
  component_placement: {actor: {node_group: %s, placement: all}}
"""
UNDECLARED = "cluster:\n  num_nodes: 1\n  component_placement: {actor: %s}\n"


@pytest.fixture(autouse=True)
def no_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "lab.yaml"
        path.write_text(text)
        return path

    return write


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
