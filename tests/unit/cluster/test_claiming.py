"""What a job does whose devices another job holds: it waits with a reason, ends, or shares."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import ray.exceptions

from rlinf_core.cluster import driver_job, job_claims
from rlinf_core.cluster.driver_job import claim, claim_names, describe_claims, give_back, kept_claims, leave_claims
from rlinf_core.cluster.job_claims import devices_of
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.context import Session, current_session, enter_session
from rlinf_core.errors import ClusterError, DeviceHeldError
from rlinf_core.node import device_claims
from rlinf_core.node.device_claims import DeviceHolder, HolderInfo, holders
from rlinf_core.node.holder_words import device_words, held_words, job_words, progress_words, rough_seconds
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.process import pacing
from rlinf_core.topology import ClusterTopology, NodeInfo
from tests.waiting import until

_HOLD = """\
import sys
from rlinf_core.node.device_claims import DeviceHolder
holder = DeviceHolder()
if sys.argv[1]:
    holder.tell({"run": sys.argv[1], "step": 12, "total": 30, "left": 120.0, "waits_for": sys.argv[2]})
print(holder.take(sys.argv[3:]).ok, flush=True)
sys.stdin.read()
"""


class OneNode:
    """A cluster of this machine, with accelerators of a vendor that no other test has."""

    def __init__(self, *robots: Any) -> None:
        self.vendor = f"T{secrets.token_hex(4)}"
        self.topology = ClusterTopology.from_nodes([NodeInfo(0, 4, self.vendor, ip="127.0.0.1")])
        self.own_rank: int | None = 0
        self.said: list[str] = []
        self.instead = ""
        self.again: list[str] = []
        self.on_wait: Callable[[], None] = lambda: None

    def allocate(self, actor_class: type, *, node_rank: int, outlives: bool = False) -> Any:
        raise AssertionError("an actor of another node")

    def announce_wait(self, what: str, *, again: bool = False, instead: str = "") -> None:
        self.instead = instead
        (self.again if again else self.said).append(what)
        self.on_wait()

    def placements(self, ranks: str) -> Any:
        config = {"cluster": {"num_nodes": 1, "component_placement": {"actor": ranks}}}
        return ComponentPlacement(config, self.topology).get_strategy("actor").get_placement(self.topology)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Generator[OneNode]:
    monkeypatch.setattr(driver_job, "_claims", None)
    # A busy machine may answer late; nobody here is silent.
    monkeypatch.setattr(device_claims, "_ASK_SECONDS", 60.0)
    monkeypatch.setenv("RLINF_CLAIMS", "wait")
    yield OneNode()
    driver_job._on_disconnect()  # pyright: ignore[reportPrivateUsage]


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


class _Actor:
    """An actor of this process, whose claims are as another process's."""

    def __init__(self, actor_class: type) -> None:
        self._object = actor_class()

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._object, name))


class _Ray:
    """Ray, whose calls have their results at once."""

    exceptions = ray.exceptions

    def get(self, reference: Any, *, timeout: float) -> Any:
        return reference


class TwoNodes(OneNode):
    """This machine as two nodes, whose accelerators have different names; `allocate` fails as `failure` says."""

    def __init__(self) -> None:
        super().__init__()
        ids = tuple(map(str, range(4, 8)))
        nodes = [
            NodeInfo(0, 4, self.vendor, ip="127.0.0.1"),
            NodeInfo(1, 4, self.vendor, accelerator_ids=ids, ip="127.0.0.2"),
        ]
        self.topology = ClusterTopology.from_nodes(nodes)
        self.failure: Exception | None = None
        self.actors: list[_Actor] = []
        self.keepers: list[_Actor] = []
        # Whether a keeper has ended its process.
        self.ended = threading.Event()

    def allocate(self, actor_class: type, *, node_rank: int, outlives: bool = False) -> Any:
        if self.failure is not None:
            raise self.failure
        actors = self.keepers if outlives else self.actors
        actors.append(_Actor(actor_class))
        return actors[-1]

    def placements(self, ranks: str) -> Any:
        config = {"cluster": {"num_nodes": 2, "component_placement": {"actor": ranks}}}
        return ComponentPlacement(config, self.topology).get_strategy("actor").get_placement(self.topology)

    def leave(self) -> None:
        """Leave the cluster, with which the actors end."""
        driver_job._on_disconnect()  # pyright: ignore[reportPrivateUsage]
        for actor in self.actors:
            actor.drop.remote([f"{self.vendor}:{number}" for number in range(8)])

    def held(self) -> list[str]:
        return sorted(one.device.partition(":")[2] for one in holders([f"{self.vendor}:{n}" for n in range(8)]))


