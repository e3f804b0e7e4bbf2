"""A cluster that is asked by hand, and the Ray that a driver starts for itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlinf_core import Worker
from rlinf_core.cluster import engine
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import ClusterError, PlacementError
from rlinf_core.placement.strategies import NodePlacementStrategy
from tests.listeners import family_of, listeners_of
from tests.rlinf_command import output_of

SEEN = "SEEN_BY_THE_ACTOR"


class Actor:
    """An ordinary class: no worker, and of no group."""

    def __init__(self, first: int, second: str) -> None:
        self.value = (first, second)
        self.both_are_here = threading.Barrier(2)

    def arguments(self) -> tuple[int, str]:
        return self.value

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return the node that it runs on, and what of Ray's resources it holds."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_assigned_resources()

    def process(self) -> tuple[str, str | None]:
        return sys.executable, os.environ.get(SEEN)

    def meet(self) -> int:
        """Return when it is called twice at a time."""
        return self.both_are_here.wait(30)


@pytest.fixture
def allocate() -> Iterator[Callable[..., Any]]:
    """`Cluster.allocate`, whose actors end with the test."""
    actors: list[Any] = []

    def make(cluster: Cluster, **options: Any) -> Any:
        actors.append(cluster.allocate(Actor, node_rank=0, **options))
        return actors[-1]

    yield make
    for actor in actors:
        ray.kill(actor)


def configured() -> Cluster:
    """Return the cluster of the tests, whose only node has a group of its own and a variable."""
    group = {
        "label": "workshop",
        "node_ranks": "0",
        "env_configs": [{"node_ranks": "0", "env_vars": [{SEEN: "of the group"}]}],
    }
    return Cluster(cluster_cfg=ClusterConfig.model_validate({"num_nodes": 1, "node_groups": [group]}))


def test_a_node_group_is_found_by_its_label(cluster: Cluster) -> None:
    with_groups = configured()
    group = with_groups.get_node_group("workshop")
    assert (group.label, group.node_ranks, group.num_nodes) == ("workshop", (0,), 1)
    assert group.num_units == (with_groups.num_accelerators or 1)
    # These two are in every cluster, the others are those of its configuration.
    assert [cluster.get_node_group(label).node_ranks for label in ("cluster", "node")] == [(0,), (0,)]
    with pytest.raises(PlacementError, match="did you mean `workshop`"):
        with_groups.get_node_group("workshp")
    with pytest.raises(PlacementError, match="workshop"):
        cluster.get_node_group("workshop")


def test_an_actor_is_made_on_its_node_with_its_arguments(cluster: Cluster, allocate: Callable[..., Any]) -> None:
    actor = allocate(cluster, name="by hand", max_concurrency=2, args=(3, "three"))
    assert ray.get(actor.arguments.remote(), timeout=60) == (3, "three")
    node, resources = ray.get(actor.place.remote(), timeout=60)
    assert cluster.node_ranks[node] == 0
    assert not resources
    assert sorted(ray.get([actor.meet.remote(), actor.meet.remote()], timeout=60)) == [0, 1]
    result = ray.get_actor("by hand", namespace=cluster.session.job)
    assert ray.get(result.arguments.remote(), timeout=60) == (3, "three")


def test_actor_has_the_variables_of_its_group(allocate: Callable[..., Any]) -> None:
    plain = allocate(configured(), args=(1, ""))
    with_variables = allocate(configured(), node_group="workshop", args=(1, ""))
    processes = ray.get([plain.process.remote(), with_variables.process.remote()], timeout=60)
    assert processes == [(sys.executable, None), (sys.executable, "of the group")]


def test_no_actor_is_made_on_a_node_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="there is no node 1"):
        cluster.allocate(Actor, node_rank=1, args=(1, ""))


WITHOUT_RAYLET = """
import ray._private.node as node
from rlinf_core import Cluster, ClusterError

