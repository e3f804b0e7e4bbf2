"""Nodes that are gone, do not answer or cannot run rlinf: each has its own cause and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.cluster import joining as module
from rlinf_core.cluster.joining import answer
from rlinf_core.cluster.membership import NodeMember, departed
from rlinf_core.errors import ClusterError

NODE = NodeMember("id", "10.0.0.3", 2)


def entry(rank: int, alive: bool, reason: str = "") -> dict[str, Any]:
    labels = {"rlinf.io/rank": str(rank)}
    return {
        "NodeID": f"{rank}{alive}",
        "NodeManagerAddress": f"10.0.0.{rank + 1}",
        "Alive": alive,
        "Labels": labels,
        "DeathReasonMessage": reason,
    }


def test_ranks_that_are_gone_are_told_with_the_reason() -> None:
    nodes = [entry(0, True), entry(1, False), entry(1, True), entry(2, False, "missed heartbeats\nand more")]
    assert departed(nodes) == {2: "node 2 (10.0.0.3) joined and was lost: missed heartbeats"}


@pytest.mark.parametrize(
    ("error", "message", "help"),
    [
        ("GetTimeoutError", "the node at 10.0.0.3 has not answered since ", "rlinf status"),
        ("NodeDiedError", "the node at 10.0.0.3 has not answered since ", "rlinf status"),
        ("RayTaskError", "the node at 10.0.0.3 joined, but cannot run rlinf", "install the same rlinf"),
    ],
)
def test_the_remedy_fits_the_cause(monkeypatch: pytest.MonkeyPatch, error: str, message: str, help: str) -> None:
    base = type("RayError", (Exception,), {})
    names = ("RayTaskError", "RuntimeEnvSetupError", "WorkerCrashedError", "GetTimeoutError", "NodeDiedError")
    types = {name: type(name, (base,), {}) for name in names}

    def get(reference: Any, timeout: float) -> None:
        raise types[error]("No module named 'rlinf_core'")

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=base, **types))
    monkeypatch.setattr(module, "ray_api", lambda: ray)
    with pytest.raises(ClusterError, match=message) as caught:
        answer(None, NODE, 1.8e9)
    assert help in (caught.value.help or "")


@pytest.mark.parametrize("seconds", [20, 90, 600])
def test_a_busy_node_is_waited_for_and_a_lost_one_is_told(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    class RayError(Exception):
        pass

    def get(reference: str, timeout: float) -> str:
        if seconds > timeout:
            raise TimeoutError
        return reference

    errors = SimpleNamespace(RayError=RayError, RayTaskError=KeyError, RuntimeEnvSetupError=KeyError)
    errors.WorkerCrashedError = KeyError
    monkeypatch.setattr(module, "ray_api", lambda: SimpleNamespace(get=get, exceptions=errors))
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "10")
    if seconds < 100:
        assert answer("facts", NodeMember("id", "10.0.0.2"), 0.0) == "facts"
    else:
        with pytest.raises(ClusterError, match=r"the node at 10\.0\.0\.2 has not answered since"):
            answer("facts", NodeMember("id", "10.0.0.2"), 0.0)
