"""A worker that dies is started again alone, or sends the run back to its checkpoint; nothing is lost but time."""

from __future__ import annotations

import threading

import pytest
import torch

from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners.events import (
    CheckpointSaved,
    Event,
    PhaseStarted,
    RunRestarted,
    RunStarted,
    StepFinished,
    WorkersRelaunched,
)
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.storage.evidence import read_bundles
from tests.integration.recipes.conftest import SPANNING, Killer, Run, Train, read_weights
from tests.kernel import KEEPS_ENDS

# Two or three launches, on a machine that may be slow.
pytestmark = pytest.mark.timeout(600)


def same(one: Run, other: Run) -> None:
    mine, theirs = one.weights(), other.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def check_is_alike(run: Run, undisturbed: Run) -> None:
    """The weights after step 3 are those of the run that nothing happened to, and each step was finished once."""
    assert [item.step for item in run.of(StepFinished)] == [1, 2, 3]
    check_ends_alike(run, undisturbed)


def check_ends_alike(run: Run, undisturbed: Run) -> None:
    """The weights after step 3 are those of the run that nothing happened to, whatever was done again."""
    assert [record.step for record in run.metrics] == [1, 2, 3]
    (there,) = [item.path for item in undisturbed.folder.checkpoints.complete() if item.step == 3]
    weights, mine = read_weights(there), run.weights()
    assert weights
    assert all(torch.equal(mine[name], weights[name]) for name in weights)


@pytest.mark.parametrize("component", ["env", pytest.param("rollout", marks=pytest.mark.nightly)])
def test_a_killed_worker_alone_is_started_again(train: Train, spanning: Run, component: str) -> None:
    """Episodes span passes, so that those of the environments that die with it have to be continued."""
    run = train(*SPANNING, "runner.save_interval=3", during=Killer(component, 3, "generate_rollouts"))
    assert not run.of(RunRestarted)
    (again,) = run.of(WorkersRelaunched)
    assert (again.step, again.restart, again.max_restarts) == (2, 1, 3)
    assert again.repeated == "the rollout of step 3"
    assert "Group:0` on node 0 (127.0.0.1) died" in again.reason
    (bundle,), faults = read_bundles(run.folder.path)
    assert (bundle.content.failures[0].died, faults) == (True, [])
    assert again.details[-1] == f"evidence: evidence/{bundle.path.name}"
    recent = (bundle.path / "recent.txt").read_text()
    assert "== driver\n" in recent
    assert "method `" in recent
    check_is_alike(run, spanning)


@pytest.mark.nightly
def test_a_killed_actor_costs_a_restart_and_changes_nothing(train: Train, spanning: Run) -> None:
    run = train(*SPANNING, "runner.save_interval=1", during=Killer("actor", 3, "generate_rollouts"))
    (restart,) = run.of(RunRestarted)
    assert (restart.step, restart.restart, restart.max_restarts) == (2, 1, 3)
    assert "ActorGroup:0" in restart.reason
    assert "died" in restart.reason
    (bundle,), faults = read_bundles(run.folder.path)
    first = bundle.content.failures[0]
    # The group stands for the component, which only `rlinf train` names.
    assert (first.name, first.component, first.died, faults) == ("ActorGroup:0", "ActorGroup", True, [])
    # Nothing is said of memory, and of the signal nothing where the kernel does not keep it.
    assert (first.signal, first.out_of_memory) == ("SIGKILL" if KEEPS_ENDS else None, None)
    assert restart.details[-1] == f"evidence: evidence/{bundle.path.name}"
    names = {str(path.relative_to(bundle.path)) for path in bundle.path.rglob("*") if path.is_file()}
    assert {"waits.json", "stacks.txt", "memory.json", "versions.json", "config.yaml", "in_flight.json"} <= names
    assert any(name.startswith("ray/") for name in names)
    assert len(run.of(RunStarted)) == 1
    check_is_alike(run, spanning)


@pytest.mark.nightly
def test_killed_actor_goes_back_to_the_snapshot(train: Train, spanning: Run) -> None:
    snapshots = ("runner.save_interval=3", "runner.snapshot_interval=0.01s")
    run = train(*SPANNING, *snapshots, during=Killer("actor", 3, "generate_rollouts"))
    (restart,) = run.of(RunRestarted)
    assert restart.step in [saved.step for saved in run.of(CheckpointSaved) if saved.snapshot]
    assert [saved.step for saved in run.of(CheckpointSaved) if not saved.snapshot] == [3]
    assert [checkpoint.step for checkpoint in run.folder.checkpoints.complete()] == [3]
    check_ends_alike(run, spanning)


@pytest.mark.nightly
def test_without_a_checkpoint_it_begins_again(train: Train) -> None:
    whole = train()
    run = train("runner.save_interval=-1", "runner.save_interval=3", during=Killer("actor", 2, "actor_training"))
    (restart,) = run.of(RunRestarted)
    assert restart.step == 0
    assert [record.step for record in run.metrics] == [1, 2, 3]
    same(whole, run)


class MidStep(Killer):
    """Kills a worker so many seconds after a rollout of every step has begun."""

    def __init__(self, component: str, seconds: float) -> None:
        super().__init__(component, 0, "generate_rollouts", times=3)
        self.seconds = seconds

    def __call__(self, event: Event, runner: Runner | None) -> None:
        if isinstance(event, PhaseStarted) and event.step > self.step and event.phase == self.phase:
            self.step = event.step
            threading.Timer(self.seconds, super().__call__, (event, runner)).start()


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("component", ["env", "rollout"])
def test_whenever_a_worker_dies_nothing_changes(train: Train, spanning: Run, component: str, seconds: float) -> None:
    """Two of each, so that some are in the midst of what they do when a peer dies."""
    two = "{node_group: node, placement: '0:0-1'}"
    ranks = [f"cluster.component_placement.{name}={two}" for name in ("env", "rollout")]
    overrides = (*SPANNING, "~cluster.component_placement", "cluster.component_placement.actor={placement: 0}", *ranks)
    whole = train(*overrides, "runner.save_interval=3")
    run = train(*overrides, "runner.save_interval=3", during=MidStep(component, seconds))
    assert not run.of(RunRestarted)
    assert run.of(WorkersRelaunched)
    assert [record.step for record in run.metrics] == [1, 2, 3]
    same(whole, run)


@pytest.mark.nightly
def test_there_is_an_end_of_restarts(train: Train) -> None:
    with pytest.raises(WorkerGroupError, match="died"):
        train("runner.max_restarts=1", during=Killer("actor", 1, "generate_rollouts", times=2))
