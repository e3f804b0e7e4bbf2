"""The checks of doctor: each tells what is wrong, on which node, and what to do, and says nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster.checks import access, devices, room, software
from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode, merged
from rlinf_cli.cluster.inventory import NodeTarget

Nodes = Callable[..., tuple[NodeTarget, ...]]
NOW = 1_800_000_000.0
FACTS: dict[str, Any] = {
    "hostname": "h",
    "python": [3, 11, 7],
    "ray": "2.60.0",
    "rlinf": "0.1.0",
    "fingerprint": "c0de",
    "places": {"rlinf_core": "/opt/rlinf_core", "recipes": "/opt/recipes"},
    "folder": "/tmp/x",
    "disk_free": 1 << 40,
    "shm_free": 1 << 34,
    "memory": 503 << 30,
    "files_soft": 1024,
    "files_hard": 1 << 20,
    "taken": [],
    "ephemeral": [32768, 60999],
    "time": NOW,
    "accelerators": {"found": {"type": "none", "models": []}},
    "robots": [],
    "cameras": {},
    "record": None,
    "address": None,
    "primary": "10.0.0.1",
}
ROBOT = """\
cluster:
  num_nodes: 1
  node_groups:
    - label: arm
      node_ranks: 0
      hosts: robot0
      hardware:
        type: Franka
        configs: [{node_rank: 0, robot_ip: 10.9.0.1, camera_serials: ["11", "22"], disable_validate: %s}]
"""
GPUS = """\
cluster:
  num_nodes: 1
  node_groups: [{label: gpu, node_ranks: 0, hosts: h0, accelerators: {model: RTX 4090, per_node: 8}}]
"""
MEMORY = """\
cluster:
  num_nodes: 1
  node_groups: [{label: gpu, node_ranks: 0, hosts: h0, memory_gib: 512}]
