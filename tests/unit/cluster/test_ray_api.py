"""Ray is used in a cluster that was made, and makes none by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

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
