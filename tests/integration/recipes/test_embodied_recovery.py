"""A worker that dies sends the run back to its last checkpoint, and nothing is lost but time."""

from __future__ import annotations

import pytest
import torch

from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners.events import RunRestarted, RunStarted, StepFinished
from rlinf_core.runners.storage.evidence import read_bundles
from tests.integration.recipes.conftest import SPANNING, Killer, Run, Train, read_weights
from tests.kernel import KEEPS_ENDS

# Two or three launches, on a machine that may be slow.
pytestmark = pytest.mark.timeout(600)


def same(one: Run, other: Run) -> None:
    mine, theirs = one.weights(), other.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_killed_worker_costs_a_restart_and_changes_nothing(train: Train, spanning: Run) -> None:
    """Episodes span passes, so that those of the environments that die with it have to be continued."""
    run = train(*SPANNING, "runner.save_interval=1", during=Killer("rollout", 3, "generate_rollouts"))
    (restart,) = run.of(RunRestarted)
    assert (restart.step, restart.restart, restart.max_restarts) == (2, 1, 3)
    assert "RolloutGroup:0" in restart.reason
    assert "died" in restart.reason
    (bundle,), faults = read_bundles(run.folder.path)
    first = bundle.content.failures[0]
    # The group stands for the component, which only `rlinf train` names.
    assert (first.name, first.component, first.died, faults) == ("RolloutGroup:0", "RolloutGroup", True, [])
    # Nothing is said of memory, and of the signal nothing where the kernel does not keep it.
    assert (first.signal, first.out_of_memory) == ("SIGKILL" if KEEPS_ENDS else None, None)
    assert restart.details[-1] == f"evidence: evidence/{bundle.path.name}"
    names = {str(path.relative_to(bundle.path)) for path in bundle.path.rglob("*") if path.is_file()}
    assert {"waits.json", "stacks.txt", "memory.json", "versions.json", "config.yaml", "in_flight.json"} <= names
    assert any(name.startswith("ray/") for name in names)
    assert len(run.of(RunStarted)) == 1
    assert [each.step for each in run.of(StepFinished)] == [1, 2, 3]
    assert [each.step for each in run.metrics] == [1, 2, 3]
    (there,) = [each.path for each in spanning.folder.checkpoints.complete() if each.step == 3]
    weights, mine = read_weights(there), run.weights()
    assert weights
    assert all(torch.equal(mine[name], weights[name]) for name in weights)


@pytest.mark.nightly
@pytest.mark.parametrize(("component", "phase"), [("actor", "actor_training"), ("env", "generate_rollouts")])
def test_without_a_checkpoint_it_begins_again(train: Train, component: str, phase: str) -> None:
    whole = train()
    run = train("runner.save_interval=-1", "runner.save_interval=3", during=Killer(component, 2, phase))
    (restart,) = run.of(RunRestarted)
    assert restart.step == 0
    assert [each.step for each in run.metrics] == [1, 2, 3]
    same(whole, run)


@pytest.mark.nightly
def test_there_is_an_end_of_restarts(train: Train) -> None:
    with pytest.raises(WorkerGroupError, match="died"):
        train("runner.max_restarts=1", during=Killer("env", 1, "generate_rollouts", times=2))