@pytest.fixture
def pair(node: OneNode, monkeypatch: pytest.MonkeyPatch) -> Generator[TwoNodes]:
    monkeypatch.setattr(job_claims, "ray_api", _Ray)
    made = TwoNodes()
    monkeypatch.setattr(job_claims, "_end_process", lambda: made.ended.set())
    yield made
    made.leave()
    for keeper in made.keepers:
        keeper.drop.remote([f"{made.vendor}:{number}" for number in range(8)])


Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold() -> Generator[Hold]:
    """Let another process hold devices, of this run."""
    started: list[subprocess.Popen[str]] = []

    def begin(*devices: str, run: str = "/runs/a", waits_for: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _HOLD, run, waits_for, *devices]
        process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_job_waits_with_its_reason_until_the_other_ends(node: OneNode, hold: Hold) -> None:
    other = hold(f"{node.vendor}:0", f"{node.vendor}:1")
    node.on_wait = other.kill
    claim(node, node.placements("0-1"))
    assert node.said == ["accelerators 0-1 of node 0: /runs/a, step 12 of 30, about 2 min"]
    options = "`--share` starts beside it now, `--no-wait` ends at once (`RLINF_CLAIMS=share` or `no-wait`)"
    assert node.instead == options
    assert len(holders([f"{node.vendor}:0", f"{node.vendor}:1"])) == 2


@pytest.mark.parametrize("holds_by", ["number", "other number", "part"])
def test_two_names_of_one_device_are_one(node: OneNode, hold: Hold, holds_by: str) -> None:
    """Another job sees the same device under another number, and has a part of it."""
    other = hold(f"{node.vendor}:MIG-1" if holds_by == "part" else f"{node.vendor}:GPU-b")
    ids = ("7", "8") if holds_by == "other number" else ()
    identities = (("GPU-a",), ("GPU-b", "MIG-1"))
    info = NodeInfo(0, 2, node.vendor, accelerator_ids=ids, accelerator_identities=identities)
    node.topology = ClusterTopology.from_nodes([info])
    claim(node, node.placements("0"))
    give_back(driver_job._THE_CLUSTER)  # pyright: ignore[reportPrivateUsage]
    node.on_wait = other.kill
    claim(node, node.placements("0-1"))
    assert node.said == ["accelerator 1 of node 0: /runs/a, step 12 of 30, about 2 min"]
    held = holders([f"{node.vendor}:{name}" for names in identities for name in names])
    assert len(held) == 3
    # People know devices by their numbers.
    assert {device_words(one) for one in held} == {f"{node.vendor} {number}" for number in ids or ("0", "1")}


