"""A process that all workers depend on is named, whichever of the deaths is seen first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlinf_core.cluster import engine
from rlinf_core.errors import WorkerDiedError
from rlinf_core.worker.group import watchers
from rlinf_core.worker.group.watchers import check_watchers, fallen_watcher

MANAGER = WorkerDiedError("manager", node="this machine", cause="it closed the connection")
RAYLET = WorkerDiedError("raylet", node="this machine", cause="it ended with exit code 0")


def see(monkeypatch: pytest.MonkeyPatch, manager: WorkerDiedError | None, *ray: WorkerDiedError | None) -> None:
    """Have a manager found dead, and processes of Ray at one look after another."""
    looks = iter(ray)
    last = ray[-1] if ray else None
    monkeypatch.setattr(watchers, "current_client", lambda: SimpleNamespace(lost_manager=lambda: manager))
    monkeypatch.setattr(engine, "fallen", lambda: next(looks, last))


def test_nothing_is_named_while_all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, None, None)
    assert fallen_watcher() is None
    check_watchers()


def test_manager_is_named_where_ray_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_ENGINE_SECONDS", 0.0)
    see(monkeypatch, MANAGER, None)
    assert fallen_watcher() is MANAGER


def test_raylet_that_ends_after_the_manager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_ENGINE_SECONDS", 60.0)
    see(monkeypatch, MANAGER, None, None, RAYLET)
    with pytest.raises(WorkerDiedError) as raised:
        check_watchers()
    assert raised.value is RAYLET
