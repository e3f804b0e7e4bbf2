"""How the workers of a group come to be: what each sees, the order of imports, and one job under two interpreters."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import ClusterError, ConfigError
from rlinf_core.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy
from rlinf_core.process.import_path import OWN_ROOT
from rlinf_core.supervision.waits import LongWaits
from rlinf_core.topology import ClusterTopology
from rlinf_core.worker.worker import Worker
from tests.rlinf_command import output_of


class Waiting(Worker):
    """Is constructed once all others are being constructed."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        Path(folder, str(self._rank)).touch()
        give_up = time.monotonic() + 30
        while len(os.listdir(folder)) < self._world_size:
            assert time.monotonic() < give_up, f"of {self._world_size} only {sorted(os.listdir(folder))} have begun"
            time.sleep(0.01)

    def rank(self) -> int:
        return self._rank


class Seeing(Worker):
    def sight(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}

    def device(self) -> tuple[str, int | None, tuple[int, ...]]:
        return str(self.torch_device), self.worker_info.gpu_id, self.worker_info.available_gpus


@pytest.fixture
def four_gpus(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster of the tests, whose only node is said to have four GPUs."""
    node = cluster.get_node_info(0)._replace(num_accelerators=4, accelerator_type="NVIDIA", accelerator_ids=())
    monkeypatch.setattr(cluster, "topology", ClusterTopology.from_nodes([node]))
    return cluster


def test_worker_keeps_its_nodes_visibility_variable(four_gpus: Cluster) -> None:
    """It is given no accelerator and kept from none: it computes on one of them where its torch can."""
    with Seeing.create_group().launch(four_gpus, NodePlacementStrategy([0] * 2), name="unreserved") as group:
        # Not at the head of this module, which every worker here imports.
        import torch

        own = os.environ.get("CUDA_VISIBLE_DEVICES")
        assert [tuple(item.values()) for item in group.sight().wait()] == [(own, "0", "2"), (own, "1", "2")]
        usable = torch.cuda.device_count()
        device = [f"cuda:{rank % usable}" if usable else "cpu" for rank in range(2)]
        assert group.device().wait() == [(item, None, (0, 1, 2, 3)) for item in device]


def test_constructors_may_wait_for_each_other(cluster: Cluster, tmp_path: Path) -> None:
    with Waiting.create_group(str(tmp_path)).launch(cluster, NodePlacementStrategy([0] * 3), name="waiting") as group:
        assert group.rank().wait() == [0, 1, 2]


@pytest.mark.parametrize(
    ("isolate", "sights", "devices"),
    [
        (True, [("0,1", "0", "1"), ("2,3", "0", "1")], [("cuda:0", 0, (0, 1)), ("cuda:0", 2, (2, 3))]),
        (
            False,
            [("0,1,2,3", "0", "2"), ("0,1,2,3", "2", "2")],
            [("cuda:0", 0, (0, 1, 2, 3)), ("cuda:2", 2, (0, 1, 2, 3))],
        ),
    ],
    ids=["isolated", "not isolated"],
)
def test_a_worker_sees_its_own_accelerators_or_all_of_its_node(
    four_gpus: Cluster,
    isolate: bool,
    sights: list[tuple[str, str, str]],
    devices: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    strategy = PackedPlacementStrategy(0, 3, num_hardware_per_process=2)
    group = Seeing.create_group().launch(four_gpus, strategy, name="seeing", isolate_accelerator=isolate)
    with group:
        assert [tuple(item.values()) for item in group.sight().wait()] == sights
        assert group.device().wait() == devices


DRIVER = """\
import os, sys
sys.path.pop(0)
from rlinf_core.process import import_path
import_path.manage(os.getcwd())
import json
import mine
from rlinf_core import Cluster
if __name__ == "__main__":
    with Cluster(address="local") as cluster:
        [found] = mine.Mine.create_group().launch(cluster).find().wait()
    print(json.dumps(found))
"""
MINE = """\
from rlinf_core import Worker
class Mine(Worker):
    def find(self):
        import queue, random, recipes.embodied, recipes.theirs
        return [module.__file__ for module in (queue, random, recipes.embodied, recipes.theirs)]
"""


@pytest.mark.timeout(200)
def test_workers_import_rlinf_the_library_and_user_code(tmp_path: Path) -> None:
    for name in ("random", "queue", "rlinf_core"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('hidden')")
    (tmp_path / "recipes").mkdir()
    for name in ("__init__", "theirs"):
        (tmp_path / "recipes" / f"{name}.py").write_text("")
    (tmp_path / "mine.py").write_text(MINE)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "RAY_"))}
    printed = output_of(sys.executable, "-c", DRIVER, cwd=tmp_path, env={**env, "PYTHONPATH": OWN_ROOT}, timeout=180)
    *standard, recipe, theirs = map(Path, json.loads(printed.splitlines()[-1]))
    assert all(file.parent != tmp_path for file in standard)
    assert Path(OWN_ROOT) in recipe.parents
    assert theirs == tmp_path / "recipes" / "theirs.py"


# Seconds after which it never comes, however busy the machine is: all that it takes is one.
NEVER = 60


class Wake(logging.Handler):
    """Puts an item into a channel as soon as a line is logged that begins so."""

    def __init__(self, beginning: str, channel: Channel) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.beginning, self.channel = beginning, channel

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith(self.beginning) and not self.lines:
            self.lines.append(line)
            threading.Thread(target=self.channel.put, args=("woken",)).start()


def test_a_get_that_lasts_says_on_what_it_waits(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.client.wait_reports, "long_waits", LongWaits(0.1))
    channel = Channel.create("first_word")
    wake = Wake("driver waits on channel `first_word`", channel)
    logger = logging.getLogger("rlinf.job")
    logger.addHandler(wake)
    try:
        assert channel.get(timeout=NEVER) == "woken"
    finally:
        logger.removeHandler(wake)
    assert "empty" in wake.lines[0]
    channel.close()


class Peer(Worker):
    def interpreter(self) -> tuple[str, bool]:
        """Return the interpreter, and whether it has the package that only one of them has."""
        import importlib.util

        return sys.executable, importlib.util.find_spec("stack_of_its_own") is not None

    def seen(self) -> tuple[str, dict[str, str | None]]:
        """Return the interpreter, and some of the variables."""
        return sys.executable, {name: os.environ.get(name) for name in ("MARK", "PATH", "RANK")}

    def seen_by_a_child(self) -> tuple[str, str | None]:
        """Return the interpreter and the mark of a worker that this one launches."""
        with Peer.create_group().launch(Cluster(), NodePlacementStrategy([0]), name="child") as child:
            ((path, seen),) = child.seen().wait()
        return path, seen["MARK"]

    def exchange(self, peer: str) -> float:
        import numpy as np

        self.send({"weights": np.full(200_000, 0.5)}, peer, 0)
        got = self.recv(peer, 0)["weights"]
        buffer = np.zeros(1_000)
        self.send_tensor(np.ones(1_000), peer, 0, async_op=True)
        self.recv_tensor(buffer, peer, 0)
        return float(got.sum() + buffer.sum())


def interpreter(folder: Path, *lines: str, ours: bool = True) -> str:
    """Return an interpreter of its own, made offline.

    Args:
        folder: where.
        lines: Python that it runs first.
        ours: whether it finds what the interpreter of the tests has.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "stack_of_its_own.py").touch()
    paths = [path for path in sys.path if path.endswith("site-packages")] if ours else []
    checkout = [str(Path(__file__).parents[4])] if ours else []
    wanted = [f"import site; site.addsitedir({path!r})" for path in paths]
    (packages / "a_first.pth").write_text("\n".join([*wanted, *checkout, *lines, ""]))
    return str(folder / "bin" / "python")


