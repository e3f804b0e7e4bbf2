"""`rlinf inspect placement`."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.typed import Cli, text_file

Contract = Callable[[str, str], Any]

ASSUMED = ("--assume", "sim=2")


def test_a_row_a_component(cli: Cli, mixed: Path) -> None:
    out = cli.out("inspect", "placement", mixed, *ASSUMED)
    title, subtitle, _, header, *rows = out.splitlines()
    assert title == "mixed.yaml"
    assert (
        subtitle == "4 nodes · 10 accelerators · 2 robots · accelerators not declared (node 3) · 114 processes · hybrid"
    )
    assert header.split("  ")[0] == "component"
    table = [row.split() for row in rows[:5]]
    assert table[0] == ["actor", "4", "a800", "0", "accelerators", "0-3", "1", "its", "own"]
    assert table[1] == ["rollout", "4", "a800", "0-1", "accelerators", "0-7", "2", "its", "own"]
    assert table[2] == ["sim", "4", "sim", "2", "accelerators", "0-1", "1/2", "its", "own"]
    assert table[3] == ["env", "2", "franka", "3", "Franka", "0-1", "1", "unrestricted"]
    assert table[4] == ["agent", "100", "node", "0", "node", "0", "-", "unrestricted"]


def test_who_shares_what_what_is_idle_and_which_python(cli: Cli, mixed: Path) -> None:
    moved = "cluster.component_placement.actor.placement=4-7"
    out = cli("inspect", "placement", mixed, moved, "--assume", "sim=4").out
    assert "a800    1 " in next(line for line in out.splitlines() if line.startswith("actor"))
    out = cli("inspect", "placement", mixed, "--assume", "sim=4").out
    assert "actor + rollout share accelerators 0-3 of node 0\n" in out
    assert "idle: accelerators 2-3 of node 2\n" in out
    assert "python: /opt/train/bin/python on node 0 (env_configs of a800)\n" in out


def test_a_node_without_any_process_is_idle(cli: Cli, tmp_path: Path) -> None:
    path = text_file(
        tmp_path / "two.yaml",
        "cluster:\n  num_nodes: 3\n  component_placement: {actor: {node_group: node, placement: 0}}\n",
    )
    assert "idle: " in cli("inspect", "placement", path, "--assume", "0").out


def test_spares_are_shown_with_the_nodes_that_they_can_serve_as(cli: Cli, tmp_path: Path) -> None:
    path = text_file(
        tmp_path / "spares.yaml",
        "cluster:\n  num_nodes: 5\n  spare_nodes: 2\n"
        "  component_placement: {agent: {node_group: node, placement: all}}\n",
    )
    out = cli("inspect", "placement", path, "--assume", "0").out
    assert "3 nodes · 2 spares · 3 processes" in out
    assert "spare: nodes 3-4, for nodes 1-2\n" in out
    assert "idle" not in out


def test_hundreds_of_processes_stay_a_few_rows(cli: Cli) -> None:
    arguments = ("inspect", "placement", "hetero18", "--assume", "a800=8", "--assume", "4090=8")
    short = cli(*arguments).out.splitlines()
    assert len(short) < 20
    everything = cli(*arguments, "--all").out.splitlines()
    assert len([line for line in everything if line.startswith("agent:")]) == 400
    assert everything[: len(short)] == short


def test_unknown_accelerators_exit_2_with_a_working_command(cli: Cli, mixed: Path) -> None:
    err = cli.refuses(2, "inspect", "placement", mixed)
    assert "the accelerators of `sim` are unknown, so `sim` cannot be laid out" in err
    suggested = err.partition("`rlinf ")[2].partition("`")[0].split()
    assert suggested == ["inspect", "placement", str(mixed), "--assume", "sim=8"]
    assert cli(*suggested).code == 0


def test_the_suggested_command_keeps_what_was_said(cli: Cli, mixed: Path, tmp_path: Path) -> None:
    said = ("~cluster.node_groups[0].accelerators", "--assume", "sim=4")
    ended = cli("inspect", "placement", mixed, *said)
    suggested = shlex.split(ended.err.partition("`rlinf ")[2].partition("`")[0])
    assert suggested == ["inspect", "placement", str(mixed), *said, "--assume", "a800=8"]
    assert cli(*suggested).code == 0
    # Every group is named at once; without groups, the number alone.
    ended = cli("inspect", "placement", mixed, said[0])
    assert "of `a800`, `sim` are unknown, so `actor`, `rollout`, `sim` cannot be laid out" in ended.err
    assert "--assume a800=8 --assume sim=8`" in ended.err
    path = text_file(tmp_path / "one.yaml", "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0-1}\n")
    assert "--assume 8`" in cli("inspect", "placement", path).err


def test_an_invalid_file_shows_its_errors_and_no_result(cli: Cli, tmp_path: Path) -> None:
    path = text_file(tmp_path / "bad.yaml", "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0-9}\n")
    assert f"{path}:3:32: error[placement-out-of-range]" in cli.refuses(
        2, "inspect", "placement", path, "--assume", "8"
    )


def test_json_is_the_contract(cli: Cli, mixed: Path, contract: Contract) -> None:
    data = contract("placement", cli("inspect", "placement", mixed, *ASSUMED, "--json").out)
    assert (data["num_nodes"], data["placement_mode"]) == (4, "hybrid")
    sizes = {name: component["world_size"] for name, component in data["components"].items()}
    assert sizes == {"actor": 4, "rollout": 4, "sim": 4, "env": 2, "agent": 100}
    rollout = data["components"]["rollout"]["processes"][2]
    facts = {"rank": 2, "node_rank": 1, "placement_node_rank": 1, "local_rank": 0, "local_world_size": 2,
             "local_hardware_ranks": [0, 1], "visible_accelerators": [0, 1], "python": None}  # fmt: skip
    assert {name: rollout[name] for name in facts} == facts
    assert rollout["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    actor = data["components"]["actor"]["processes"][0]
    assert (actor["python"], actor["env"]["NCCL_SOCKET_IFNAME"]) == ("/opt/train/bin/python", "eth0")
    first = data["units"][0]
    assert (first["node_rank"], first["local_hardware_rank"]) == (0, 0)
    assert first["users"] == ["actor:0", "rollout:0"]


def test_secrets_are_masked(cli: Cli, mixed: Path) -> None:
    for form in ((), ("--json",), ("--all",), ("-o", "-")):
        ended = cli("inspect", "placement", mixed, *ASSUMED, *form)
        assert ended.code == 0
        assert "hunter2" not in ended.out + ended.err
    assert "********" in cli("inspect", "placement", mixed, *ASSUMED, "--json").out


def test_a_secret_that_a_reference_brings_is_masked(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    path = text_file(
        tmp_path / "reference.yaml",
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: a\n      node_ranks: 0\n      env_configs:\n"
        "        - node_ranks: 0\n          env_vars: [{INNOCENT: '${env:MY_TOKEN}'}]\n"
        "      accelerators: {per_node: 0}\n"
        "  component_placement: {actor: {node_group: a, placement: 0}}\n",
    )
    out = cli.out("inspect", "placement", path, "--json")
    assert '"INNOCENT": "********"' in out
    assert "hunter2" not in out
    assert "hunter2" not in cli("inspect", "env", path, "--component", "actor", "--rank", "0").out
    assert "hunter2" not in cli("inspect", "config", path).out


def test_the_picture_is_written_whole_and_replaces_the_last(cli: Cli, mixed: Path, tmp_path: Path) -> None:
    target = text_file(tmp_path / "picture.html", "old")
    target.chmod(0o600)
    ended = cli("inspect", "placement", mixed, *ASSUMED, "-o", target)
    assert (ended.code, ended.err) == (0, f"wrote {target}\n")
    assert ended.out.startswith("mixed.yaml")
    assert "<small>trainer00</small>" in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed.yaml", "picture.html"]
    # A new one has the usual mode.
    cli("inspect", "placement", mixed, *ASSUMED, "-o", tmp_path / "new.html")
    assert (tmp_path / "new.html").stat().st_mode == mixed.stat().st_mode
    assert cli.out("inspect", "placement", mixed, *ASSUMED, "-o", "-").startswith("<!doctype html>\n")
    assert "ends in `.html`" in cli.refuses(2, "inspect", "placement", mixed, *ASSUMED, "-o", tmp_path / "new.svg")
    for unwritable in (tmp_path / "no" / "folder.html", tmp_path):
        err = cli.fails(1, "inspect", "placement", mixed, *ASSUMED, "-o", unwritable)
        assert err.startswith(f"error: cannot write `{unwritable}`\n")


def test_variables_are_told_with_their_nodes_and_what_sets_them(cli: Cli, tmp_path: Path, contract: Contract) -> None:
    path = text_file(
        tmp_path / "a.yaml",
        "cluster:\n  num_nodes: 2\n  forward_env: [HOME]\n"
        "  component_placement: {agent: {node_group: a, placement: all}}\n"
        "  node_groups:\n    - label: a\n      node_ranks: 0-1\n      ignore_hardware: true\n"
        "      env_configs:\n        - node_ranks: 0-1\n"
        '          env_vars: [{A_TOKEN: hunter2}, {PATH: /x}, {ODD: "a\\e[31m\\nb"}, {EMPTY: ""}]\n',
    )
    assert cli("inspect", "placement", path).out.splitlines()[-5:] == [
        "A_TOKEN=******** on nodes 0-1 (env_configs of a)",
        'EMPTY="" on nodes 0-1 (env_configs of a)',
        "HOME=<from the driver> on nodes 0-1 (forward_env)",
        "ODD=a\\x1b[31m\\x0ab on nodes 0-1 (env_configs of a)",
        "PATH=/x:<node's own> on nodes 0-1 (path merge of a)",
    ]
    data = contract("placement", cli("inspect", "placement", path, "--json").out)
    (first, _) = data["components"]["agent"]["processes"]
    assert first["env"].keys() == first["env_layers"].keys()
    assert first["env_layers"]["RANK"] == "runtime"
    assert first["env_layers"]["PATH"] == "path merge"


@pytest.mark.parametrize("named", ["job.yaml", "base.yaml"])
def test_the_picture_never_replaces_what_it_is_made_of(cli: Cli, tmp_path: Path, named: str) -> None:
    text = "cluster: {num_nodes: 1, component_placement: {a: {node_group: node, placement: 0}}}\n"
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "job.yaml").write_text("extends: base.yaml\n")
    before = (tmp_path / named).read_text()
    err = cli.fails(2, "inspect", "placement", tmp_path / "job.yaml", "-o", tmp_path / named)
    assert named in err
    assert (tmp_path / named).read_text() == before


ARMS = """\
cluster:
  num_nodes: 4
  component_placement:
    policy: {node_group: gpu, placement: 0-1}
    env: {node_group: arms, placement: 0-2}
  node_groups:
    - {label: gpu, node_ranks: 0}
    - {label: free, node_ranks: 3}
    - label: arms
      node_ranks: 1-2
      hardware:
        type: Franka
        configs:
          - {node_rank: 1, robot_ip: 10.10.10.1}
          - {node_rank: 1, robot_ip: 10.10.10.2}
          - {node_rank: 2, robot_ip: 10.10.10.3}
"""


def test_arms_have_the_numbers_of_rank_maps_everywhere(cli: Cli, tmp_path: Path) -> None:
    path = text_file(tmp_path / "arms.yaml", ARMS)
    asked = ("inspect", "placement", path, "--assume", "gpu=2")
    assert "Franka 0-2 " in cli(*asked).out
    assert ["env:2", "2", "Franka", "2"] in [line.split()[:4] for line in cli(*asked, "--all").out.splitlines()]
    assert cli("inspect", "env", path, "-c", "env", "-r", "2").out.startswith("env:2 on node 2, Franka 2\n")
    picture = cli(*asked, "-o", "-").out
    for arm in ("Franka 0 · 10.10.10.1", "Franka 1 · 10.10.10.2", "Franka 2 · 10.10.10.3"):
        assert f"<small>{arm}</small>" in picture
    # Said once, for all nodes, and not in each group.
    assert picture.count("not declared") == picture.count("accelerators not declared (nodes 1-3)") == 1
    assert "unknown" not in picture
