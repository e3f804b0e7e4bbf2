"""A group offers the calls of its workers; pyright checks the workers where a runner is made of their groups."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from recipes.embodied.loop import protocols as protocols
from rlinf_core.worker.handle import WorkerGroupHandle


@pytest.mark.parametrize(
    ("worker", "group"),
    [
        (protocols.EmbodiedActor, protocols.ActorGroup),
        (protocols.EmbodiedRollout, protocols.RolloutGroup),
        (protocols.EmbodiedEnv, protocols.EnvGroup),
    ],
)
def test_group_has_its_workers_methods_and_returns_handles(worker: type, group: type) -> None:
    offered, called = methods(worker), methods(group)
    assert offered
    assert list(offered) == list(called)
    for name, wanted in offered.items():
        assert inspect.signature(wanted).parameters == inspect.signature(called[name]).parameters, name
        handle = get_type_hints(called[name])["return"]
        assert get_origin(handle) is WorkerGroupHandle, name
        assert get_args(handle) == (get_type_hints(wanted)["return"],), name


def methods(protocol: type) -> dict[str, Any]:
    return {name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
