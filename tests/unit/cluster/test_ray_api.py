"""Ray is used in a cluster that was made, and makes none by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from rlinf_core.cluster import ray_api as module
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import ClusterError


@pytest.mark.parametrize(
    "use", [lambda ray: ray.put(1), lambda ray: ray.remote(lambda: 1).remote()], ids=["put", "task"]
)
def test_outside_of_a_cluster_it_starts_none(monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    ray = ray_api()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: pytest.fail("Ray starts by itself"))
    with pytest.raises(ClusterError):
        use(ray)
    assert import_module("ray._private.auto_init_hook").enable_auto_connect is False


def test_starting_ray_is_asked_once_the_head_lists_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[dict[bytes, object]] = [{}, {b"\x0a": None}, {b"\x0a": None, b"\x0b": None}]
    asked: list[tuple[int, str, str]] = []

    class Head:
        def get_all_node_info(self, timeout: float) -> dict[bytes, object]:
            return listed.pop(0)

    services = import_module("ray._private.services")
    monkeypatch.setattr(module, "gcs_client", lambda address: Head())
    monkeypatch.setattr(services, "get_node", lambda *arguments: asked.append((len(listed), *arguments)))
    own = services.get_node
    with module.quick_start():
        services.get_node("127.0.0.1:1", "0b")
    assert asked == [(0, "127.0.0.1:1", "0b")]
    assert services.get_node is own
