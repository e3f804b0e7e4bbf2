"""Runs of the embodied recipe on the session's Ray, small enough for every commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig, facts
from recipes.embodied.program import launch
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.job.load import load_job
from rlinf_core.runners.embodied_runner import EmbodiedRunner
from rlinf_core.runners.events import Event
from rlinf_core.runners.metrics import Metrics, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import with_recovery
from rlinf_core.runners.run_folder import RunFolder

# Reach, so small that a step takes milliseconds.
SMALL = (
    "env.train.task=reach",
    "env.train.total_num_envs=8",
    "env.train.max_episode_steps=10",
    "env.train.max_steps_per_rollout_epoch=10",
    "actor.global_batch_size=40",
    "actor.model.hidden_dim=16",
    "algorithm.update_epoch=2",
    "runner.val_check_interval=-1",
    "runner.max_steps=3",
)


@dataclass
class Run:
    """A run that was made, and what it left."""

    folder: RunFolder
    config: EmbodiedConfig
    events: list[Event] = field(default_factory=list[Event])

    @property
    def metrics(self) -> list[Metrics]:
        """Those of the training steps; an evaluation before the first one has the step 0."""
        return [each for each in read_metrics(self.folder.metrics_file) if each.step]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def weights(self) -> dict[str, Tensor]:
        """Return those of the newest checkpoint, whole."""
        newest = self.folder.checkpoints.latest()
        assert newest is not None
        return read_weights(newest.path)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    reader = dcp.FileSystemReader(checkpoint / "actor")
    names = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in names.items()
        if name.startswith("model.") and isinstance(meta, dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(cast("dict[str, Any]", state), storage_reader=reader, no_dist=True)
    return state


Train = Callable[..., Run]


@pytest.fixture
def train(cluster: Cluster, tmp_path: Path) -> Iterator[Train]:
    """Trains to the end: the small run with overrides, or with `shipped` the configuration of that name.

    `during(event, runner)` is told everything as it happens.
    """
    running: list[EmbodiedRunner] = []

    def train(
        *overrides: str,
        shipped: str | None = None,
        during: Callable[[Event, EmbodiedRunner | None], None] | None = None,
    ) -> Run:
        sizes = SMALL if shipped is None else ()
        log_path = f"runner.logger.log_path={tmp_path / 'runs'}"
        job = load_job(shipped or "laptop", (*sizes, log_path, *overrides), environ={})
        job.raise_if_bad()
        config = cast("EmbodiedConfig", job.config)
        made = Run(RunFolder.create(config.runner, "embodied"), config)

        def listen(event: Event) -> None:
            made.events.append(event)
            if during is not None:
                during(event, running[-1] if running else None)

        def attempt() -> None:
            runner = launch(config, cluster, record)
            running.append(runner)
            try:
                runner.run()
            finally:
                running.pop().shutdown()

        with RunRecord.open(job, made.folder, listen, config.runner, facts(config)) as record:
            with_recovery(attempt, record, config.runner.max_restarts)
            record.finished()
        made.folder.end("finished")
        return made

    yield train
    for runner in running:
        runner.shutdown()
