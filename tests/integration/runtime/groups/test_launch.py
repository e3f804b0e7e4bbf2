"""How the workers of a group come to be: what each sees, the order of imports, a first word."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
from rlinf_core.process.import_path import OWN_ROOT
from rlinf_core.supervision.waits import LongWaits
from rlinf_core.topology import ClusterTopology
from rlinf_core.worker.worker import Worker


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
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": OWN_ROOT},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *standard, recipe, theirs = map(Path, json.loads(done.stdout.splitlines()[-1]))
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
