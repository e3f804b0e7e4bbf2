"""One job under two interpreters, and interpreters that cannot run workers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.cluster import ClusterConfig
from rlinf_core.errors import ClusterError
from rlinf_core.placement.node import NodePlacementStrategy
from rlinf_core.worker.worker import Worker


class Peer(Worker):
    def interpreter(self) -> tuple[str, bool]:
        """Return the interpreter, and whether it has the package that only one of them has."""
        import importlib.util

        return sys.executable, importlib.util.find_spec("stack_of_its_own") is not None

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
    checkout = [str(Path(__file__).parents[3])] if ours else []
    wanted = [f"import site; site.addsitedir({path!r})" for path in paths]
    (packages / "a_first.pth").write_text("\n".join([*wanted, *checkout, *lines, ""]))
    return str(folder / "bin" / "python")


def under(path: str) -> Cluster:
    """Return the cluster of the tests, whose only node is said to have this interpreter."""
    group = {"label": "other", "node_ranks": "0", "env_configs": [{"node_ranks": "0", "python_interpreter_path": path}]}
    return Cluster(cluster_cfg=ClusterConfig.model_validate({"num_nodes": 1, "node_groups": [group]}))


def test_groups_under_two_interpreters_exchange_tensors(cluster: Cluster, tmp_path: Path) -> None:
    other = interpreter(tmp_path / "venv")
    one = Peer.create_group().launch(cluster, NodePlacementStrategy([0]), name="under_ours")
    two = Peer.create_group().launch(under(other), NodePlacementStrategy([0]), name="under_another")
    with one, two:
        assert one.interpreter().wait() == [(sys.executable, False)]
        assert two.interpreter().wait() == [(other, True)]
        handles: list[Any] = [one.exchange("under_another"), two.exchange("under_ours")]
        assert [handle.wait(timeout=60) for handle in handles] == [[101_000.0]] * 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("missing", "it does not exist"),
        ("bare", "No module named 'ray'"),
        ("other", r"it has ray 0\.0\.1, the cluster runs \d"),
    ],
)
def test_an_interpreter_that_cannot_run_workers_is_refused_at_once(
    cluster: Cluster, tmp_path: Path, fault: str, why: str
) -> None:
    path = str(tmp_path / "venv" / "bin" / "python")
    if fault == "bare":
        path = interpreter(tmp_path / "venv", ours=False)
    elif fault == "other":
        path = interpreter(tmp_path / "venv", "import ray; ray.__version__ = '0.0.1'")
    began = time.monotonic()
    with pytest.raises(ClusterError, match=f"cannot run workers(.|\n)*{why}") as caught:
        Peer.create_group().launch(under(path), NodePlacementStrategy([0]), name="refused")
    assert path in str(caught.value)
    assert "node 0" in str(caught.value)
    assert time.monotonic() - began < 30
