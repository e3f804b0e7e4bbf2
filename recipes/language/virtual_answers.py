"""A simulation of `ReasoningRunner`, its engines, reward workers and actors in virtual time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rlinf_core.job.arrangements import Device, Simulated
from rlinf_core.job.flow import Duration, Process, Receive, Use, VirtualTime

# The number of steps before the steady state, and of measured steps.
_WARM_UP, _MEASURED = 2, 32
# Where other events may interrupt an engine, it takes this fraction of the longest answer's steps at once.
_PARTS: Final = 48


class AnswerJob(NamedTuple):
    """The processes of a job, and the work of its steps.

    Attributes:
        rollout, actor: the accelerator of each process.
        rewards: the number of reward workers.
        staleness: the number of steps that rollouts run ahead.
        lengths: maps the number of a step to the answer lengths in tokens for each of its prompts.
        step: the duration of an engine step, by the number of active answers.
        score: the duration of scoring a group, by its number of answers.
        sync, handover: seconds of a weight transfer, and of everything else between two phases.
        training: the seconds of each call of one actor in a step, by the tokens of all answers.
        turns: the number of turns of a conversation, over which its tokens are spread evenly.
        pause: seconds between two turns of a conversation, such as a tool's.
        lag: seconds between two engine steps, in which the accelerator is idle.
        drains: whether an engine finishes its active answers before it takes new weights and new prompts.
    """

    rollout: Sequence[Device]
    actor: Sequence[Device]
    rewards: int
    staleness: int
    lengths: Callable[[int], Sequence[Sequence[int]]]
    step: Duration
    score: Duration
    sync: float
    handover: float
    training: Callable[[float], Sequence[float]]
    turns: int = 1
    pause: float = 0.0
    lag: float = 0.0
    drains: bool = False


class _Engine:
    """The active answers of one engine, as rows of tokens left in the turn, turns left, group, and tokens per turn."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        # An empty order stands for new weights, before which all active answers end.
        self.orders: deque[list[list[int]]] = deque()
        self.prompts = 0
        # The number of orders that were announced by a message and not taken yet.
        self.told = 0


class _Virtual:
    """The state of a simulated job."""

    def __init__(self, job: AnswerJob) -> None:
        self.job, self.clock = job, VirtualTime()
        self.engines = [_Engine() for _ in job.rollout]
        # For each group: its missing answers, all its answers, its engine and its step.
        self.groups: list[list[int]] = []
        self.to_score: deque[int] = deque()
        self.tokens: defaultdict[int, int] = defaultdict(int)
        self.ends: list[float] = []
        self.calls: Sequence[float] = ()

    def deal(self, step: int) -> None:
        """Give each prompt of a step to the engine with the fewest, as `PromptPlan` does."""
        for lengths in self.job.lengths(step):
            rank = min(range(len(self.engines)), key=lambda rank: (self.engines[rank].prompts, rank))
            engine = self.engines[rank]
            engine.prompts += 1
            self.groups.append([len(lengths), len(lengths), rank, step])
            turns = self.job.turns
            engine.orders.append(
                [
                    [tokens, turns - 1, len(self.groups) - 1, tokens]
                    for tokens in (-(-length // turns) for length in lengths)
                ]
            )
            self.tokens[step] += sum(lengths)
        # Orders are announced after the loop: an engine starts with all its prompts.
        for rank, engine in enumerate(self.engines):
            if engine.orders:
                self.clock.put(("order", rank), count=len(engine.orders) - engine.told)
                engine.told = len(engine.orders)

    def answer(self, rank: int, device: Device) -> Process:
        """Sample tokens for all answers of an engine at once, forever; wait for prompts when none is left."""
        engine = self.engines[rank]
        while True:
            while engine.orders and (engine.orders[0] or not engine.rows):
                yield Receive(("order", rank))
                engine.told -= 1
                engine.rows += engine.orders.popleft()
            if not engine.rows:
                yield Receive(("order", rank))
                self.clock.put(("order", rank))
                continue
            steps = min(row[0] for row in engine.rows)
            if self.job.staleness or self.job.turns > 1:
                steps = min(steps, max(1, max(row[0] for row in engine.rows) // _PARTS))
            yield Use(device, steps * self.job.step.mean(len(engine.rows)))
            if self.job.lag:
                yield Use(None, steps * self.job.lag)
            left: list[list[int]] = []
            for row in engine.rows:
                row[0] -= steps
                if row[0] > 0:
                    left.append(row)
                elif row[1]:
                    self.clock.start(self._pause(rank, row))
                else:
                    self._ended(engine, row[2])
            engine.rows = left

    def _pause(self, rank: int, row: list[int]) -> Process:
        """Begin the next turn of a conversation after the job's pause."""
        yield Use(None, self.job.pause)
        engine = self.engines[rank]
        engine.orders.append([[row[3], row[1] - 1, row[2], row[3]]])
        engine.told += 1
        self.clock.put(("order", rank))

    def _ended(self, engine: _Engine, group: int) -> None:
        self.groups[group][0] -= 1
        if not self.groups[group][0]:
            engine.prompts -= 1
            self.to_score.append(group)
            self.clock.put("answered")

    def score(self) -> Process:
        """Score finished groups one by one."""
        while True:
            yield Receive("answered")
            _, answers, _, step = self.groups[self.to_score.popleft()]
            yield Use(None, self.job.score.mean(answers))
            self.clock.put(("scored", step))

    def train(self, device: Device) -> Process:
        """Learn from the answers of a step."""
        while True:
            yield Receive("train")
            for seconds in self.calls:
                yield Use(device, seconds)
            self.clock.put("trained")

    def drive(self, last: int) -> Process:
        """Go through the phases of each step."""
        job, asked = self.job, -1
        for step in range(last + 1):
            if asked < step:
                yield Use(None, job.sync)
            elif step and job.drains:
                for engine in self.engines:
                    engine.orders.append([])
            while asked < step + job.staleness:
                asked += 1
                self.deal(asked)
            yield Receive(("scored", step), len(job.lengths(step)))
            yield Use(None, job.handover)
            self.calls = job.training(self.tokens.pop(step))
            self.clock.put("train", count=len(job.actor))
            yield Receive("trained", len(job.actor))
            self.ends.append(self.clock.now)
        self.clock.stop()


def simulate(job: AnswerJob) -> Simulated:
    """Return the mean over the measured steps of the job."""
    virtual = _Virtual(job)
    for rank, device in enumerate(job.rollout):
        virtual.clock.start(virtual.answer(rank, device))
    for _ in range(job.rewards):
        virtual.clock.start(virtual.score())
    for device in job.actor:
        virtual.clock.start(virtual.train(device))
    first, last = measured(job.staleness)
    virtual.clock.start(virtual.drive(last))
    virtual.clock.run()
    seconds = (virtual.ends[last] - virtual.ends[first]) / (last - first)
    busy = {device: work / virtual.clock.now for device, work in virtual.clock.busy.items()}
    return Simulated(seconds, busy)  # type: ignore[arg-type]


def measured(staleness: int) -> tuple[int, int]:
    """Return the first and the last step; the time between their ends is measured."""
    first = _WARM_UP + 2 * staleness if staleness else 0
    # When rollouts run ahead, long and short steps may alternate.
    return first, first + _MEASURED * (1 + staleness)
