"""Services that send prompts to workers and return reports of the answers, synchronously or as a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from recipes.language.answers.prompt_messages import (
    ANSWERS,
    REPORTS,
    GenerationReport,
    Inbox,
    KeepUnfinished,
    NewWeights,
    Prompt,
    ScoredGroup,
    orders_key,
)
from recipes.language.loop.worker_groups import EngineGroup, GenerationGroup, RewardGroup
from rlinf_core import Channel, CommunicationTimeoutError, RLinfError, WorkerGroupHandle, env_vars
from rlinf_core.errors import RunError
from rlinf_core.waiting import Deadline
from rlinf_core.worker.handle import WaitWatch, wait_together

# Seconds between polls for reports, at first and at most.
_SHORTEST_NAP, _LONGEST_NAP = 0.0002, 0.005
# Seconds between checks of the workers, and seconds until a worker's death is known at the latest.
_CHECK_SECONDS, _DEATH_SECONDS = 0.2, 10.0


class PromptService(ABC):
    """The rollout and reward workers as one service from prompts to scored groups.

    Attributes:
        alongside: calls of helper workers that last for the whole run; a failed one ends a wait.
        meanwhile: a function to call repeatedly during a wait, or None.
    """

    def __init__(self) -> None:
        self.alongside: Sequence[WorkerGroupHandle[Any]] = ()
        self.meanwhile: Callable[[], None] | None = None

    def _check_alongside(self) -> None:
        """Call `meanwhile`, and raise the failure of a call in `alongside`."""
        if self.meanwhile is not None:
            self.meanwhile()
        for handle in self.alongside:
            if handle.failed:
                handle.wait()

    @abstractmethod
    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Hand out prompts."""

    @abstractmethod
    def poll(self) -> list[ScoredGroup]:
        """Return the groups that have arrived, without waiting."""

    @abstractmethod
    def wait(self) -> list[ScoredGroup]:
        """Wait for at least one group of the requested prompts, and return all that have arrived."""

    @abstractmethod
    def load_weights(self, version: int) -> tuple[WorkerGroupHandle[Any], ...]:
        """Have the rollout workers load the weights that the actor sends."""

    @abstractmethod
    def tokens_per_second(self) -> float:
        """Return the throughput of the engines since the last call, in tokens per second."""

    def offload(self, *, weights_follow: bool) -> None:  # noqa: B027 - some generate without an end
        """Let the rollout workers release memory until the next request.

        Args:
            weights_follow: whether they get new weights before the next request.
        """

    def keep_unfinished(self, step: int) -> bool:
        """Have the workers copy unfinished answers to the actors, and continue.

        Returns:
            Whether the workers support this.
        """
        return False

    def end(self) -> None:  # noqa: B027 - there may be nothing that goes on by itself
        """Let the workers return once nothing is in progress."""

    def abandon(self) -> None:  # noqa: B027 - nothing may be on its way
        """Drop pending messages after a failure that ends the workers."""


Wait: TypeAlias = Callable[..., Sequence[Sequence[Any]]]
Answered: TypeAlias = Callable[
    [tuple[Prompt, ...], Wait], tuple[Sequence[GenerationReport], Sequence[list[ScoredGroup]]]
]


class SyncRollouts(PromptService):
    """A service that answers and scores all requested prompts by one call on each group.

    Args:
        rollout: the workers that hold engines.
        answered: has prompts answered and scored, given a function that waits for calls; returns the report of each
            engine and the groups of each reward worker.
    """

    def __init__(self, rollout: EngineGroup, answered: Answered) -> None:
        super().__init__()
        self._rollout = rollout
        self._answered = answered
        self._asked: list[Prompt] = []
        self._tokens, self._seconds = 0, 0.0

    def ask(self, prompts: Sequence[Prompt]) -> None:
        self._asked += prompts

    def poll(self) -> list[ScoredGroup]:
        """See `PromptService`: none, as nothing runs between two waits."""
        return []

    def wait(self) -> list[ScoredGroup]:
        """See `PromptService`: return all groups at once."""
        asked, self._asked = tuple(self._asked), []
        generated, scored = self._answered(asked, self._wait)
        self._tokens += sum(report.tokens for report in generated)
        self._seconds += max(report.seconds for report in generated)
        return sorted((group for report in scored for group in report), key=lambda group: group.report.slot)

    def _wait(self, *calls: WorkerGroupHandle[Any]) -> Sequence[Sequence[Any]]:
        """Return the results of calls, checking `alongside`: scoring would wait forever for helpers that failed."""
        looks = self.alongside or self.meanwhile is not None
        return wait_for(calls, self._check_alongside) if looks else wait_together(*calls)

    def load_weights(self, version: int) -> tuple[WorkerGroupHandle[Any], ...]:
        return (self._rollout.sync_model_from_actor(),)

    def offload(self, *, weights_follow: bool) -> None:
        wait_together(self._rollout.offload(weights_follow))

    def tokens_per_second(self) -> float:
        """See `PromptService`: per second of engine work."""
        speed = self._tokens / self._seconds if self._seconds else 0.0
        self._tokens, self._seconds = 0, 0.0
        return speed


class Stage(NamedTuple):
    """Workers that generate continuously until asked to return.

    Attributes:
        running: the workers' call.
        keys: the key of each worker's orders in their channel; the order None lets the worker return.
    """

    running: WorkerGroupHandle[None]
    keys: Sequence[str]


