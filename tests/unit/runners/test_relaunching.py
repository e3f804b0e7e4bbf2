"""Whose deaths are healed alone, how often, and what is told of it, with groups that only count."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rlinf_core.config.sections.runner import LoggerConfig, RestartLimit, RunnerConfig
from rlinf_core.errors import ProcessEnd, RuntimeFailure, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners.events import Event, WorkersRelaunched
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Restarts, all_deaths
from rlinf_core.runners.run_program import Dead, Relaunching
from rlinf_core.runners.storage.run_folder import RunFolder


class Group:
    def __init__(self, name: str) -> None:
        self.worker_group_name = name
        self.relaunched: list[tuple[int, ...]] = []
        self.broken = False

    def relaunch(self, *ranks: int) -> None:
        if self.broken:
            raise RuntimeFailure("no room")
        self.relaunched.append(ranks)


class Healing(Relaunching):
    def __init__(self, groups: dict[str, Group], record: RunRecord) -> None:
        super().__init__(cast("Any", groups), record)
        self.prepared: list[Dead] = []

    def may_relaunch(self, dead: Dead) -> bool:
        return "actor" not in dead

    def prepare(self, dead: Dead) -> str:
        self.prepared.append(dead)
        return "the rollout"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def healing(tmp_path: Path, events: list[Event]) -> Healing:
    folder = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path))), "embodied")
    record = RunRecord(folder, MetricsWriter(folder.metrics_file), events.append)
    record.restarts = Restarts(RestartLimit(max=2))
    return Healing({"env": Group("EnvGroup"), "rollout": Group("RolloutGroup"), "actor": Group("ActorGroup")}, record)


def groups_of(healing: Healing) -> dict[str, Group]:
    return cast("dict[str, Group]", healing._groups)


def died(*addresses: str) -> WorkerGroupError:
    """The failure of a call, of which the first worker died, and the others wait for one each."""
    first, *others = addresses
    group, _, rank = first.partition(":")
    failures: dict[int, Exception] = {int(rank): WorkerDiedError(first, node="node 0")}
    failures |= {10 + number: WorkerDiedError(other) for number, other in enumerate(others)}
    return WorkerGroupError(group, "interact", failures, 12)


def failing(*errors: Exception) -> Any:
    left = list(errors)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_the_dead_are_started_again_and_work_is_repeated(healing: Healing, events: list[Event]) -> None:
    assert healing.repeat(failing(died("EnvGroup:1", "RolloutGroup:0"))) == "done"
    assert groups_of(healing)["env"].relaunched == [(1,)]
    assert groups_of(healing)["rollout"].relaunched == [(0,)]
    assert healing.prepared == [{"env": (1,), "rollout": (0,)}]
    (event,) = events
    assert isinstance(event, WorkersRelaunched)
    assert (event.step, event.restart, event.max_restarts) == (0, 1, 2)
    assert (event.reason, event.repeated) == ("`EnvGroup:1` on node 0 died", "the rollout")
    assert event.details[-1].startswith("evidence: ")


def test_a_death_tells_its_signal(healing: Healing, events: list[Event]) -> None:
    error = WorkerDiedError("EnvGroup:0", end=ProcessEnd("SIGKILL", None, None))
    assert healing.repeat(failing(WorkerGroupError("EnvGroup", "interact", {0: error}, 1))) == "done"
    assert [event.reason for event in events if isinstance(event, WorkersRelaunched)] == ["`EnvGroup:0` died (SIGKILL)"]


def test_the_limit_of_restarts_counts_relaunches(healing: Healing) -> None:
    third = died("EnvGroup:2")
    with pytest.raises(WorkerGroupError) as caught:
        healing.repeat(failing(died("EnvGroup:0"), died("EnvGroup:1"), third))
    assert caught.value is third
    assert groups_of(healing)["env"].relaunched == [(0,), (1,)]


@pytest.mark.parametrize(
    "error",
    [
        died("ActorGroup:0"),
        died("EnvGroup:0", "trajectories:0"),
        WorkerGroupError("EnvGroup", "interact", {0: ValueError("no joint")}, 1),
        WorkerDiedError("manager"),
        WorkerDiedError("EnvGroup:0", cause="its node left the cluster"),
    ],
    ids=["not allowed", "a channel too", "an exception", "the manager", "a node"],
)
def test_other_failures_are_raised(healing: Healing, events: list[Event], error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        healing.repeat(failing(error))
    assert caught.value is error
    assert events == []
    assert not any(group.relaunched for group in groups_of(healing).values())


def test_a_relaunch_that_fails_raises_the_death(healing: Healing, events: list[Event]) -> None:
    groups_of(healing)["env"].broken = True
    error = died("EnvGroup:0")
    with pytest.raises(WorkerGroupError) as caught:
        healing.repeat(failing(error))
    assert caught.value is error
    assert events == []


def test_deaths_of_a_cause_are_found_too() -> None:
    error = died("RolloutGroup:3")
    error.__cause__ = died("EnvGroup:1")
    assert all_deaths(error).keys() == {"RolloutGroup:3", "EnvGroup:1"}


def test_nobody_is_started_again_alone_without_a_watcher(healing: Healing, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = WorkerDiedError("raylet", node="this machine", cause="it ended with exit code 0")
    monkeypatch.setattr("rlinf_core.runners.run_program.fallen_watcher", lambda: lost)

    with pytest.raises(WorkerGroupError):
        healing.repeat(failing(died("EnvGroup:1")))

    assert groups_of(healing)["env"].relaunched == []
