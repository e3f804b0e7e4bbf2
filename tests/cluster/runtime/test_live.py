"""`validate --live` and `inspect placement --live` ask the nodes of a file over real ssh."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(180)]

DECLARED = """\
cluster:
  num_nodes: 3
  ssh: {connect_timeout: 5}
  node_groups:
    - label: trainer
      node_ranks: 0-1
      hosts: trainer[0-1]
      accelerators: {per_node: 2}
    - {label: render, node_ranks: 2, hosts: render0}
  component_placement:
    actor: {node_group: trainer, placement: all}
    env: {node_group: render, placement: 0}
"""
UNDECLARED = DECLARED.replace("      accelerators: {per_node: 2}\n", "")


def test_what_is_declared_is_compared_with_what_the_nodes_have(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(DECLARED)
    with ExitStack() as stack:
        stack.enter_context(hosts["trainer0"].nvidia(2))
        with hosts["trainer1"].nvidia(2):
            sound = hosts.control.rlinf("validate", str(path), "--live")
        stack.enter_context(hosts["trainer1"].nvidia(1))
        lacking = hosts.control.rlinf("validate", str(path), "--live", "--json")
    assert sound.returncode == 0, sound.stderr
    assert "lab.yaml: valid" in sound.stdout
    assert lacking.returncode == 2, lacking.stderr
    findings = json.loads(lacking.stdout)["diagnostics"]
    (finding,) = (finding for finding in findings if finding["severity"] == "error")
    assert (finding["code"], finding["line"]) == ("accelerators-differ", 8)
    assert finding["message"] == "group `trainer` declares 2 accelerators, found 1 accelerator on node 1"


def test_who_runs_where_on_what_the_nodes_have(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(UNDECLARED)
    with hosts["trainer0"].nvidia(3), hosts["trainer1"].nvidia(1):
        shown = hosts.control.rlinf("inspect", "placement", str(path), "--live", "--json")
    assert shown.returncode == 0, shown.stderr
    actor = json.loads(shown.stdout)["components"]["actor"]["processes"]
    assert [(item["node_rank"], item["local_hardware_ranks"]) for item in actor] == [
        (0, [0]),
        (0, [1]),
        (0, [2]),
        (1, [0]),
    ]


def test_a_node_that_cannot_be_asked_is_named(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(DECLARED)
    hosts.control.forget_connections()
    with hosts["render0"].refusing_keys():
        ended = hosts.control.rlinf("validate", str(path), "--live")
    assert ended.returncode == 3, ended.stdout
    assert "1 of 3 nodes could not be probed" in ended.stderr
    assert "node 2 (render0)" in ended.stderr
    assert "key refused" in ended.stderr
