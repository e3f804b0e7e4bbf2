"""A recipe that starts nothing and tells of a run all the same: what `rlinf train` shows is tested with it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

from pydantic import Field

from rlinf_core.config.model import ConfigModel
from rlinf_core.config.sections.cluster import JobConfig
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import ClusterError, WorkerDiedError
from rlinf_core.failures import PackedError, WorkerGroupError
from rlinf_core.job.recipe import Recipe
from rlinf_core.runners import events
from rlinf_core.runners.metrics import MetricsWriter


class Fake(ConfigModel):
    """What the program does."""

    seconds: float = Field(default=0.0, description="Of each step.")
    launch: float = Field(default=0.0, description="Seconds until the workers are there.")
    fail: str = Field(default="", description="How it fails in step 3.")
    api_key: str = Field(default="", description="What it tells where it fails by `leak`.")
    address: str = Field(default="", description="The same.")
    metrics: bool = Field(default=False, description="Whether `metrics.jsonl` is written.")
    end: float = Field(default=0.0, description="Seconds that it takes to end when it is interrupted.")


class FakeConfig(JobConfig):
    """The whole file."""

    runner: RunnerConfig = Field(default_factory=RunnerConfig, description="The run.")
    fake: Fake = Field(default_factory=Fake, description="The program.")


class Panic(BaseException):
    """As libraries in Rust raise it, with a message that cannot be made."""

    def __str__(self) -> str:
        raise ValueError


recipe = Recipe("fake", "tells of steps", "fakerecipe:FakeConfig", "fake.yaml", "fakerecipe:program")
unprogrammed = Recipe("unprogrammed", "has no program", "fakerecipe:FakeConfig", "fake.yaml")


def program(job: Any, folder: Any, listener: Any) -> None:
    fake, runner = job.config.fake, job.config.runner
    listener(events.PhaseStarted(0, events.LAUNCH))
    listener(events.Waiting("rollout: 2 processes", 30.0))
    try:
        time.sleep(fake.launch)
        print("a worker prints")
        logging.getLogger("rlinf").warning("something is odd")
        components = {"actor": 1, "rollout": 2}
        listener(events.RunStarted(folder.path, 1, runner.max_steps, components, folder.resumed_from))
        for step in range(1, runner.max_steps + 1):
            _step(step, fake, runner, folder, listener)
    except BaseException:
        time.sleep(fake.end)
        raise
    metrics = {"env/success_at_end": 0.9, "env/return": 12.5}
    listener(events.RunFinished(runner.max_steps, metrics, 0.5))


def _step(step: int, fake: Fake, runner: RunnerConfig, folder: Any, listener: Any) -> None:
    listener(events.PhaseStarted(step, events.GENERATE_ROLLOUTS))
    time.sleep(fake.seconds)
    if step == 3 and fake.fail:
        _fail(fake, folder)
    share = step / runner.max_steps
    metrics = {
        "env/success_at_end": share,
        "env/return": 12.5 * share,
        "env/episode_len": 40.0,
        "train/actor/policy_loss": -0.0123,
        "train/critic/value_loss": 0.5,
        "train/actor/approx_kl": 0.0081,
        "time/step": 0.1,
        "time/generate_rollouts": 0.03,
        "time/actor_training": 0.06,
        "time/sync_weights": 0.01,
    }
    if fake.metrics:
        with MetricsWriter(folder.metrics_file) as writer:
            writer.log(step, metrics)
    listener(events.StepFinished(step, metrics))
    if runner.val_check_interval > 0 and step % runner.val_check_interval == 0:
        listener(events.Evaluated(step, {"eval/success_at_end": 0.75, "eval/return": 9.0}))
    if runner.save_interval > 0 and step % runner.save_interval == 0:
        listener(events.CheckpointSaved(step, folder.path / "checkpoints" / f"global_step_{step}"))


def _fail(fake: Fake, folder: Any) -> None:
    how = fake.fail
    if how == "leak":
        said = f"{fake.api_key} {fake.address} {os.environ['HF_TOKEN']} {[os.environ['HF_TOKEN']]}"
        print(f"printed {said}")
        logging.getLogger("rlinf").warning("logged %s", said)
        raise ClusterError(f"raised {said}", why=f"why {said}", help=f"help {said}", where=f"where {said}")
    if how == "cluster":
        raise ClusterError("2 of 3 nodes joined within 30 s", where="10.0.0.1:6379", help="start the missing one")
    if how == "bug":
        raise KeyError("surprise")
    if how == "panic":
        raise Panic
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "hang":
        threading.Event().wait(600)
    if how == "restart":
        return
    log = folder.log_file("rollout", 1)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"2026-01-01 10:00:0{i},000 INFO [rollout:1] line {i}\n" for i in range(5)))
    failures = {
        0: WorkerDiedError("rollout:1", node="node 0 (127.0.0.1)", where="rollout:0"),
        1: _raised("rollout:1"),
    }
    error = WorkerGroupError("rollout", "generate", failures, 2)
    error.places = {1: "node 0 (127.0.0.1), pid 4711"}
    raise error


def _raised(where: str) -> Exception:
    """Return an exception as it arrives from a worker."""
    try:
        raise ValueError("bad action: nan")
    except ValueError as error:
        return PackedError.of(error, where).unpack()


if __name__ == "__main__":
    sys.exit("this is a package of tests")
