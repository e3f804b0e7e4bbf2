"""`rlinf inspect env`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Contract = Callable[[str, str], Any]


def test_the_interpreter_and_each_variable_with_its_layer(cli: Cli, mixed: Path) -> None:
    ended = cli("inspect", "env", mixed, "--component", "actor", "--rank", "3")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].startswith("actor:3 on node 0 (trainer00), ")
    assert lines[3].split() == ["/opt/train/bin/python", f"{mixed}:10:36"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[5:]}
    assert rows["NCCL_SOCKET_IFNAME"] == f"eth0 env_configs of a800, {mixed}:12"
    assert rows["WANDB_API_KEY"].startswith("******** env_configs of a800")
    assert rows["PYTHONPATH"] == f"/opt/lib:<node's own> path merge of a800, {mixed}:14"
    assert rows["RANK"] == "3 runtime"
    assert "hunter2" not in ended.out


def test_only_what_the_process_needs_must_be_known(cli: Cli, mixed: Path) -> None:
    """The accelerators of `sim` are unknown, which is no matter for a robot."""
    ended = cli("inspect", "env", mixed, "-c", "env", "-r", "1")
    assert ended.code == 0
    assert "python: the node's own" in ended.out
    ended = cli("inspect", "env", mixed, "-c", "sim", "-r", "0")
    assert ended.code == 2
    suggested = ended.err.partition("`rlinf ")[2].partition("`")[0].split()
    assert suggested[-2:] == ["--assume", "sim=8"]
    assert cli(*suggested).code == 0


def test_json_is_the_contract(cli: Cli, mixed: Path, contract: Contract) -> None:
    data = contract("env", cli("inspect", "env", mixed, "-c", "actor", "-r", "0", "--output", "json").out)
    assert (data["component"], data["rank"], data["node_rank"]) == ("actor", 0, 0)
    assert data["python"] == "/opt/train/bin/python"
    assert data["python_place"] == {"file": str(mixed), "line": 10, "column": 36}
    variables = {each["name"]: each for each in data["variables"]}
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
    ended = cli("inspect", "env", mixed, "--component", component, "--rank", rank)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
