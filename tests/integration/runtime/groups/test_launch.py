"""How the workers of a group come to be: all at once, each seeing the accelerators that its placement says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
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
