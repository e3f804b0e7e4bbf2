"""Nobody reaches a running job but through listeners in the table; LeRobot reads what we write."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.demonstrations.lerobot.lerobot_set import read_lerobot
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from rlinf_core import Cluster, NodePlacementStrategy, Worker
from rlinf_core.cluster import engine
from rlinf_core.process.proc import processes_of
from tests.integration.recipes.conftest import SMALL, SMALL_MATH
from tests.integration.recipes.serve.service_command import service
from tests.listeners import ALWAYS, compared, family_of, names_of_job
from tests.rlinf_command import output_of

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


@pytest.mark.security
@pytest.mark.ray
@pytest.mark.timeout(600)
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


@pytest.mark.security
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_embodied_job_of_two_ranks(tmp_path: Path) -> None:
    several = ("~cluster.component_placement", *placed("rollout", "env"), *placed("actor", count=2))
    names = names_of_job(tmp_path, str(CONFIGS / "embodied/pick-laptop.yaml"), *small(SMALL), *several)
    assert names >= {*ALWAYS, RANKS}


@pytest.mark.security
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.parametrize("file", ["math/sums-laptop", "agent/calculator-laptop"])
def test_job_of_a_language_model(tmp_path: Path, file: str) -> None:
    names = names_of_job(tmp_path, str(CONFIGS / f"{file}.yaml"), *small(SMALL_MATH))
    assert names >= ALWAYS
    assert RANKS not in names


@pytest.mark.security
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_service(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        assert compared(family_of(running.process.pid)) >= {*ALWAYS, "`rlinf serve`"}


PYTHON = os.environ.get("RLINF_TEST_LEROBOT", "")
MAIN = "observation.images.main"


def lerobot(home: Path, *arguments: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    output_of(PYTHON, Path(__file__).with_name("lerobot_sets.py"), *arguments, env=environment)


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_lerobot_reads_what_we_write(tmp_path: Path, kind: str) -> None:
    features = {
        "observation.state": Feature("float32", (3,)),
        MAIN: Feature(kind, (32, 48, 3), ["height", "width", "channels"]),
        "action": Feature("float32", (2,)),
        "next.done": Feature("bool", (1,)),
    }
    random = np.random.default_rng(0)
    parts: list[dict[str, NDArray[Any]]] = []
    with DatasetWriter(tmp_path / "set", 10, features) as writer:
        for number, length in enumerate((6, 9, 4)):
            shade = np.linspace(20, 180, 32 * 48).reshape(32, 48, 1) + 5 * np.arange(length)[:, None, None, None]
            parts.append(
                {
                    "observation.state": random.normal(size=(length, 3)).astype(np.float32),
                    MAIN: np.repeat(shade, 3, axis=3).astype(np.uint8),
                    "action": random.normal(size=(length, 2)).astype(np.float32),
                    "next.done": np.arange(length) == length - 1,
                }
            )
            writer.add(parts[-1], f"task {number % 2}")
    lerobot(tmp_path, "read", str(tmp_path / "set"), str(tmp_path / "out.npz"))
    theirs, ours = np.load(tmp_path / "out.npz"), read_lerobot(tmp_path / "set")
    assert (int(theirs["fps"]), int(theirs["episodes"])) == (10, 3)
    for name in ("observation.state", "action", "next.done"):
        assert np.array_equal(theirs[name].squeeze(), np.concatenate([part[name] for part in parts])), name
    assert theirs["tasks"].tolist() == [ours.tasks[task] for task in ours.task_of]
    assert np.array_equal(theirs["episode_index"].ravel(), np.repeat([0, 1, 2], [6, 9, 4]))
    np.testing.assert_allclose(theirs["timestamp"].ravel(), np.concatenate([np.arange(n) for n in (6, 9, 4)]) / 10)
    pictures = (theirs[MAIN].transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    assert np.array_equal(pictures, ours.cameras["main"].read(np.arange(19)))
    if kind == "image":
        assert np.array_equal(pictures, np.concatenate([part[MAIN] for part in parts]))
    assert ours.statistics is not None
    np.testing.assert_allclose(theirs["stats/action"], ours.statistics["action"]["mean"])
    np.testing.assert_allclose(theirs[f"stats/{MAIN}"], ours.statistics[MAIN]["mean"])


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_we_read_what_lerobot_writes(tmp_path: Path, kind: str) -> None:
    lerobot(tmp_path, "write", str(tmp_path / "set"), kind, str(tmp_path / "written.npz"))
    lerobot(tmp_path, "read", str(tmp_path / "set"), str(tmp_path / "read.npz"))
    written, read, ours = (
        np.load(tmp_path / "written.npz"),
        np.load(tmp_path / "read.npz"),
        read_lerobot(tmp_path / "set"),
    )
    assert ours.states is not None
    assert (ours.fps, ours.bounds.tolist()) == (10, [0, 6, 15])
    assert np.array_equal(ours.actions, written["action"])
    assert np.array_equal(ours.states, written["observation.state"])
    assert [ours.tasks[task] for task in ours.task_of] == written["task"].tolist()
    pictures = ours.cameras["main"].read(np.arange(15))
    assert np.array_equal(pictures, (read[MAIN].transpose(0, 2, 3, 1) * 255).round().astype(np.uint8))
    if kind == "image":
        assert np.array_equal(pictures, written[MAIN])
    assert np.abs(pictures.astype(int) - written[MAIN]).mean() < 4
    assert ours.statistics is not None
    np.testing.assert_allclose(ours.statistics["action"]["mean"], read["stats/action"])