class AsyncRollouts(PromptService):
    """A service whose workers run until the end, and receive prompts and weights through channels.

    Args:
        stages: the workers by stage: those that answer first, those that score last.
        engines: the keys of the workers that load weights.
        orders: the channel to all workers.
        reports: the channel from the workers that score.
        keeps_unfinished: whether the answering workers can hand over unfinished answers.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        engines: Sequence[str],
        orders: Channel,
        reports: Channel,
        *,
        keeps_unfinished: bool = True,
    ) -> None:
        super().__init__()
        self._stages = stages
        self._engines = engines
        self._orders = orders
        self._inbox = Inbox(reports, REPORTS)
        self._keeps_unfinished = keeps_unfinished
        self._tokens, self._since, self._checked = 0, time.monotonic(), time.monotonic()

    @classmethod
    def of_engines(
        cls,
        rollout: GenerationGroup,
        reward: RewardGroup,
        workers: Mapping[str, int],
        orders: Channel,
        reports: Channel,
    ) -> AsyncRollouts:
        """Start rollout and reward workers, and return their service.

        Args:
            rollout, reward: the groups.
            workers: the number of processes of each component.
            orders, reports: see the class.
        """
        keys = [orders_key(rank) for rank in range(workers["rollout"])]
        stages = (Stage(rollout.generate_forever(), keys), scoring(reward, workers["reward"]))
        return cls(stages, keys, orders, reports)

    def ask(self, prompts: Sequence[Prompt]) -> None:
        for rank, key in enumerate(self._stages[0].keys):
            own = tuple(prompt for prompt in prompts if prompt.worker == rank)
            if own:
                self._put(own, key)

    def _put(self, item: object, key: str) -> None:
        try:
            self._orders.put(item, key=key)
        except RLinfError:
            self._raise_death()
            raise

    def poll(self) -> list[ScoredGroup]:
        if time.monotonic() - self._checked >= _CHECK_SECONDS:
            self._checked = time.monotonic()
            self._check()
        try:
            groups: list[ScoredGroup] = self._inbox.poll()
        except RLinfError:
            self._raise_death()
            raise
        self._tokens += sum(sum(group.report.lengths) for group in groups)
        return groups

    def wait(self) -> list[ScoredGroup]:
        """See `PromptService`.

        Raises:
            WorkerGroupError: a worker failed or died.
            CommunicationTimeoutError: no group arrived within `RLINF_TIMEOUT`.
        """
        deadline, nap, watch = Deadline.after(env_vars.TIMEOUT.get()), _SHORTEST_NAP, WaitWatch()
        while not (groups := self.poll()):
            watch.look()
            if deadline.expired:
                raise CommunicationTimeoutError("waiting for scored answers", env_vars.TIMEOUT.get())
            time.sleep(nap)
            nap = min(_LONGEST_NAP, 2 * nap)
        return groups

    def load_weights(self, version: int) -> tuple[WorkerGroupHandle[Any], ...]:
        """See `PromptService`: generation continues until the weights have arrived and are loaded."""
        for key in self._engines:
            self._put(NewWeights(version), key)
        return ()

    def keep_unfinished(self, step: int) -> bool:
        if self._keeps_unfinished:
            for key in self._stages[0].keys:
                self._put(KeepUnfinished(step), key)
        return self._keeps_unfinished

    def tokens_per_second(self) -> float:
        """See `PromptService`: per second of elapsed time."""
        now = time.monotonic()
        speed = self._tokens / max(1e-9, now - self._since)
        self._tokens, self._since = 0, now
        return speed

    def end(self) -> None:
        for stage in self._stages:
            for key in stage.keys:
                self._put(None, key)
            wait_together(stage.running)

    def abandon(self) -> None:
        self._inbox.abandon()

    def _check(self) -> None:
        """Raise the failure of a worker, if any."""
        self._check_alongside()
        running = [stage.running for stage in self._stages]
        # Check this before failures: a call may fail in between.
        has_returned = any(handle.done() for handle in running)
        if any(handle.failed for handle in running):
            wait_together(*running)
        if has_returned:
            raise RunError("rollout or reward workers returned before the end of the run")

    def _raise_death(self) -> None:
        """Raise the worker death that explains a failed operation, waiting a while until it is known."""
        deadline = Deadline.after(_DEATH_SECONDS)
        while not deadline.expired:
            self._check()
            time.sleep(_LONGEST_NAP)


def scoring(reward: RewardGroup, workers: int) -> Stage:
    """Return the stage of the reward workers, which share one key for answers."""
    return Stage(reward.score_forever(), [ANSWERS] * workers)


class Awaited(Protocol):
    """A pending call; `WorkerGroupHandle` is one."""

    def done(self) -> bool:
        """Return whether `wait` returns or raises at once."""
        ...

    def wait(self) -> list[Any]:
        """Return the results."""
        ...


def wait_for(handles: Sequence[Awaited], meanwhile: Callable[[], object]) -> list[list[Any]]:
    """Return the results of calls, calling `meanwhile` repeatedly until they arrive.

    The first failure ends the wait, as other calls may be waiting for the failed workers.
    """
    nap, watch = _SHORTEST_NAP, WaitWatch()
    results: dict[int, list[Any]] = {}
    while True:
        for number, handle in enumerate(handles):
            if number not in results and handle.done():
                results[number] = handle.wait()
        if len(results) == len(handles):
            return [results[number] for number in range(len(handles))]
        meanwhile()
        watch.look()
        time.sleep(nap)
        nap = min(_LONGEST_NAP, 2 * nap)