def with_groups(**options: dict[str, Any]) -> Cluster:
    """Return the cluster of the tests, whose only node is in these groups, each with this in its `env_configs`."""
    groups = [
        {"label": label, "node_ranks": "0", "env_configs": [{"node_ranks": "0", **config}]}
        for label, config in options.items()
    ]
    return Cluster(cluster_cfg=ClusterConfig.model_validate({"num_nodes": 1, "node_groups": groups}))


def under(path: str) -> Cluster:
    """Return the cluster of the tests, with a group `other` of this interpreter."""
    return with_groups(other={"python_interpreter_path": path})


def test_groups_under_two_interpreters_exchange_tensors(cluster: Cluster, tmp_path: Path) -> None:
    other = interpreter(tmp_path / "venv")
    one = Peer.create_group().launch(cluster, NodePlacementStrategy([0]), name="under_ours")
    two = Peer.create_group().launch(under(other), NodePlacementStrategy([0], "other"), name="under_another")
    with one, two:
        assert one.interpreter().wait() == [(sys.executable, False)]
        assert two.interpreter().wait() == [(other, True)]
        handles: list[Any] = [one.exchange("under_another"), two.exchange("under_ours")]
        assert [handle.wait(timeout=60) for handle in handles] == [[101_000.0]] * 2


