"""Runs of the recipes on the session's Ray, small enough for every commit."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from recipes.embodied.config.algorithm_config import ALGORITHMS
from recipes.language.answers.prompt_messages import GroupReport
from recipes.language.loop.prompt_plan import PromptPlan
from recipes.training.weights.shard_files import ShardReader
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.job.load import load_job
from rlinf_core.runners.events import Event, PhaseStarted, RunRestarted, WorkersRelaunched
from rlinf_core.runners.metrics import Metrics, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import with_recovery
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.rlinf_command import REACH

SMALL = (*REACH, "algorithm.update_epoch=2", "runner.val_check_interval=-1", "runner.max_steps=3")
# A language model of a few thousand weights on sums of one digit.
SMALL_MATH = (
    "actor.model.hidden_dim=32",
    "actor.model.num_layers=1",
    "actor.warm_start.steps=5",
    "data.rollout_batch_size=6",
    "data.val_size=20",
    "algorithm.group_size=4",
    "runner.val_check_interval=-1",
    "runner.max_steps=4",
    "runner.save_format=dcp",
)


@dataclass
class Run:
    """A run that was made, and what it left."""

    folder: RunFolder
    config: Any
    events: list[Event] = field(default_factory=list[Event])

    @property
    def metrics(self) -> list[Metrics]:
        """Those of the training steps; an evaluation before the first one has the step 0."""
        return [record for record in read_metrics(self.folder.metrics_file) if record.step]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def weights(self) -> dict[str, Tensor]:
        """Return those of the newest checkpoint, whole."""
        newest = self.folder.checkpoints.latest()
        assert newest is not None
        return read_weights(newest.path)

    def ends_like(self, other: Run | Path) -> bool:
        """Return whether the weights are those of another run, or of a checkpoint, bit by bit."""
        mine, theirs = self.weights(), other.weights() if isinstance(other, Run) else read_weights(other)
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def recoveries(self) -> list[type[Event]]:
        """Return the ways in which it went on after deaths."""
        return [type(event) for event in self.events if isinstance(event, (RunRestarted, WorkersRelaunched))]


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    reader = ShardReader(checkpoint / "actor")
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.tensors.items()
        if name.startswith("model.")
    }
    dcp.load(cast("dict[str, Any]", state), storage_reader=reader, no_dist=True)
    return state


class Killer:
    """Kills a worker of a component when a phase of a step begins."""

    def __init__(self, component: str, step: int, phase: str, times: int = 1) -> None:
        self.component, self.step, self.phase = component, step, phase
        self.left = times

    def __call__(self, event: Event, runner: Runner | None) -> None:
        here = isinstance(event, PhaseStarted) and (event.step, event.phase) == (self.step, self.phase)
        if here and self.left and runner is not None:
            self.left -= 1
            group: Any = runner.groups[self.component]
            os.kill(group._members[0].pid, signal.SIGKILL)


@dataclass
class Train:
    """Trains to the end: the small run with overrides, or with `shipped` the configuration of that name.

    `during(event, runner)` is told everything as it happens.
    """

    cluster: Cluster
    folder: Path
    # Module of the recipe's program, the configuration that the small run changes, and how.
    program: str
    small: tuple[str, ...]
    changed: str
    running: list[Runner] = field(default_factory=list[Runner])

    def __call__(
        self,
        *overrides: str,
        shipped: str | None = None,
        during: Callable[[Event, Runner | None], None] | None = None,
    ) -> Run:
        program: Any = importlib.import_module(self.program)
        sizes = self.small if shipped is None else ()
        if any(override == f"algorithm.loss_type={name}" for override in overrides for name in ALGORITHMS):
            sizes = tuple(size for size in sizes if not size.startswith("algorithm.update_epoch"))
        log_path = f"runner.logger.log_path={self.folder / 'runs'}"
        job = load_job(shipped or self.changed, (*sizes, log_path, *overrides), environ={})
        job.raise_if_bad()
        config: Any = job.config
        made = Run(RunFolder.create(config.runner, config.recipe), config)

        def listen(event: Event) -> None:
            made.events.append(event)
            if during is not None:
                during(event, self.running[-1] if self.running else None)

        def attempt() -> None:
            runner: Runner = program.launch(config, self.cluster, record)
            runner.init_workers()
            self.running.append(runner)
            try:
                runner.run()
            finally:
                self.running.pop().shutdown()

        with RunRecord.open(job, made.folder, listen) as record:
            with_recovery(attempt, record, config.runner.max_restarts)
            record.finished()
        made.folder.end("finished")
        return made

    def close(self) -> None:
        for runner in self.running:
            runner.shutdown()


@pytest.fixture
def train(cluster: Cluster, tmp_path: Path) -> Iterator[Train]:
    """Runs of the embodied recipe."""
    with closing(Train(cluster, tmp_path, "recipes.embodied.program", SMALL, "embodied/pick-laptop")) as made:
        yield made


# Episodes last up to two and a half passes, so that every step ends in the middle of some; two stages take turns.
SPANNING = ("env.train.max_episode_steps=25", "rollout.pipeline_stage_num=2")


@pytest.fixture(scope="session")
def spanning(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of five steps with episodes that span passes, checkpoints of the steps 3 and 5, and evaluations."""
    folder = tmp_path_factory.mktemp("spanning")
    with closing(Train(cluster, folder, "recipes.embodied.program", SMALL, "embodied/pick-laptop")) as made:
        yield made(*SPANNING, "runner.max_steps=5", "runner.save_interval=3", "runner.val_check_interval=2")


@pytest.fixture(scope="module")
def train_math(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Runs of the math recipe."""
    folder = tmp_path_factory.mktemp("math")
    with closing(Train(cluster, folder, "recipes.math.program", SMALL_MATH, "math/sums-laptop")) as made:
        yield made


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The problems that a language model's steps learned from; of a step that was repeated those of the last time."""
    result: dict[int, list[int]] = {}
    take = PromptPlan.take

    def noted(plan: PromptPlan, step: int) -> list[GroupReport]:
        groups = take(plan, step)
        result[step] = [group.problem for group in groups]
        return groups

    monkeypatch.setattr(PromptPlan, "take", noted)
    return result