def test_a_job_that_does_not_wait_ends_and_holds_nothing(
    node: OneNode, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(f"{node.vendor}:1")
    monkeypatch.setenv("RLINF_CLAIMS", "no-wait")
    with pytest.raises(DeviceHeldError, match=r"accelerator 1 of node 0: /runs/a, step 12 of 30, about 2 min"):
        claim(node, node.placements("0-1"))
    assert holders([f"{node.vendor}:0"]) == []


def test_a_job_that_does_not_wait_still_lets_processes_end(
    node: OneNode, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last processes of a job that has ended answer nobody; they are gone in a moment."""
    other = hold(f"{node.vendor}:0", run="")
    monkeypatch.setenv("RLINF_CLAIMS", "no-wait")

    def end_other(_: float) -> None:
        other.kill()

    monkeypatch.setattr(job_claims.time, "sleep", end_other)
    claim(node, node.placements("0"))
    assert [one.pid for one in holders([f"{node.vendor}:0"])] == [os.getpid()]
    other.communicate()
    monkeypatch.setattr(job_claims, "_SILENT_SECONDS", 0.0)
    hold(f"{node.vendor}:1", run="")
    with pytest.raises(DeviceHeldError, match="does not answer"):
        claim(node, node.placements("1"))


def test_a_job_that_shares_says_with_whom(
    node: OneNode, hold: Hold, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hold(f"{node.vendor}:0")
    monkeypatch.setenv("RLINF_CLAIMS", "share")
    monkeypatch.setattr(logging.getLogger("rlinf"), "propagate", True)
    claim(node, node.placements("0"))
    assert "shared with other jobs: accelerator 0 of node 0: /runs/a" in caplog.text


def test_nobody_waits_for_a_device_while_it_holds_another(node: OneNode, hold: Hold) -> None:
    hold(f"{node.vendor}:1")
    claim(node, node.placements("0"))
    with pytest.raises(DeviceHeldError, match=r"accelerator 1 of node 0"):
        claim(node, node.placements("1"))
    # What it holds it may launch on again.
    claim(node, node.placements("0"))


def test_what_is_kept_over_clusters_is_given_back_before_a_wait(node: OneNode, hold: Hold) -> None:
    with kept_claims("/runs/mine"):
        claim(node, node.placements("0"))
        driver_job._on_disconnect()  # pyright: ignore[reportPrivateUsage]
        (one,) = holders([f"{node.vendor}:0"])
        assert one.about is not None
        assert one.about["run"] == "/runs/mine"
        other = hold(f"{node.vendor}:1")
        seen: list[str] = []

        def end() -> None:
            until(lambda: holders([f"{node.vendor}:0"]) == [], "what was kept to be free")
            seen.append("free")
            other.kill()

        node.on_wait = end
        claim(node, node.placements("0-1"))
        assert seen == ["free"]
        assert len(claim_names(node.topology, node.placements("0")[0])) == 1
    until(lambda: holders([f"{node.vendor}:0"]) == [], "the end of the claims")


def test_a_job_without_accelerators_asks_nobody(node: OneNode) -> None:
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor": {"node_group": "node", "placement": 0}}}}
    placements = ComponentPlacement(config, node.topology).get_strategy("actor").get_placement(node.topology)
    claim(node, placements)
    assert driver_job._claims is None  # pyright: ignore[reportPrivateUsage]


def test_a_workers_own_groups_are_its_jobs(node: OneNode, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(f"{node.vendor}:0")
    before = current_session()
    enter_session(Session("job", b"x" * 32, member="actor:0"))  # pyright: ignore[reportArgumentType]
    try:
        claim(node, node.placements("0"))
    finally:
        enter_session(before)
    assert node.said == []


def test_how_far_a_job_is_is_seen_by_others(node: OneNode) -> None:
    claim(node, node.placements("0"))
    describe_claims(often=True, step=3, total=9, left=600.0)
    (one,) = holders([f"{node.vendor}:0"])
    assert progress_words(one) == "step 3 of 9, about 10 min"


def test_a_job_that_waits_holds_nothing_on_any_node(
    pair: TwoNodes, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hold(f"{pair.vendor}:4")
    taken: list[str] = []
    take = DeviceHolder.take

    def noted(holder: DeviceHolder, devices: Any, **options: Any) -> Any:
        taken.extend(devices)
        return take(holder, devices, **options)

    def end() -> None:
        # Not for a moment either: it looked at all nodes first.
        assert taken == []
        other.kill()
        other.communicate()

    monkeypatch.setattr(DeviceHolder, "take", noted)
    pair.on_wait = end
    claim(pair, pair.placements("3-4"))
    assert pair.said == ["accelerator 0 of node 1: /runs/a, step 12 of 30, about 2 min"]
    assert pair.held() == ["3", "4"]


def test_a_job_that_comes_too_late_on_a_node_gives_back(
    pair: TwoNodes, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes the last node's device between the look and the take."""
    monkeypatch.setenv("RLINF_CLAIMS", "no-wait")
    others: list[Any] = []
    take = DeviceHolder.take

    def late(holder: DeviceHolder, devices: Any, **options: Any) -> Any:
        if not others:
            others.append(hold(f"{pair.vendor}:4"))
        return take(holder, devices, **options)

    monkeypatch.setattr(DeviceHolder, "take", late)
    with pytest.raises(DeviceHeldError):
        claim(pair, pair.placements("3-4"))
    until(lambda: pair.held() == ["4"], "what was taken on node 0 to be free")


def test_nobody_is_refused_for_one_that_waits_itself(
    node: OneNode, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_CLAIMS", "no-wait")
    other = hold(f"{node.vendor}:0", waits_for="accelerator 1 of node 0: /runs/b")

    def end_other(_: float) -> None:
        other.kill()
        other.communicate()

    monkeypatch.setattr(job_claims.time, "sleep", end_other)
    claim(node, node.placements("0"))
    assert [one.pid for one in holders([f"{node.vendor}:0"])] == [os.getpid()]


def test_a_run_that_had_its_devices_waits_for_them(pair: TwoNodes, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_CLAIMS", "no-wait")
    with kept_claims("/runs/mine"):
        claim(pair, pair.placements("3-4"))
        pair.leave()
        assert pair.held() == ["3"]
        other = hold(f"{pair.vendor}:4")
        pair.on_wait = other.kill
        claim(pair, pair.placements("3-4"))
        assert len(pair.said) == 1
        assert pair.held() == ["3", "4"]


def test_nobody_steps_in_between_two_attempts(pair: TwoNodes) -> None:
    device = [f"{pair.vendor}:4"]
    with kept_claims("/runs/mine"):
        claim(pair, pair.placements("3-4"))
        leave_claims(pair)
        pair.leave()
        (one,) = holders(device)
        assert one.about is not None
        assert one.about["run"] == "/runs/mine"
        assert not pair.ended.is_set()
        claim(pair, pair.placements("3-4"))
        # Its process has nothing to hold any more.
        assert pair.ended.wait(60)
        assert (pair.said, pair.held()) == ([], ["3", "4"])
        assert len(claim_names(pair.topology, pair.placements("4")[0])) == 1
        pair.leave()
        until(lambda: pair.held() == ["3"], "the claims of the last attempt to end")
    until(lambda: pair.held() == [], "the end of the run's claims")


def test_what_was_left_on_a_node_is_given_back_before_a_wait(pair: TwoNodes, hold: Hold) -> None:
    with kept_claims("/runs/mine"):
        claim(pair, pair.placements("3-4"))
        leave_claims(pair)
        pair.leave()
        other = hold(f"{pair.vendor}:5")
        seen: list[str] = []

        def end() -> None:
            until(lambda: pair.held() == ["5"], "what was kept to be free")
            seen.append("free")
            other.kill()

        pair.on_wait = end
        claim(pair, pair.placements("3-5"))
        assert (seen, pair.held()) == (["free"], ["3", "4", "5"])


def test_a_run_that_does_not_come_back_loses_its_devices(pair: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_claims, "_RETURN_SECONDS", 0.0)
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "0.01")
    with kept_claims("/runs/mine"):
        claim(pair, pair.placements("3-4"))
        leave_claims(pair)
        pair.leave()
        assert pair.ended.wait(60)
        assert pair.held() == ["3"]


def test_a_node_that_fails_at_the_end_keeps_nothing(pair: TwoNodes) -> None:
    with kept_claims("/runs/mine"):
        claim(pair, pair.placements("3-4"))
        for failure in (ray.exceptions.RayActorError(), ValueError("no such option")):
            pair.failure = failure
            leave_claims(pair)
        pair.failure = None
        pair.leave()
        assert pair.held() == ["3"]
        claim(pair, pair.placements("3-4"))
        assert pair.held() == ["3", "4"]


def test_what_is_kept_has_the_rank_of_the_next_cluster(pair: TwoNodes) -> None:
    with kept_claims("/runs/mine"):
        claim(pair, pair.placements("3"))
        pair.leave()
        # The same machine, by the same names, as node 1.
        after = TwoNodes()
        after.topology = ClusterTopology.from_nodes([NodeInfo(0, 1, "X"), NodeInfo(1, 4, pair.vendor)])
        after.own_rank = 1
        placements = after.placements("4")
        claim(after, placements)
        assert len(claim_names(after.topology, placements[0])) == 1
        assert after.actors == []


def test_a_driver_on_no_node_of_the_job_claims_by_actors(pair: TwoNodes) -> None:
    pair.own_rank = None
    claim(pair, pair.placements("0"))
    assert len(pair.actors) == 1
    pair.actors[0].drop.remote([f"{pair.vendor}:0"])
    until(lambda: pair.held() == [], "the end of the actor's claim")


def test_a_node_that_fails_leaves_what_others_hold(pair: TwoNodes) -> None:
    claim(pair, pair.placements("0"))
    pair.failure = RuntimeError("node down")
    with pytest.raises(RuntimeError, match="node down"):
        claim(pair, pair.placements("4"))
    assert pair.held() == ["0"]


def test_a_holder_that_died_is_started_anew(pair: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_: object, **__: object) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(_Ray, "get", dead)
    with pytest.raises(ClusterError, match="node 1 does not say who holds its devices"):
        claim(pair, pair.placements("4"))
    monkeypatch.undo()
    monkeypatch.setattr(job_claims, "ray_api", _Ray)
    claim(pair, pair.placements("4"))
    assert len(pair.actors) == 2


def test_devices_are_given_back_with_their_last_use(node: OneNode) -> None:
    first, second = object(), object()
    claim(node, node.placements("0-1"), first)
    claim(node, node.placements("1"), second)
    give_back(first)
    until(lambda: holders([f"{node.vendor}:0"]) == [], "the device to be free")
    assert len(holders([f"{node.vendor}:1"])) == 1
    claim(node, node.placements("1"))
    give_back(second)
    # The program claimed it besides.
    assert len(holders([f"{node.vendor}:1"])) == 1


def test_a_wait_is_news_only_where_it_changes(node: OneNode, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    other = hold(f"{node.vendor}:0")
    looks: list[float] = []

    def slept(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 5:
            other.kill()
            other.communicate()

    monkeypatch.setattr(job_claims.time, "sleep", slept)
    monkeypatch.setattr(job_claims, "_WORD_SECONDS", 0.0)
    claim(node, node.placements("0"))
    assert (len(node.said), len(node.again)) == (1, 4)


def test_a_bind_that_the_kernel_refuses_is_told(node: OneNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(DeviceHolder, "take", refuse)
    with pytest.raises(ClusterError, match="this machine makes no claims on devices"):
        claim(node, node.placements("0"))


def test_a_robot_is_claimed_by_its_address_and_not_by_a_variable() -> None:
    cluster = ClusterConfig.model_validate(
        {
            "num_nodes": 1,
            "node_groups": [
                {
                    "label": "arms",
                    "node_ranks": 0,
                    "hardware": {
                        "type": "Robot",
                        "configs": [
                            {"node_rank": 0, "address": "/dev/a", "driver": "x:Y", "camera_serials": ["b", "$CAM"]},
                            {"node_rank": 0, "address": "$ARM", "driver": "x:Y"},
                        ],
                    },
                }
            ],
            "component_placement": {"env": {"node_group": "arms", "placement": "0-1"}},
        }
    )
    topology = ClusterTopology.from_nodes([NodeInfo(0)], cluster)
    config = {"cluster": cluster}
    placements = ComponentPlacement(config, topology).get_strategy("env").get_placement(topology)
    assert devices_of(topology, placements) == {0: {"Robot:/dev/a": "Robot /dev/a", "camera:b": "camera b"}}


def test_devices_are_named_as_their_node_names_them() -> None:
    topology = ClusterTopology.from_nodes([NodeInfo(0, 2, "NVIDIA", accelerator_ids=("5", "GPU-ab"))])
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-1"}}}
    placements = ComponentPlacement(config, topology).get_strategy("actor").get_placement(topology)
    assert devices_of(topology, placements) == {0: {"NVIDIA:5": "accelerator 0", "NVIDIA:GPU-ab": "accelerator 1"}}


def test_a_label_of_another_vendor_is_none() -> None:
    one = HolderInfo("NVIDIA:GPU-ab", 7, 0, {"label": "Robot:x"})
    assert device_words(one) == "NVIDIA GPU-ab"


def test_each_holder_is_named_with_what_it_holds() -> None:
    devices = {"N:0": "accelerator 0", "N:1": "accelerator 1", "N:2": "accelerator 2", "R:x": "Robot x"}
    a, b = {"run": "/r/a", "step": 1}, {"command": "train.py"}
    others = [
        HolderInfo("N:0", 7, 0, a),
        HolderInfo("N:1", 8, 0, b),
        HolderInfo("N:2", 7, 0, a),
        HolderInfo("R:x", 9, 0, None),
    ]
    assert held_words(2, devices, others) == (
        "accelerators 0,2 of node 2: /r/a, step 1; accelerator 1 of node 2: train.py, process 8, no step yet;"
        " Robot x of node 2: process 9, which does not answer or has ended"
    )


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"run": "/r/\x1b[31ma\n"}, "/r/\\x1b[31ma\\x0a"),
        ({"run": ["x"], "command": 3}, "process 7, which does not answer or has ended"),
        ({"run": "x" * 100_000}, None),
    ],
)
def test_what_a_holder_says_cannot_act_on_a_terminal(about: dict[str, Any], words: str | None) -> None:
    text = job_words(HolderInfo("N:0", 7, 20001, about))
    assert text == words or (words is None and len(text) < 1000)


@pytest.mark.parametrize(
    ("about", "words"),
    [({"step": "12"}, "no step yet"), ({"step": 3, "left": -5}, "step 3"), ({"step": 3, "total": 1e99}, "step 3")],
)
def test_figures_that_are_none_are_left_out(about: dict[str, Any], words: str) -> None:
    assert progress_words(HolderInfo("N:0", 7, 0, about)) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (95, "2 min"), (5000, "83 min"), (7200, "2 h")]
)
def test_times_are_rough(seconds: float, words: str) -> None:
    assert rough_seconds(seconds) == words


def test_a_rehearsal_claims_nothing(node: OneNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "wanted", pacing.Pacing({}))
    claim(node, node.placements("0-3"))
    assert claim_names(node.topology, node.placements("0")[0]) == ()
