"""Nobody reaches a running job but through the listeners that docs/clusters.md has in its table."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_core import Cluster, NodePlacementStrategy, Worker
from rlinf_core.cluster import engine
from rlinf_core.process.proc import processes_of
from tests.integration.recipes.conftest import SMALL, SMALL_MATH
from tests.integration.recipes.serve.service_command import service
from tests.listeners import ALWAYS, compared, family_of, names_of_job

pytestmark = [pytest.mark.security, pytest.mark.ray, pytest.mark.timeout(600)]

CONFIGS = Path(__file__).parents[3] / "configs"
RANKS = "Ranks that train together on CPUs"


class Trainer(Worker):
    """A rank that trains with others."""

    def meet(self) -> tuple[float, int]:
        import torch.distributed as dist

        from recipes.training.sharding import join_ranks

        join_ranks(self._rank, self._world_size, torch.device("cpu"))
        return self.add_up(dist.new_group([0, 1])), int(os.environ["MASTER_PORT"])

    def add_up(self, group: Any = None) -> float:
        one = torch.ones(1)
        torch.distributed.all_reduce(one, group=group)
        return float(one)


def test_ranks_listen_on_loopback_and_offer_no_store(cluster: Cluster) -> None:
    group = Trainer.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="trainer")
    met = group.meet().wait()
    assert [total for total, _ in met] == [2.0, 2.0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", met[0][1]))
    running = engine.current()
    assert running is not None
    names = compared(processes_of(str(running.folder), str(running.folder)))
    assert names >= {*ALWAYS, RANKS}
    # A stranger has written to every socket.
    assert group.add_up().wait() == [2.0, 2.0]
    group.shutdown()


def placed(*components: str, count: int = 1) -> tuple[str, ...]:
    return tuple(
        f"cluster.component_placement.{name}={{node_group: node, placement: '0:0-{count - 1}'}}" for name in components
    )


def small(settings: Iterable[str]) -> tuple[str, ...]:
    return tuple(setting for setting in settings if not setting.startswith("runner.max_steps"))


@pytest.mark.nightly
def test_embodied_job_of_two_ranks(tmp_path: Path) -> None:
    several = ("~cluster.component_placement", *placed("rollout", "env"), *placed("actor", count=2))
    names = names_of_job(tmp_path, str(CONFIGS / "laptop.yaml"), *small(SMALL), *several)
    assert names >= {*ALWAYS, RANKS}


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["math_laptop", "agent_calculator"])
def test_job_of_a_language_model(tmp_path: Path, file: str) -> None:
    names = names_of_job(tmp_path, str(CONFIGS / f"{file}.yaml"), *small(SMALL_MATH))
    assert names >= ALWAYS
    assert RANKS not in names


@pytest.mark.nightly
def test_service(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        assert compared(family_of(running.process.pid)) >= {*ALWAYS, "`rlinf serve`"}
