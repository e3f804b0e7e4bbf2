"""`rlinf inspect env`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.typed import Cli

Contract = Callable[[str, str], Any]


def test_the_interpreter_and_each_variable_with_its_layer(cli: Cli, mixed: Path) -> None:
    out = cli.out("inspect", "env", mixed, "--component", "actor", "--rank", "3")
    lines = out.splitlines()
    assert lines[0].startswith("actor:3 on node 0 (trainer00), ")
    assert lines[3].split() == ["/opt/train/bin/python", "env_configs", "of", "a800,", f"{mixed}:10"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[5:]}
    assert rows["NCCL_SOCKET_IFNAME"] == f"eth0 env_configs of a800, {mixed}:12"
    assert rows["WANDB_API_KEY"].startswith("******** env_configs of a800")
    assert rows["PYTHONPATH"] == f"/opt/lib:<node's own> path merge of a800, {mixed}:14"
    assert rows["RANK"] == "3 runtime"
    assert "hunter2" not in out


def test_only_what_the_process_needs_must_be_known(cli: Cli, mixed: Path) -> None:
    """The accelerators of `sim` are unknown, which is no matter for a robot."""
    assert "the node's own  Ray's; with `rlinf up`: the path of rlinf itself\n" in cli.out(
        "inspect", "env", mixed, "-c", "env", "-r", "1"
    )
    err = cli.fails(2, "inspect", "env", mixed, "-c", "sim", "-r", "0")
    suggested = err.partition("`rlinf ")[2].partition("`")[0].split()
    assert suggested[-2:] == ["--assume", "sim=8"]
    assert cli(*suggested).code == 0


TWO_GROUPS = """\
cluster:
  num_nodes: 1
  component_placement: {env: 0-1, rollout: {node_group: rollout, placement: 2-3}}
  node_groups:
    - label: rollout
      node_ranks: 0
      accelerators: {per_node: 4}
      env_configs:
        - node_ranks: 0
          env_vars: {OMP_NUM_THREADS: 4}
          python_interpreter_path: /opt/rollout/bin/python
"""


def test_group_variables_do_not_reach_cluster_placed_processes(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_GROUPS)
    env, rollout = (cli("inspect", "env", path, "-c", name, "-r", "0").out for name in ("env", "rollout"))
    assert "OMP_NUM_THREADS" not in env
    assert "the node's own  Ray's; with `rlinf up`: /opt/rollout/bin/python\n" in env
    assert "OMP_NUM_THREADS" in rollout
    assert f"/opt/rollout/bin/python  env_configs of rollout, {path}:11\n" in rollout
    data = json.loads(cli("inspect", "env", path, "-c", "env", "-r", "0", "--json").out)
    assert (data["python"], data["python_by_up"]) == (None, "/opt/rollout/bin/python")
    ended = cli("validate", path)
    assert ended.code == 0
    # The interpreter of the group serves `rollout`, so that nothing is left unused.
    assert "do not apply" not in ended.out + ended.err


def test_json_is_the_contract(cli: Cli, mixed: Path, contract: Contract) -> None:
    data = contract("env", cli("inspect", "env", mixed, "-c", "actor", "-r", "0", "--json").out)
    assert (data["component"], data["rank"], data["node_rank"]) == ("actor", 0, 0)
    assert data["python"] == "/opt/train/bin/python"
    assert data["python_layer"] == "env_configs of a800"
    assert data["python_place"] == {"file": str(mixed), "line": 10, "column": 36}
    variables = {variable["name"]: variable for variable in data["variables"]}
    assert variables["NCCL_SOCKET_IFNAME"]["node_group"] == "a800"
    assert variables["NCCL_SOCKET_IFNAME"]["place"]["line"] == 12
    assert variables["WANDB_API_KEY"]["value"] == "********"
    assert variables["RANK"]["layer"] == "runtime"


@pytest.mark.parametrize(
    ("component", "rank", "words"),
    [
        ("actr", "0", "did you mean `actor`?"),
        ("nothing", "0", "the components are `actor`"),
        ("actor", "4", "its ranks are 0 to 3"),
        ("actor", "-1", "--rank"),
    ],
)
def test_who_does_not_exist_is_2(cli: Cli, mixed: Path, component: str, rank: str, words: str) -> None:
    err = cli.refuses(2, "inspect", "env", mixed, "--component", component, "--rank", rank)
    assert words in err