def never(self, *args, **kwargs):
    raise Exception("the node timed out during startup")

node.Node.start_ray_processes = never
try:
    Cluster(num_nodes=1)
except ClusterError as error:
    print(error)
"""

LAST_WORDS = """
import os
from rlinf_core import Cluster, Worker, WorkerDiedError

class Talker(Worker):
    def talk(self):
        print("last words")

    def die(self):
        os._exit(3)

cluster = Cluster(num_nodes=1)
talker = Talker.create_group().launch(cluster, name="talker")
try:
    talker.die().wait()
except* WorkerDiedError:
    print("it", "died")
talker = Talker.create_group().launch(cluster, name="another")
talker.talk().wait()
"""


# Ray comes first: then it has made up its mind about starting by itself before rlinf is there.
AFTERWARDS = """
import asyncio
import ray
from rlinf_core import Channel, Cluster, ClusterError, RLinfError, Worker, WorkerGroup

class Idle(Worker):
    def ready(self):
        return self._rank

def refused(what):
    try:
        what()
    except ClusterError as error:
        print(error.message)

def fails(what):
    try:
        what()
    except RLinfError:
        return True
    return False

cluster = Cluster(num_nodes=1)
group = Idle.create_group().launch(cluster, name="idle")
view = group.execute_on(0)
channel = Channel.create("belt")
channel.put(1)
handle = group.ready()
# Answered, which nobody has looked at: what is in the midst of a call is cancelled, and says that.
group.ready().wait()
cluster.shutdown()
refused(handle.wait)
refused(lambda: asyncio.run(handle.async_wait()))
refused(lambda: Idle.create_group().launch(cluster))
refused(lambda: cluster.allocate(object, node_rank=0))
refused(lambda: cluster.client)
refused(lambda: cluster.declare_groups("idle"))
refused(lambda: cluster.record(None))
refused(lambda: ray.put(1))
refused(lambda: view.ready())
refused(lambda: view.ready.scatter([1]))
uses = (
    lambda: group.ready(),
    lambda: group.execute_on(0),
    lambda: group.take_spans(),
    lambda: WorkerGroup.from_group_name(Idle, "idle"),
    lambda: channel.put(2),
    lambda: channel.put(2, async_op=True).wait(),
    lambda: channel.get(),
    lambda: channel.get_nowait(),
    lambda: channel.get(async_op=True).wait(),
    lambda: channel.get_batch(1),
    lambda: channel.qsize(),
    lambda: next(iter(channel)),
    lambda: Channel.create("another"),
    lambda: Channel.connect("belt"),
)
print([fails(use) for use in uses] == [True] * len(uses))
# What is known of it needs nobody's answer, and ending it again ends nothing.
print(cluster.num_nodes, cluster.get_node_info(0).rank, cluster.get_node_group("node").num_units)
group.shutdown()
cluster.shutdown()
print(ray.is_initialized())
with Cluster(num_nodes=1) as another:
    Idle.create_group().launch(another)
    refused(handle.wait)
"""

FORK = """
import os, sys
from rlinf_core import Cluster, ClusterError, Worker

class Idle(Worker):
    def ready(self):
        return self._rank

cluster = Cluster(num_nodes=1)
group = Idle.create_group().launch(cluster, name="idle")
handle = group.ready()
child = os.fork()
if child == 0:
    for use in handle.wait, Cluster:
        try:
            use()
        except ClusterError as error:
            print(error.message, flush=True)
    cluster.shutdown()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), handle.wait(), group.ready().wait())
"""

# A driver, its Ray and a worker: what they keep in temporary folders is in one that all of them find.
WORKS = """
from rlinf_core import Cluster, Worker

class Idle(Worker):
    def ready(self):
        return self._rank

with Cluster(num_nodes=1) as cluster:
    print(Idle.create_group().launch(cluster).ready().wait(), cluster.get_node_ip(0))
