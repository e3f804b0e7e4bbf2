"""The checks of doctor: each tells what is wrong, on which node, and what to do, and says nothing where nothing is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster import doctor
from rlinf_cli.cluster.checks import CheckVerdict, Finding, ProbedNode, merged
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.node.node_probe import recipe_of
from rlinf_core.node.cluster_records import ClusterRecord, token_file
from rlinf_core.node.node_facts import machine
from tests.unit.cli.cluster.conftest import HOSTS, cluster_of

Nodes = Callable[..., tuple[NodeTarget, ...]]
OK, WARNING, FAULT, SKIPPED = CheckVerdict.OK, CheckVerdict.WARNING, CheckVerdict.FAULT, CheckVerdict.SKIPPED
NOW = 1_800_000_000.0
FACTS: dict[str, Any] = {
    "hostname": "h", "python": [3, 11, 7], "ray": "2.60.0", "rlinf": "0.1.0", "fingerprint": "c0de",
    "places": {"rlinf_core": "/opt/rlinf_core", "recipes": "/opt/recipes"}, "folder": "/tmp/x",
    "disk_free": 1 << 40, "shm_free": 1 << 34, "memory": 503 << 30, "files_soft": 1024, "files_hard": 1 << 20,
    "taken": [], "ephemeral": [32768, 60999], "time": NOW, "accelerators": {"found": {"type": "none", "models": []}},
    "robots": [], "cameras": {}, "record": None, "address": None, "primary": "10.0.0.1",
    "packages": {"torch": "2.13.0", "numpy": "2.3.1"},
}  # fmt: skip
HERE = {name: FACTS[name] for name in ("python", "ray", "fingerprint", "packages")}
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


class Site:
    """Nodes that answered, and what is said of them.

    `see({}, {"ray": None})` are two nodes, the second without ray; `said("ray", ...)` what that check says of such.
    """

    def __init__(self, make_nodes: Nodes) -> None:
        self.make_nodes = make_nodes

    def see(self, *changes: dict[str, Any], text: str | None = None) -> list[ProbedNode]:
        nodes = self.make_nodes(len(changes), text)
        return [
            ProbedNode(node, {**FACTS, "machine": f"m{node.rank}", **change}, NOW - 1, NOW + 1)
            for node, change in zip(nodes, changes, strict=True)
        ]

    def judge(self, probed: Sequence[ProbedNode], text: str | None = None, **request: Any) -> list[Finding]:
        count = len(probed)
        cluster = cluster_of(text or HOSTS.format(count=count, last=count - 1))
        nodes = tuple(machine.node for machine in probed)
        return doctor.judge(probed, doctor.DoctorRequest(cluster, nodes, "id", **{"here": HERE, **request}))

    def said(self, check: str, *changes: dict[str, Any], text: str | None = None, **request: Any) -> list[Finding]:
        findings = self.judge(self.see(*changes, text=text), text, **request)
        return [finding for finding in findings if finding.check == check]


@pytest.fixture
def site(make_nodes: Nodes) -> Site:
    return Site(make_nodes)


def test_like_nodes_are_told_in_one_line_of_each_check(site: Site) -> None:
    lines = merged(site.judge(site.see({}, {}, {})))
    assert {line.verdict for line in lines} == {OK}
    everywhere = {line.check for line in lines if line.where == "nodes 0-2"}
    checks = {"interpreter", "ray", "code", "driver", "clock", "disk", "shm", "limits", "ports", "accelerators"}
    assert everywhere == checks | {"reach"}
    assert {line.check for line in lines} == everywhere | {"head"}


@pytest.mark.parametrize(
    ("check", "change", "verdict", "what", "help"),
    [
        ("interpreter", {"python": [3, 12, 1]}, FAULT, "is Python 3.12.1, node 0 (h0) runs 3.11.7", "same minor"),
        ("interpreter", {"python": [3, 9, 2]}, FAULT, "rlinf needs 3.11", "python_interpreter_path"),
        ("interpreter", {"fault": "hangs"}, FAULT, "cannot report its versions: hangs", "python_interpreter_path"),
        ("ray", {"ray": None}, FAULT, "has no ray", "pip install ray==2.60.0"),
        ("ray", {"ray": "2.59.0"}, FAULT, "has ray 2.59.0, node 0 (h0) has 2.60.0", "pip install ray==2.60.0"),
        ("code", {"fingerprint": None, "places": {}}, FAULT, "has no rlinf", "install"),
        ("code", {"fingerprint": "beef"}, FAULT, "fingerprint beef, on this machine c0de", "install"),
        ("code", {"places": {"rlinf_core": "/opt/rlinf_core"}}, WARNING, "rlinf without recipes", "install"),
        ("clock", {"time": NOW + 3600}, FAULT, "3599 s ahead of the others", "time service"),
        ("clock", {"time": NOW - 3600}, FAULT, "3599 s behind the others", "time service"),
        ("clock", {"time": NOW + 10}, WARNING, "9 s ahead of the others", "time service"),
        ("disk", {"disk_free": 1 << 20}, FAULT, "1 MiB free for `/tmp/x`, Ray needs 256 MiB", "free some space"),
        ("disk", {"disk_free": 1 << 30}, WARNING, "a job soon needs 5.0 GiB", "free some space"),
        ("shm", {"shm_free": 64 << 20}, FAULT, "64 MiB free in /dev/shm", "container"),
        ("shm", {"shm_free": 512 << 20}, WARNING, "512 MiB free in /dev/shm", "container"),
        ("limits", {"files_soft": 256, "files_hard": 512}, FAULT, "may open 512 files", "nofile"),
        ("limits", {"files_soft": 256, "files_hard": 2048}, WARNING, "4096 are recommended", "nofile"),
        ("ports", {"taken": [["node_manager", 20001, "`nginx`"]]}, FAULT, "port 20001 (node manager)", "cluster.ports"),
        ("ports", {"ephemeral": [20500, 60999]}, WARNING, "overlap the ephemeral ports", "below these"),
        ("accelerators", {"accelerators": {"fault": "no answer"}}, SKIPPED, "no answer", ""),
        ("machine", {"machine": "m1"}, FAULT, "it is the same machine as node 1 (h1)", "separate machine"),
    ],
)
def test_what_is_wrong_on_one_node_is_told_of_it(
    site: Site, check: str, change: dict[str, Any], verdict: CheckVerdict, what: str, help: str
) -> None:
    (fault,) = [finding for finding in site.said(check, {}, {}, {}, change) if finding.verdict is not OK]
    assert (fault.verdict, fault.rank, fault.where) == (verdict, 3, "node 3 (h3)")
    assert what in fault.what
    assert help in fault.help


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"packages": {"torch": "2.12.0", "numpy": "2.3.1"}}, "differ: torch 2.12.0 (2.13.0)"),
        ({"python": [3, 11, 9]}, "differ: Python 3.11.9 (3.11.7)"),
        ({"packages": {"torch": "2.12.0", "numpy": "1.26.4"}}, "differ: torch 2.12.0 (2.13.0), numpy 1.26.4 (2.3.1)"),
        # What a node does not have is no difference: it may have another extra.
        ({"packages": {"numpy": "2.3.1"}}, None),
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_other_versions_than_the_drivers_are_a_warning(
    site: Site, change: dict[str, Any], what: str | None, here: bool
) -> None:
    head = {"machine": machine()} if here else {}
    other = HERE if here else {**HERE, "packages": {"torch": "1.0"}, "python": [3, 14, 0]}
    own, said = site.said("driver", head, change, here=other)
    assert own.verdict is OK or not here
    if what is None:
        assert said.verdict is OK
    else:
        assert (said.verdict, said.rank) == (WARNING, 1)
        assert what in said.what
        assert f"the driver {'here' if here else 'on node 0 (h0)'} (in brackets)" in said.what
    # Without packages of the driver its Python is compared.
    for python, verdict in (([3, 11, 7], OK), ([3, 11, 9], WARNING)):
        bare = {**HERE, "packages": {}, "python": python}
        assert {said.verdict for said in site.said("driver", {"machine": machine()}, {}, here=bare)} == {verdict}


@pytest.mark.parametrize(("actual", "verdict"), [(503 << 30, OK), (251 << 30, FAULT)])
def test_memory_is_compared_with_what_the_file_declares(site: Site, actual: int, verdict: CheckVerdict) -> None:
    (said,) = site.said("memory", {"memory": actual}, text=MEMORY)
    assert said.verdict is verdict
    assert "512 GiB" in said.what
    assert site.said("memory", {"memory": actual}) == []


def test_a_wrong_clock_here_is_told_of_here(site: Site) -> None:
    (fault,) = [item for item in site.said("clock", *[{"time": NOW + 7200}] * 3) if item.verdict is not OK]
    assert (fault.where, fault.verdict) == ("this machine", WARNING)
    assert "behind the nodes" in fault.what
    # A slow answer is not taken for a wrong clock.
    probed = [item._replace(asked=NOW - 40, heard=NOW + 40) for item in site.see({}, {"time": NOW + 30})]
    assert {finding.verdict for finding in site.judge(probed) if finding.check == "clock"} == {OK}


def test_nodes_are_compared_with_their_majority_without_the_head(site: Site) -> None:
    probed = site.see({}, {"ray": "2.59.0"}, {}, {})[1:]
    (fault,) = [item for item in site.judge(probed) if item.check == "ray" and item.verdict is FAULT]
    assert (fault.rank, "node 2 (h2) has 2.60.0" in fault.what) == (1, True)


GEFORCE = "NVIDIA GeForce RTX-4090"


def have(*models: str | None) -> dict[str, Any]:
    return {"accelerators": {"found": {"type": "NVIDIA" if models else "none", "models": list(models)}}}


@pytest.mark.parametrize(
    ("facts", "verdict", "what"),
    [
        (have(*[GEFORCE] * 8), OK, f"8 NVIDIA ({GEFORCE}), as declared"),
        (have(*[None] * 8), OK, "8 NVIDIA, as declared"),
        (have(*[GEFORCE] * 7), FAULT, "7 of 8 declared RTX 4090 were found"),
        (have(*["A800"] * 8), FAULT, "RTX 4090 is declared, A800 was found"),
        (have(), FAULT, "no accelerator found, 8 declared RTX 4090"),
        ({"accelerators": {"fault": "No module"}}, FAULT, "No module"),
        (
            {"accelerators": {"fault": "No module"}, "fingerprint": None},
            SKIPPED,
            "not checked, because rlinf is not installed there",
        ),
    ],
)
def test_accelerators_are_compared_with_what_is_declared(
    site: Site, facts: dict[str, Any], verdict: CheckVerdict, what: str
) -> None:
    (said,) = site.said("accelerators", facts, text=GPUS)
    assert (said.verdict, said.what) == (verdict, what)


@pytest.mark.parametrize("controller", ["", "controller_node_rank: 0, "])
@pytest.mark.parametrize(("fault", "said"), [(None, " answers"), ("connection refused", ": connection refused")])
def test_a_robot_answers_or_not(site: Site, fault: str | None, said: str, controller: str) -> None:
    text = (ROBOT % "false").replace("robot_ip:", f"{controller}robot_ip:")
    (robot,) = site.said("robot", {"robots": [["10.9.0.1", 17310, fault]]}, text=text)
    assert robot.verdict is (FAULT if fault else OK)
    assert robot.what.startswith("Franka at 10.9.0.1:17310" + (", controller on node 0" if controller else ""))
    assert robot.what.endswith(said)
    assert ("on node 0" in robot.help) is bool(fault and controller)
    assert robot.data["controller_node_rank"] == (0 if controller else None)


def test_a_robot_that_is_not_to_be_asked_is_not_judged(site: Site) -> None:
    (robot,) = site.said("robot", {}, text=ROBOT % "true")
    assert (robot.verdict, "disable_validate" in robot.what) == (SKIPPED, True)


@pytest.mark.parametrize(
    ("said", "verdict", "what"),
    [
        ({"found": ["11", "22", "33"]}, OK, "realsense 11, 22 are plugged in"),
        ({"found": ["33", "11"]}, FAULT, "realsense 22 is not plugged in; others there: 33"),
        ({"fault": "ModuleNotFoundError: x"}, SKIPPED, "`pyrealsense2` is not installed there"),
        ({"fault": "RuntimeError: usb"}, FAULT, "RuntimeError: usb"),
    ],
)
def test_cameras_are_plugged_in_or_not(site: Site, said: dict[str, Any], verdict: CheckVerdict, what: str) -> None:
    (camera,) = site.said("camera", {"cameras": {"realsense": said}}, text=ROBOT % "false")
    assert camera.verdict is verdict
    assert what in camera.what


@pytest.mark.parametrize(("address", "verdicts"), [("10.0.0.1", [OK]), ("8.8.8.8", [WARNING]), ("trainer", [])])
def test_a_head_that_strangers_reach_is_told(site: Site, address: str, verdicts: list[CheckVerdict]) -> None:
    assert [said.verdict for said in site.said("head", {"primary": address}, {})] == verdicts


@pytest.mark.parametrize(("mode", "verdicts"), [(None, []), (0o644, [FAULT]), (0o600, [OK])])
def test_a_token_that_others_read_is_a_fault(
    site: Site, state_home: Path, mode: int | None, verdicts: list[CheckVerdict]
) -> None:
    if mode is not None:
        token_file("lab").parent.mkdir(parents=True)
        token_file("lab").write_text("secret-text")
        token_file("lab").chmod(mode)
    record = ClusterRecord("lab", "id", "lab.yaml", "10.0.0.1:20000", True, (20000, 20999))
    said = site.said("token", {}, recorded=record)
    assert [finding.verdict for finding in said] == verdicts
    assert "secret-text" not in str(said)


def test_a_cluster_that_is_open_to_all_is_told(site: Site) -> None:
    record = ClusterRecord("lab", "id", "lab.yaml", "10.0.0.1:20000", False, (20000, 20999))
    (result,) = site.said("auth", {}, recorded=record)
    assert (result.verdict, "anyone who reaches its ports" in result.what) == (WARNING, True)
    assert site.said("auth", {}) == []


OWN = {"found": {"value": "lab.sort:recipe", "digest": "abcd"}}
OTHER = {"found": {"value": "lab.sort:recipe", "digest": "ef01"}}


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"found": {"value": None, "digest": ""}}, "has no recipe `sort`"),
        (OTHER, "`lab.sort:recipe` ef01, here `lab.sort:recipe` abcd"),
        ({"fault": "No module named 'lab'"}, "cannot load recipe `sort`: No module named 'lab'"),
        (None, "it was not asked"),
    ],
)
def test_a_recipe_of_ones_own_is_the_same_everywhere(site: Site, said: dict[str, Any] | None, what: str) -> None:
    same, fault = site.said("recipe", {"recipe": OWN}, {"recipe": said}, recipe="sort", own_recipe=OWN)
    assert (same.verdict, fault.rank, fault.verdict) == (OK, 1, FAULT)
    assert what in fault.what
    # One of rlinf is part of its code.
    own = {"found": {"value": "recipes.embodied:recipe", "digest": "abcd"}}
    assert site.said("recipe", {}, {}, recipe="embodied", own_recipe=own) == []


def test_a_recipe_is_found_with_a_digest_of_its_package() -> None:
    first, again, none = (recipe_of(name, dict(os.environ)) for name in ("embodied", "embodied", "nobody-has-it"))
    assert first == again
    assert first["found"]["value"] == "recipes.embodied:recipe"
    assert len(first["found"]["digest"]) == 16
    assert none["found"]["value"] is None
