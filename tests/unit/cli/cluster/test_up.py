"""`up` over simulated nodes: the order, what is kept, repaired and refused, and how failures are told."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.progress import Event, Phase, Progress
from rlinf_cli.cluster.transport import CommandOutcome
from rlinf_cli.cluster.up import UpReport, UpRequest, bring_up
from rlinf_core.errors import RLinfError
from rlinf_core.node import cluster_records
from tests.unit.cli.cluster.conftest import CODE, FakeCluster

Nodes = Callable[..., tuple[NodeTarget, ...]]


class Site:
    """A cluster that is brought up again and again."""

    def __init__(self, nodes: tuple[NodeTarget, ...]) -> None:
        self.nodes = nodes
        self.fake = FakeCluster(len(nodes))
        self.events: list[Event] = []

    def up(self, nodes: tuple[NodeTarget, ...] | None = None, **options: Any) -> UpReport:
        self.fake.log.clear()
        self.fake.requests.clear()
        self.events.clear()
        request = UpRequest("c", "c.yaml", nodes or self.nodes, **{"fingerprint": CODE, **options})
        return asyncio.run(bring_up(request, self.fake, self.events.append))

    def started(self) -> list[int]:
        return [rank for rank, verb in self.fake.log if verb == "start"]


@pytest.fixture
def site(make_nodes: Nodes) -> Site:
    return Site(make_nodes(4))


def test_the_head_comes_first_and_all_are_asked_for_at_the_end(site: Site) -> None:
    report = site.up()
    assert report.ok
    assert report.address == "10.0.0.1:20000"
    assert [verb for _, verb in site.fake.log[:4]] == ["probe"] * 4
    assert site.fake.log[4] == (0, "start")
    assert sorted(site.started()[1:]) == [1, 2, 3]
    assert site.fake.log[-1] == (0, "members")
    assert all(node.up and node.changed for node in report.nodes)
    assert [(event.phase, event.progress) for event in site.events if event.rank == 2] == [
        (phase, progress)
        for phase in (Phase.CONNECT, Phase.PROBE, Phase.JOIN, Phase.VERIFY)
        for progress in (Progress.BEGUN, Progress.DONE)
    ]
    assert all(event.deadline for event in site.events if event.progress is Progress.BEGUN)


def test_again_changes_nothing(site: Site) -> None:
    site.up()
    before = cluster_records.load("c")
    report = site.up()
    assert report.ok
    assert site.started() == []
    assert not any(node.changed for node in report.nodes)
    assert cluster_records.load("c") == before


def test_the_record_and_the_token_are_private(site: Site, state_home: Path) -> None:
    site.up()
    folder = state_home / "rlinf" / "clusters"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("c.json", "c.token"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    token = (folder / "c.token").read_text()
    assert len(token) == 64
    assert token not in (folder / "c.json").read_text()
    sent = [request for request in site.fake.requests if request.get("token")]
    assert {request["token"] for request in sent} == {token}
    assert {request["verb"] for request in sent} == {"start"}
    assert not any(token in " ".join(argv) for argv in site.fake.argv)


def test_a_node_whose_ray_died_is_started_again_and_no_other(site: Site) -> None:
    site.up()
    record = site.fake.nodes[2].record
    assert record is not None
    record["alive"] = False
    report = site.up()
    assert report.ok
    assert site.started() == [2]
    assert [node.rank for node in report.nodes if node.changed] == [2]


def test_when_the_head_died_all_start_again(site: Site) -> None:
    site.up()
    record = site.fake.nodes[0].record
    assert record is not None
    record["alive"] = False
    assert site.up().ok
    assert sorted(site.started()) == [0, 1, 2, 3]
    restarts = {request["to"]: request["restart"] for request in site.fake.requests if request["verb"] == "start"}
    assert restarts == {0: False, 1: True, 2: True, 3: True}


@pytest.mark.parametrize(
    ("count", "hosts", "why"),
    [
        (4, "h[0-3]\n  ports: 21000-21999", "node 0 (h0): `ports` is `20000-20999`, the file says `21000-21999`"),
        (3, "h[0-2]", "node 3 (h3) is up, the file has 3 nodes"),
        (4, "[h0, h1, h2, other]", "node 3 is up on h3, the file says other"),
    ],
)
def test_what_contradicts_the_file_is_refused_and_named(
    site: Site, make_nodes: Nodes, count: int, hosts: str, why: str
) -> None:
    site.up()
    with pytest.raises(RLinfError, match="not match the file") as caught:
        site.up(make_nodes(text=f"cluster:\n  num_nodes: {count}\n  hosts: {hosts}\n"))
    assert why in str(caught.value.why)
    assert site.started() == []


def test_differing_interpreter_is_named_variables_may_differ(site: Site, make_nodes: Nodes) -> None:
    def text(inputs: str) -> str:
        env = f"env_configs: [{{node_ranks: 1, {inputs}}}]"
        return f"cluster:\n  num_nodes: 4\n  hosts: h[0-3]\n  node_groups: [{{label: a, node_ranks: 0-3, {env}}}]\n"

    site.up(make_nodes(text=text("env_vars: [{S: first}]")))
    site.up(make_nodes(text=text("env_vars: [{S: second}]")))
    with pytest.raises(RLinfError) as caught:
        site.up(make_nodes(text=text("python_interpreter_path: /opt/b/python")))
    assert caught.value.why == "node 1 (h1): `interpreter` is `/opt/python`, the file says `/opt/b/python`"


def test_a_cluster_without_a_token_is_not_taken_for_one_with(site: Site) -> None:
    site.up(authenticated=False)
    assert cluster_records.load("c") is not None
    assert not any(request.get("token") for request in site.fake.requests)
    with pytest.raises(RLinfError) as caught:
        site.up()
    assert "`authentication` is `none`, the file says `token`" in str(caught.value.why)


def test_brought_up_from_another_machine(site: Site, state_home: Path) -> None:
    site.up()
    for path in (state_home / "rlinf" / "clusters").iterdir():
        path.unlink()
    with pytest.raises(RLinfError) as caught:
        site.up()
    assert "with another token" in str(caught.value.why)


def test_a_failed_node_leaves_the_others_up_and_is_tried_again(site: Site) -> None:
    site.fake.nodes[2].ssh = CommandOutcome.KEY_REFUSED
    report = site.up()
    assert not report.ok
    [failure] = report.failures
    assert (failure.rank, failure.node, failure.phase) == (2, "node 2 (h2)", Phase.CONNECT)
    assert failure.message == "key refused"
    assert failure.help == "what to do about ssh"
    assert [node.up for node in report.nodes] == [True, True, False, True]
    recorded = cluster_records.load("c")
    assert recorded is not None
    assert recorded.nodes[2].process is None
    site.fake.nodes[2].ssh = None
    assert site.up().ok
    assert site.started() == [2]


def test_without_the_head_nobody_is_started(site: Site) -> None:
    site.fake.nodes[0].start_error = {"message": "Ray ended during startup", "rc": 1, "lines": "last words"}
    report = site.up()
    [failure] = report.failures
    assert (failure.phase, failure.exit_code, failure.last_lines) == (Phase.HEAD, 1, "last words")
    assert site.started() == [0]
    skipped = [event.rank for event in site.events if event.progress is Progress.SKIPPED]
    assert skipped == [1, 2, 3]
    assert report.address == ""


def test_a_node_that_goes_silent_is_told_with_its_phase(site: Site) -> None:
    site.fake.nodes[1].hangs_in = "start"
    site.fake.nodes[2].hangs_in = "probe"
    site.fake.nodes[3].unlisted = True
    failures = {failure.rank: failure for failure in site.up().failures}
    phases = {rank: failure.phase for rank, failure in failures.items()}
    assert phases == {1: Phase.JOIN, 2: Phase.PROBE, 3: Phase.VERIFY}
    assert "no answer within" in failures[1].message
    assert failures[3].why == "it joined and died: missed beats"


@pytest.mark.parametrize(
    ("change", "message", "help_text"),
    [
        ({"ray": None}, "`/opt/python` has no ray", "`/opt/python -m pip install ray==2.60.0`"),
        ({"ray": "2.59.0"}, "`/opt/python` has ray 2.59.0, the head runs 2.60.0", "install ray==2.60.0`"),
        ({"python": (3, 12, 1)}, "`/opt/python` is Python 3.12.1, the head runs 3.11.7", "same minor version"),
        ({"python": (3, 8, 1)}, "`/opt/python` is Python 3.8.1", "another `python_interpreter_path`"),
        ({"fingerprint": None}, "`/opt/python` has no rlinf", "--sync"),
        ({"fingerprint": "other"}, "its rlinf differs from the one here", "--sync"),
        ({"disk_free": 1 << 20}, "the disk is full", "free some space"),
        ({"shm_free": 1 << 20}, "/dev/shm is full or too small", "free some space"),
        ({"taken": [["node_manager", 20001, "pid 7, `sshd`"]]}, "port 20001 is taken", "`cluster.ports`"),
        ({"machine": "machine-1"}, "it is the same machine as node 1 (h1)", "a separate machine"),
    ],
)  # fmt: skip
def test_node_faults_are_reported_before_anything_starts(
    site: Site, change: dict[str, Any], message: str, help_text: str
) -> None:
    for name, value in change.items():
        setattr(site.fake.nodes[2], name, value)
    report = site.up()
    [failure] = report.failures
    assert (failure.rank, failure.phase, failure.message) == (2, Phase.PROBE, message)
    assert help_text in failure.help
    assert 2 not in site.started()


def test_the_heads_address_is_the_files_or_where_ssh_reached_it(site: Site) -> None:
    # Code need not agree where it is shipped.
    site.fake.nodes[2].fingerprint = None
    assert site.up(fingerprint=None).ok
    other = Site(site.nodes)
    cluster_records.forget("c")
    other.up(head_address="192.168.0.7")
    for one, address in ((site, "10.0.0.1"), (other, "192.168.0.7")):
        starts = [request for request in one.fake.requests if request["verb"] == "start" and request["to"] == 0]
        assert [start["address"] for start in starts] == [address]


def test_one_node_by_itself_joins_what_it_is_told(site: Site) -> None:
    report = site.up(only=2, head_address="10.0.0.1", wait_head=True, token="t" * 64)
    assert report.ok
    assert {rank for rank, _ in site.fake.log} == {2}
    [start] = [request for request in site.fake.requests if request["verb"] == "start"]
    assert (start["head"], start["head_address"], start["wait"]) == (False, "10.0.0.1", True)
    assert cluster_records.load("c") is None  # the head's machine has the record


def test_a_second_up_at_the_same_time_is_refused(site: Site) -> None:
    with (
        identity.locked("c"),
        pytest.raises(RLinfError, match="another `rlinf up` or `rlinf down` is working") as caught,
    ):
        site.up()
    assert "pid" in str(caught.value.why)
    assert site.fake.log == []


def test_what_is_to_be_started_is_recorded_before(site: Site) -> None:
    seen: list[Any] = []
    original = site.fake._start

    def start(*arguments: Any) -> dict[str, Any]:
        seen.append(cluster_records.load("c"))
        return original(*arguments)

    site.fake._start = start  # type: ignore[method-assign]
    site.up()
    assert seen[0] is not None
    assert [node.folder for node in seen[0].nodes] == ["/tmp/x"] * 4