"""


class Idle(Worker):
    def ready(self) -> int:
        return self._rank


def test_it_listens_on_loopback_alone(cluster: Cluster) -> None:
    with Idle.create_group().launch(cluster) as group:
        group.ready().wait()
        listening = listeners_of(family_of(os.getpid()))
    assert cluster.get_node_ip(0) == "127.0.0.1"
    assert len(listening) > 3
    assert {listener.place for listener in listening} == {"loopback", "unix socket"}


def test_another_driver_with_its_token_joins_it_by_its_address(cluster: Cluster) -> None:
    running = engine.current()
    assert running is not None
    printed = _run(WORKS, RLINF_ADDRESS=running.address)
    assert printed == "[0] 127.0.0.1\n"
    for address in (running.address, "local"):
        assert Cluster(address=address).node_ranks == cluster.node_ranks
    with pytest.raises(ClusterError, match=f"already in the cluster at {running.address}, not in `127.0.0.1:1`"):
        Cluster(address="127.0.0.1:1")
    with Idle.create_group().launch(cluster) as group:
        assert group.ready().wait() == [0]


def test_one_that_does_not_start_is_an_error_of_the_cluster() -> None:
    printed = _run(WITHOUT_RAYLET)
    assert "Ray does not start on this machine" in printed
    assert "the node timed out during startup" in printed


def test_a_program_prints_its_own_lines_and_all_of_its_workers() -> None:
    printed = _run(LAST_WORDS)
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in printed.splitlines()]
    assert [re.sub(r"pid=\d+", "pid", line) for line in lines] == ["it died", "(another:0 pid) last words"]


@pytest.mark.nightly
def test_after_its_end_nothing_starts_another_by_accident() -> None:
    printed = _run(AFTERWARDS)
    assert printed.splitlines() == [
        *["the cluster was shut down"] * 10,
        "True",
        "1 0 1",
        "False",
        "the cluster of idle.ready() was shut down",
    ]


def test_forked_child_ends_and_leaves_the_cluster_alone(cluster: Cluster) -> None:
    running = engine.current()
    assert running is not None
    # Nothing goes to standard error.
    environ = os.environ | {"RLINF_ADDRESS": running.address}
    said = output_of(sys.executable, "-c", FORK, env=environ, timeout=120, errors=True)
    *child, parent = said.splitlines()
    assert len(child) == 2
    assert all(line.startswith("this process was forked from one in a cluster") for line in child)
    assert parent == "7 [0] [0]"


def _run(script: str, **variables: str) -> str:
    return output_of(sys.executable, "-c", script, env=os.environ | variables, timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TMPDIR", "HOME"])
@pytest.mark.parametrize("folder", ["missing", "with a blank", "long" * 30, "/proc"])
def test_it_works_whatever_tmpdir_and_home_are(tmp_path: Path, name: str, folder: str) -> None:
    if folder not in ("missing", "/proc"):
        (tmp_path / folder).mkdir()
    assert _run(WORKS, **{name: str(tmp_path / folder)}) == "[0] 127.0.0.1\n"


@pytest.mark.security
def test_another_user_reaches_nothing_that_ray_keeps(cluster: Cluster) -> None:
    # Ray gives its own folders to everybody, again with each worker: the one around them keeps others out.
    with Idle.create_group().launch(cluster, NodePlacementStrategy([0] * 4)) as group:
        group.ready().wait()
        running = engine.current()
        assert running is not None
        assert running.folder is not None
        around = running.folder.parent.stat()
        assert (around.st_uid, oct(around.st_mode & 0o7777)) == (os.getuid(), "0o700")
        if os.getuid() == 0:
            look = f"import os; os.stat({str(running.folder)!r})"
            done = subprocess.run(
                ["python3", "-c", look], user=65534, group=65534, extra_groups=[], stderr=subprocess.PIPE, check=False
            )
            assert b"PermissionError" in done.stderr