def test_two_groups_of_one_node_run_under_two_interpreters(cluster: Cluster, tmp_path: Path) -> None:
    """Each process has what the group that placed it gives; through `cluster` and `node` it has nothing of theirs."""
    first, second = (interpreter(tmp_path / name) for name in ("first", "second"))
    odd = "$HOME costs 5$ ${PATH} ${NOWHERE} 'x' \"y\" `id`"
    both = with_groups(
        a={"python_interpreter_path": first, "env_vars": {"MARK": odd, "PATH": "/opt/a/bin"}},
        b={"python_interpreter_path": second, "env_vars": {"MARK": "b", "RANK": "77"}},
    )
    diagnostics: dict[str, Any] = {}
    for label in ("a", "b", "cluster", "node"):
        group = Peer.create_group().launch(both, FlexiblePlacementStrategy([[0]], label), name=f"of_{label}")
        with group:
            (diagnostics[label],) = group.seen().wait()
    assert {label: path for label, (path, _) in diagnostics.items()} == {
        "a": first,
        "b": second,
        "cluster": sys.executable,
        "node": sys.executable,
    }
    assert {label: seen["MARK"] for label, (_, seen) in diagnostics.items()} == {
        "a": odd,
        "b": "b",
        "cluster": None,
        "node": None,
    }
    assert diagnostics["a"][1]["PATH"] == f"/opt/a/bin:{os.environ['PATH']}"
    assert diagnostics["b"][1]["PATH"] == os.environ["PATH"]
    # What a group gives wins over what the runtime would set.
    assert [diagnostics[label][1]["RANK"] for label in ("a", "b")] == ["0", "77"]


def test_script_as_an_interpreter_wraps_a_profiler_around(cluster: Cluster, tmp_path: Path) -> None:
    script, calls = tmp_path / "profiled", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    with Peer.create_group().launch(under(str(script)), NodePlacementStrategy([0], "other"), name="profiled") as group:
        assert group.interpreter().wait() == [(sys.executable, False)]
    assert "default_worker.py" in calls.read_text()
    script.write_text('#!/bin/sh\nexec no-such-profiler python "$@"\n')
    with pytest.raises(ClusterError, match=r"cannot run workers(.|\n)*no-such-profiler: not found"):
        Peer.create_group().launch(under(str(script)), NodePlacementStrategy([0], "other"), name="without")


def test_a_worker_of_a_group_launches_others_that_are_not_of_it(cluster: Cluster, tmp_path: Path) -> None:
    other = interpreter(tmp_path / "venv")
    inputs = with_groups(a={"python_interpreter_path": other, "env_vars": {"MARK": "a"}})
    with Peer.create_group().launch(inputs, NodePlacementStrategy([0], "a"), name="parent") as parent:
        assert parent.seen_by_a_child().wait() == [(sys.executable, None)]


def test_forwarded_variables_reach_every_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig.model_validate({"num_nodes": 1, "forward_env": ["MARK"]})
    forwarding = Cluster(cluster_cfg=config)
    with pytest.raises(ConfigError, match="names `MARK`, which is not set here"):
        Peer.create_group().launch(forwarding, NodePlacementStrategy([0]), name="unset")
    # Ray was started before this was set.
    monkeypatch.setenv("MARK", "$HOME costs 5$")
    with Peer.create_group().launch(forwarding, NodePlacementStrategy([0]), name="forwarded") as group:
        ((_, seen),) = group.seen().wait()
    assert seen["MARK"] == "$HOME costs 5$"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("missing", "it does not exist"),
        ("bare", "No module named 'ray'"),
        ("other", r"it has ray 0\.0\.1, the cluster runs \d"),
    ],
)
def test_unusable_interpreter_is_refused_at_once(cluster: Cluster, tmp_path: Path, fault: str, why: str) -> None:
    path = str(tmp_path / "venv" / "bin" / "python")
    if fault == "bare":
        path = interpreter(tmp_path / "venv", ours=False)
    elif fault == "other":
        path = interpreter(tmp_path / "venv", "import ray; ray.__version__ = '0.0.1'")
    with pytest.raises(ClusterError, match=f"cannot run workers(.|\n)*{why}") as caught:
        Peer.create_group().launch(under(path), NodePlacementStrategy([0], "other"), name="refused")
    assert path in str(caught.value)
    assert "node 0" in str(caught.value)
