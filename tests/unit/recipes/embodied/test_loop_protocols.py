"""The workers have every method that the loop calls on their groups, with its parameters."""

from __future__ import annotations

import inspect

import pytest

from recipes.embodied.actor_worker import EmbodiedFSDPActor
from recipes.embodied.env_worker import EnvWorker
from recipes.embodied.rollout_worker import MultiStepRolloutWorker
from rlinf_core.runners.embodied_runner import ActorGroup, EnvGroup, RolloutGroup


@pytest.mark.parametrize(
    ("worker", "group"),
    [(EmbodiedFSDPActor, ActorGroup), (MultiStepRolloutWorker, RolloutGroup), (EnvWorker, EnvGroup)],
)
def test_a_worker_satisfies_the_protocol_of_its_group(worker: type, group: type) -> None:
    called = {name: value for name, value in vars(group).items() if inspect.isfunction(value) and name[0] != "_"}
    assert called
    for name, wanted in called.items():
        offered = inspect.signature(getattr(worker, name)).parameters.values()
        expected = list(inspect.signature(wanted).parameters.values())
        assert [each.name for each in offered] == [each.name for each in expected], name
        assert [each.default for each in offered] == [each.default for each in expected], name
