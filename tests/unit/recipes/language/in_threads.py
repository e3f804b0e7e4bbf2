"""The workers of a language model's job in threads of this process, so that its whole loop runs without a cluster."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.language.loop.reasoning_runner import ReasoningRunner
from recipes.language.loop.worker_groups import optional_components
from recipes.language.workers.actor_worker import LanguageActor
from recipes.language.workers.evaluation_workers import LanguageCritic, LanguageReference, LanguageTeacher
from recipes.language.workers.reward_worker import JudgeWorker, RewardWorker
from recipes.language.workers.rollout_worker import LanguageRolloutWorker
from rlinf_core.channel.channel import Channel
from rlinf_core.collective.torch_payload import CustomCopy
from rlinf_core.errors import RuntimeFailure, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.runners.events import Event, PhaseStarted, StepFinished
from rlinf_core.runners.metrics import Metrics, MetricsWriter, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import with_recovery
from rlinf_core.runners.storage.run_folder import RunFolder

SMALL = (
    "actor.model.hidden_dim=16",
    "actor.model.num_layers=1",
    "actor.warm_start.steps=3",
    "data.rollout_batch_size=5",
    "data.val_size=6",
    "algorithm.group_size=3",
    "rollout.sampling_params.max_new_tokens=4",
    "runner.val_check_interval=-1",
    "runner.save_format=dcp",
    "runner.max_steps=4",
)


class Handle:
    """The results of a call, one of each thread; where a worker of the group dies meanwhile, its death."""

    def __init__(self, group: Group, method: str, futures: list[Future[Any]]) -> None:
        self._group = group
        self._method = method
        self._futures = futures

    @property
    def failed(self) -> bool:
        return bool(self._failures())

    def _failures(self) -> dict[int, Exception]:
        diagnostics = {rank: future.exception() for rank, future in enumerate(self._futures) if future.done()}
        failures = {rank: error for rank, error in diagnostics.items() if isinstance(error, Exception)}
        if self._group.is_dead and not all(future.done() for future in self._futures):
            failures[0] = WorkerDiedError(f"{self._group.worker_group_name}:0")
        return failures

    def done(self) -> bool:
        return self.failed or all(future.done() for future in self._futures)

    def abandon(self) -> None:
        """Leave the threads alone: they end with their group."""

    def wait(self, timeout: float | None = None) -> list[Any]:
        while not self.done():
            threading.Event().wait(0.001)
        failures = self._failures()
        if failures:
            raise WorkerGroupError(self._group.worker_group_name, self._method, failures, len(self._futures))
        return [future.result() for future in self._futures]


class Post:
    """What is sent to a worker: done when it is there."""

    def __init__(self, inbox: queue.SimpleQueue[Any] | None) -> None:
        self._inbox = inbox

    def done(self) -> bool:
        return self._inbox is None or not self._inbox.empty()

    def wait(self) -> Any:
        return None if self._inbox is None else self._inbox.get(timeout=60)


@dataclass
class Hub:
    """The channels and the messages between all workers."""

    channels: dict[str, Channel] = field(default_factory=dict[str, Channel])
    inboxes: dict[tuple[Any, ...], queue.SimpleQueue[Any]] = field(default_factory=dict)
    making: threading.Lock = field(default_factory=threading.Lock)

    def inbox(self, *parties: str | int) -> queue.SimpleQueue[Any]:
        return self.inboxes.setdefault(parties, queue.SimpleQueue())

    def channel(self, name: str) -> Channel:
        return self.channels.setdefault(name, Channel.create(name, local=True))


def as_received(content: Any) -> Any:
    """Return a copy of what is sent, as it arrives: a tensor for one that its sender copies."""
    if not isinstance(content, CustomCopy):
        return copy.deepcopy(content)
    target = torch.full_like(content.tensor, -1)
    content.copy(target)
    return target


def in_thread(kind: type[Any], group: str, hub: Hub, rank: int, world_size: int) -> type[Any]:
    """Return a worker class whose workers talk to each other through `hub`."""

    class Local(kind):
        _rank = rank
        _world_size = world_size
        torch_device = torch.device("cpu")
        worker_info = SimpleNamespace(address=f"{group}:{rank}")

        def init_worker(self, *arguments: Any) -> Any:
            # Models are made of random numbers of the process, which threads have in common.
            with hub.making:
                return super().init_worker(*arguments)

        def connect_channel(self, name: str) -> Channel:
            return hub.channel(name)

        def broadcast(self, content: Any, groups: Any, source: tuple[str, int], async_op: bool = False) -> Any:
            if source != (group, rank):
                return Post(hub.inbox(group, rank))
            ((peers, ranks),) = groups
            for item in ranks:
                hub.inbox(peers, item).put(as_received(content))
            return Post(None)

        def send(self, content: Any, peers: str, peer: int) -> None:
            hub.inbox(group, rank, peers, peer).put(copy.deepcopy(content))

        def recv(self, peers: str, peer: int) -> Any:
            return hub.inbox(peers, peer, group, rank).get(timeout=60)

    return Local


class Group:
    """A worker group whose workers each have a thread."""

    def __init__(self, kind: type[Any], section: Any, config: Any, hub: Hub, world_size: int) -> None:
        self.worker_group_name = section.group_name
        self.world_size = world_size
        self.workers = [
            in_thread(kind, section.group_name, hub, rank, world_size)(config) for rank in range(world_size)
        ]
        self._threads = [ThreadPoolExecutor(1) for _ in self.workers]
        self.is_dead = False

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        def call(*args: Any) -> Handle:
            item = zip(self._threads, self.workers, strict=True)
            futures: list[Future[Any]] = [Future() for _ in self.workers]
            if not self.is_dead:
                futures = [thread.submit(getattr(worker, method), *args) for thread, worker in item]
            return Handle(self, method, futures)

        return call

    def memory_peaks(self) -> Handle:
        return Handle(self, "memory_peaks", [])

    call_records = memory_peaks

    def relaunch(self, *ranks: int) -> None:
        raise RuntimeFailure("a thread is not started again")

    def die(self) -> None:
        """Have every call fail that is not answered, and every further one."""
        self.is_dead = True

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


@dataclass
class LocalRun:
    """A run that was made, and what it left."""

    runner: ReasoningRunner
    folder: RunFolder
    events: list[Event]

    @property
    def metrics(self) -> list[Metrics]:
        return [record for record in read_metrics(self.folder.metrics_file) if record.step]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, StepFinished)]

    def weights(self) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for component in ("actor", "critic"):
            group: Any = self.runner.groups.get(component)
            for worker in group.workers if group is not None else ():
                state: dict[str, torch.Tensor] = worker._state.policy.state_dict()
                result |= {f"{component}.{name}": value.clone() for name, value in state.items()}
        return result


LocalTrain = Callable[..., LocalRun]


@contextmanager
def local_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTrain]:
    """Trains the small model to the end: `train(*overrides, rollouts=1, rewards=1, death=None, config=NAME)`.

    A death is a component, a step and a phase: a worker of that component dies when the phase begins, once.
    """
    hubs: list[Hub] = []
    create = Channel.create

    def created(name: str, *args: Any, **kwargs: Any) -> Channel:
        if kwargs.get("local"):
            return create(name, *args, **kwargs)
        return hubs[-1].channel(name)

    def together(*handles: Any) -> list[list[Any]]:
        while not all(handle.done() for handle in handles):
            if any(handle.failed for handle in handles):
                break
            threading.Event().wait(0.001)
        return [handle.wait() for handle in sorted(handles, key=lambda handle: not handle.failed)]

    monkeypatch.setattr("recipes.language.loop.reasoning_runner.Channel.create", created)
    for module in (
        "recipes.language.loop.answer_recovery",
        "recipes.language.loop.reasoning_runner",
        "recipes.language.loop.generation",
        "recipes.language.loop.model_checkpoints",
        "recipes.training.comparing_worker",
        "rlinf_core.runners.runner",
    ):
        monkeypatch.setattr(f"{module}.wait_together", together)
    made: list[ReasoningRunner] = []

    def train(
        *overrides: str,
        rollouts: int = 1,
        rewards: int = 1,
        death: tuple[str, int, str] | None = None,
        config: str = "math/sums-laptop",
    ) -> LocalRun:
        job = load_job(config, (*SMALL, f"runner.logger.log_path={folder}", *overrides), environ={})
        job.raise_if_bad()
        made_of: Any = job.config
        kinds = {"actor": LanguageActor, "rollout": LanguageRolloutWorker, "reward": RewardWorker}
        further: dict[str, type[Any]] = {
            "critic": LanguageCritic,
            "reference": LanguageReference,
            "teacher": LanguageTeacher,
            "judge": JudgeWorker,
        }
        sizes = {"rollout": rollouts, "reward": rewards}
        run_folder = RunFolder.create(made_of.runner, "math")
        events: list[Event] = []
        deaths = [] if death is None else [death]

        def listen(event: Event) -> None:
            events.append(event)
            if isinstance(event, PhaseStarted) and deaths and (event.step, event.phase) == deaths[0][1:]:
                group: Any = made[-1].groups[deaths.pop()[0]]
                group.die()

        def attempt() -> ReasoningRunner:
            hubs.append(Hub())

            def group(name: str, kind: type[Any]) -> Any:
                return Group(kind, getattr(made_of, name), made_of, hubs[-1], sizes.get(name, 1))

            placed = kinds | {name: further[name] for name in optional_components(made_of)}
            runner = ReasoningRunner(made_of, {name: group(name, kind) for name, kind in placed.items()}, record)
            made.append(runner)
            try:
                runner.init_workers()
                runner.run()
            except BaseException:
                runner.shutdown()
                raise
            return runner

        with RunRecord(run_folder, MetricsWriter(run_folder.metrics_file), listen) as record:
            runner = with_recovery(attempt, record, made_of.runner.max_restarts)
        run_folder.end("finished")
        return LocalRun(runner, run_folder, events)

    yield train
    for runner in made:
        runner.shutdown()