"""


@pytest.fixture
def see(make_nodes: Nodes) -> Callable[..., list[ProbedNode]]:
    """Nodes that answered: `see({}, {"ray": None})` two of them, the second without ray."""

    def make(*changes: dict[str, Any], text: str | None = None) -> list[ProbedNode]:
        nodes = make_nodes(len(changes), text)
        return [
            ProbedNode(node, {**FACTS, "machine": f"m{node.rank}", **change}, NOW - 1, NOW + 1)
            for node, change in zip(nodes, changes, strict=True)
        ]

    return make


See = Callable[..., list[ProbedNode]]


def only_fault(findings: list[Finding]) -> Finding:
    (fault,) = [finding for finding in findings if finding.verdict is not CheckVerdict.OK]
    return fault


SOUND: dict[str, Callable[[list[ProbedNode]], list[Finding]]] = {
    "interpreters": software.interpreters,
    "rays": software.rays,
    "codes": lambda probed: software.codes(probed, "c0de"),
    "clocks": room.clocks,
    "disks": room.disks,
    "shm": room.shared_memory,
    "limits": room.limits,
    "ports": room.ports,
    "accelerators": devices.accelerators,
}


@pytest.mark.parametrize("name", SOUND)
def test_like_nodes_are_told_in_one_line(see: See, name: str) -> None:
    (line,) = merged(SOUND[name](see({}, {}, {})))
    assert line.finding.verdict is CheckVerdict.OK
    assert line.where == "nodes 0-2"


@pytest.mark.parametrize(
    ("check", "change", "what", "help"),
    [
        ("interpreters", {"python": [3, 12, 1]}, "is Python 3.12.1, node 0 (h0) runs 3.11.7", "same minor"),
        ("interpreters", {"python": [3, 9, 2]}, "rlinf needs 3.11", "python_interpreter_path"),
        ("interpreters", {"fault": "it did not answer within 30 s"}, "did not answer", "python_interpreter_path"),
        ("rays", {"ray": None}, "has no ray", "pip install ray==2.60.0"),
        ("rays", {"ray": "2.59.0"}, "has ray 2.59.0, node 0 (h0) has 2.60.0", "pip install ray==2.60.0"),
        ("codes", {"fingerprint": None, "places": {}}, "has no rlinf", "install"),
        ("codes", {"fingerprint": "beef"}, "fingerprint beef, on this machine c0de", "install"),
        ("clocks", {"time": NOW + 3600}, "3599 s ahead of the others", "time service"),
        ("clocks", {"time": NOW - 3600}, "3599 s behind the others", "time service"),
        ("disks", {"disk_free": 1 << 20}, "1 MiB free for `/tmp/x`, Ray needs 256 MiB", "free some space"),
        ("shm", {"shm_free": 64 << 20}, "64 MiB free in /dev/shm", "container"),
        ("limits", {"files_soft": 256, "files_hard": 512}, "may open 512 files", "nofile"),
        ("ports", {"taken": [["node_manager", 20001, "pid 7, `nginx`"]]}, "port 20001 (node manager)", "cluster.ports"),
        ("accelerators", {"accelerators": {"fault": "no answer"}}, "no answer", ""),
    ],
)
def test_what_is_wrong_on_one_node_is_told_of_it(
    see: See, check: str, change: dict[str, Any], what: str, help: str
) -> None:
    fault = only_fault(SOUND[check](see({}, {}, {}, change)))
    assert fault.verdict is (CheckVerdict.SKIPPED if check == "accelerators" else CheckVerdict.FAULT)
    assert (fault.rank, fault.where) == (3, "node 3 (h3)")
    assert what in fault.what
    assert help in fault.help


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("disks", {"disk_free": 1 << 30}),
        ("shm", {"shm_free": 512 << 20}),
        ("limits", {"files_soft": 256, "files_hard": 2048}),
        ("clocks", {"time": NOW + 10}),
        ("ports", {"ephemeral": [20500, 60999]}),
        ("codes", {"places": {"rlinf_core": "/opt/rlinf_core"}}),
    ],
)
def test_what_is_merely_unwise_is_a_warning(see: See, check: str, change: dict[str, Any]) -> None:
    assert only_fault(SOUND[check](see({}, {}, {}, change))).verdict is CheckVerdict.WARNING


@pytest.mark.parametrize(("actual", "verdict"), [(503 << 30, CheckVerdict.OK), (251 << 30, CheckVerdict.FAULT)])
def test_memory_is_compared_with_what_the_file_declares(see: See, actual: int, verdict: CheckVerdict) -> None:
    (said,) = room.memory(see({"memory": actual}, text=MEMORY))
    assert said.verdict is verdict
    assert "512 GiB" in said.what
    assert room.memory(see({"memory": actual})) == []


def test_a_wrong_clock_here_is_told_of_here(see: See) -> None:
    fault = only_fault(room.clocks(see(*[{"time": NOW + 7200}] * 3)))
    assert (fault.where, fault.verdict) == ("this machine", CheckVerdict.WARNING)
    assert "behind the nodes" in fault.what


def test_a_slow_answer_is_not_taken_for_a_wrong_clock(see: See) -> None:
    probed = [item._replace(asked=NOW - 40, heard=NOW + 40) for item in see({}, {"time": NOW + 30})]
    assert all(clock.verdict is CheckVerdict.OK for clock in room.clocks(probed))


def test_nodes_are_compared_with_their_majority_without_the_head(see: See) -> None:
    probed = see({}, {"ray": "2.59.0"}, {}, {})[1:]
    fault = only_fault(software.rays(probed))
    assert (fault.rank, "node 2 (h2) has 2.60.0" in fault.what) == (1, True)


@pytest.mark.parametrize(
    ("models", "verdict", "what"),
    [
        (["NVIDIA GeForce RTX-4090"] * 8, CheckVerdict.OK, "8 NVIDIA (NVIDIA GeForce RTX-4090), as declared"),
        ([None] * 8, CheckVerdict.OK, "8 NVIDIA, as declared"),
        (["NVIDIA GeForce RTX 4090"] * 7, CheckVerdict.FAULT, "7 of 8 declared RTX 4090 were found"),
        (["NVIDIA A800"] * 8, CheckVerdict.FAULT, "RTX 4090 is declared, NVIDIA A800 was found"),
    ],
)
def test_accelerators_are_compared_with_what_is_declared(
    see: See, models: list[str | None], verdict: CheckVerdict, what: str
) -> None:
    (accelerators,) = devices.accelerators(
        see({"accelerators": {"found": {"type": "NVIDIA", "models": models}}}, text=GPUS)
    )
    assert (accelerators.verdict, accelerators.what) == (verdict, what)


def test_nobody_counts_accelerators_without_rlinf(see: See) -> None:
    (accelerators,) = devices.accelerators(
        see({"accelerators": {"fault": "No module"}, "fingerprint": None}, text=GPUS)
    )
    assert accelerators.verdict is CheckVerdict.SKIPPED
    assert "rlinf is not installed there" in accelerators.what


@pytest.mark.parametrize(("fault", "verdict"), [(None, CheckVerdict.OK), ("connection refused", CheckVerdict.FAULT)])
def test_a_robot_answers_or_not(see: See, fault: str | None, verdict: CheckVerdict) -> None:
    (robots,) = devices.robots(see({"robots": [["10.9.0.1", 17310, fault]]}, text=ROBOT % "false"))
    assert robots.verdict is verdict
    assert "Franka at 10.9.0.1:17310" in robots.what


@pytest.mark.parametrize(("fault", "said"), [(None, " answers"), ("connection refused", ": connection refused")])
def test_the_node_of_its_controller_is_named(see: See, fault: str | None, said: str) -> None:
    text = (ROBOT % "false").replace("robot_ip:", "controller_node_rank: 0, robot_ip:")
    assert "controller_node_rank" in text
    (robots,) = devices.robots(see({"robots": [["10.9.0.1", 17310, fault]]}, text=text))
    assert "Franka at 10.9.0.1:17310, controller on node 0" in robots.what
    assert robots.what.endswith(said)
    assert ("on node 0" in (robots.help or "")) is (fault is not None)
    assert robots.data["controller_node_rank"] == 0


def test_a_robot_that_is_not_to_be_asked_is_not_judged(see: See) -> None:
    (robots,) = devices.robots(see({}, text=ROBOT % "true"))
    assert (robots.verdict, "disable_validate" in robots.what) == (CheckVerdict.SKIPPED, True)


@pytest.mark.parametrize(
    ("said", "verdict", "what"),
    [
        ({"found": ["11", "22", "33"]}, CheckVerdict.OK, "realsense 11, 22 are plugged in"),
        ({"found": ["33", "11"]}, CheckVerdict.FAULT, "realsense 22 is not plugged in; others there: 33"),
        ({"fault": "ModuleNotFoundError: x"}, CheckVerdict.SKIPPED, "`pyrealsense2` is not installed there"),
        ({"fault": "RuntimeError: usb"}, CheckVerdict.FAULT, "RuntimeError: usb"),
    ],
)
def test_cameras_are_plugged_in_or_not(see: See, said: dict[str, Any], verdict: CheckVerdict, what: str) -> None:
    (cameras,) = devices.cameras(see({"cameras": {"realsense": said}}, text=ROBOT % "false"))
    assert cameras.verdict is verdict
    assert what in cameras.what


def test_two_nodes_on_one_machine_are_a_fault(see: See) -> None:
    (machines,) = access.machines(see({"machine": "a"}, {"machine": "b"}, {"machine": "a"}))
    assert (machines.rank, machines.what) == (2, "it is the same machine as node 0 (h0)")


@pytest.mark.parametrize(
    ("address", "verdict"),
    [("10.0.0.1", CheckVerdict.OK), ("8.8.8.8", CheckVerdict.WARNING), ("trainer", None), (None, None)],
)
def test_a_head_that_strangers_reach_is_told(see: See, address: str | None, verdict: CheckVerdict | None) -> None:
    results = access.head_address(see({}, {}), address)
    assert [result.verdict for result in results] == ([] if verdict is None else [verdict])


def test_a_token_that_others_read_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "x.token"
    assert access.token(None) == access.token(path) == []
    path.write_text("secret-text")
    path.chmod(0o644)
    assert only_fault(access.token(path)).verdict is CheckVerdict.FAULT
    assert "secret-text" not in str(access.token(path))
    path.chmod(0o600)
    assert access.token(path)[0].verdict is CheckVerdict.OK


OWN = {"found": {"value": "lab.sort:recipe", "digest": "abcd"}}


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"found": {"value": None, "digest": ""}}, "has no recipe `sort`"),
        (
            {"found": {"value": "lab.sort:recipe", "digest": "ef01"}},
            "`lab.sort:recipe` ef01, here `lab.sort:recipe` abcd",
        ),
        ({"fault": "No module named 'lab'"}, "cannot load recipe `sort`: No module named 'lab'"),
        (None, "it was not asked"),
    ],
)
def test_a_recipe_of_ones_own_is_the_same_everywhere(see: See, said: dict[str, Any] | None, what: str) -> None:
    fault = only_fault(software.recipes(see({"recipe": OWN}, {"recipe": said}), "sort", OWN))
    assert (fault.rank, fault.verdict) == (1, CheckVerdict.FAULT)
    assert what in fault.what


def test_a_recipe_of_rlinf_is_part_of_its_code(see: See) -> None:
    own = {"found": {"value": "recipes.embodied:recipe", "digest": "abcd"}}
    assert software.recipes(see({}, {}), "embodied", own) == software.recipes(see({}, {}), None, None) == []


def test_a_recipe_is_found_with_a_digest_of_its_package() -> None:
    import os

    from rlinf_cli.cluster.node.node_inspect import recipe_of

    first, again, none = (recipe_of(name, dict(os.environ)) for name in ("embodied", "embodied", "nobody-has-it"))
    assert first == again
    assert first["found"]["value"] == "recipes.embodied:recipe"
    assert len(first["found"]["digest"]) == 16
    assert none["found"]["value"] is None


def test_a_cluster_that_is_open_to_all_is_told() -> None:
    assert (
        access.authentication(up=False, authenticated=False) == access.authentication(up=True, authenticated=True) == []
    )
    (result,) = access.authentication(up=True, authenticated=False)
    assert (result.verdict, "anyone who reaches its ports" in result.what) == (CheckVerdict.WARNING, True)
