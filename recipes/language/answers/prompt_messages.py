"""Messages between workers: prompts, reports of answers, requests to judges; with keys of channels, and an inbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rlinf_core import Channel, CommunicationTimeoutError, Work

# Keys of the channels between rollout and reward workers and the runner.
REPORTS: Final = "reports"
PROGRESS: Final = "progress"
ANSWERS: Final = "answers"
# The key of the actors' channel for unfinished answers from rollout workers.
UNFINISHED: Final = "unfinished"


class Prompt(NamedTuple):
    """An order to answer a problem.

    Attributes:
        slot: the number of the group of answers, unique among groups in progress.
        position: the place in the endless order of training problems, or the number of the evaluation problem.
        step: the training step that learns from the answers, which also seeds sampling; 0: evaluation.
        worker: the rank of the worker that answers.
        answers: the number of answers.
        temperature: the sampling temperature; 0: greedy.
        version: the oldest version of weights that may draw an answer's tokens.
        shown: whether the answers are written as samples.
        begun: whether partial answers were restored from a checkpoint.
        set_aside: whether the prompt is quarantined for killing its processes: its answers count as failed.
    """

    slot: int
    position: int
    step: int
    worker: int
    answers: int
    temperature: float
    version: int = 0
    shown: bool = False
    begun: bool = False
    set_aside: bool = False

    @property
    def trains(self) -> bool:
        """Whether the answers are trained on."""
        return self.step > 0

    def seed(self, seed: int, problems: int) -> int:
        """Return the seed of the answers' draws, given that of the job and the number of problems.

        Each step draws anew, and each epoch: a batch of more prompts than problems asks the same problem several times.
        """
        epoch = self.position // problems if self.trains else 0
        return (seed << 32) + (epoch << 20) + self.step


def unlearned_prompts(
    first: int, count: int, workers: int, answers: int, temperature: float, version: int
) -> list[Prompt]:
    """Return prompts for `count` evaluation problems from `first` on, distributed over workers; see `Prompt`."""
    return [Prompt(slot, first + slot, 0, slot % workers, answers, temperature, version) for slot in range(count)]


class GenerationReport(NamedTuple):
    """The metrics of a worker's share of a generation.

    Attributes:
        tokens: the number of tokens drawn.
        seconds: the seconds of the engine's work.
    """

    tokens: int
    seconds: float


class GroupReport(NamedTuple):
    """The runner's report of the answers to one prompt.

    An answer that could not be scored is counted only in `failures`.

    Attributes:
        slot: the slot of the prompt.
        step: the step of the prompt; 0: evaluation.
        problem: the number of the problem in its data set.
        source: the name of the data set.
        difficulty: the label of the problem, or "".
        tokens: the number of tokens of all sequences, prompts included.
        rewards: the reward of each answer that was scored.
        lengths: the number of tokens drawn for each answer.
        truncated: the number of answers that ended at their limit.
        failures: the number of answers that could not be scored, by cause.
        parts: sums over the answers of named parts of rewards.
        oldest: the version of the oldest weights that drew a token.
        version_sum: the sum of the versions of all drawn tokens.
        skipped: whether the prompt exceeded the length limit, and so has no answers.
        dropped: whether the answers are not trained on, because their rewards are equal (`algorithm.filter_groups`).
        figures: sums over the answers of further metrics, by their full names.
        corrects: whether each scored answer is right.
        spoiled: whether too few answers of the group could be scored.
        failure: the reason of the first failure; "" without failures.
        exits: the number of answers, by bad end that the policy can have caused; these are samples.
    """

    slot: int
    step: int
    problem: int
    source: str
    difficulty: str
    tokens: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int
    failures: dict[str, int]
    parts: dict[str, float]
    oldest: int
    version_sum: int
    skipped: bool = False
    dropped: bool = False
    figures: Mapping[str, float] = {}
    corrects: tuple[bool, ...] = ()
    spoiled: bool = False
    failure: str = ""
    exits: Mapping[str, int] = {}

    @property
    def kept(self) -> bool:
        """Whether the answers are trained on."""
        return not (self.skipped or self.dropped or self.spoiled)

    @property
    def failed(self) -> int:
        """The number of answers that could not be scored."""
        return sum(self.failures.values())


class ScoredGroup(NamedTuple):
    """A scored group.

    Attributes:
        report: the report of the group.
        samples: answers for people to read, as lines of `samples/step_N.jsonl`.
    """

    report: GroupReport
    samples: tuple[Mapping[str, Any], ...] = ()


# The slots of a batch's groups that each actor learns from, by rank and by optimizer step of a pass.
Assignment = tuple[tuple[tuple[int, ...], ...], ...]


def assign(groups: Sequence[GroupReport], actors: int, minibatches: int) -> Assignment:
    """Assign groups to actors and optimizer steps of a pass.

    Optimizer steps get equally many groups, up to one, and about equally many tokens, whatever the number of actors;
    the actors of a step get about equally many tokens. The largest group goes first, to the least loaded (Graham's LPT
    rule).
    """
    dealt: list[list[list[int]]] = [[[] for _ in range(minibatches)] for _ in range(actors)]
    tokens = [0] * minibatches
    loads = [[0] * minibatches for _ in range(actors)]
    left: list[int] = []
    for group in sorted(groups, key=lambda group: (-group.tokens, group.slot)):
        # In each round, every step gets one group.
        left = left or list(range(minibatches))
        number = min(left, key=tokens.__getitem__)
        left.remove(number)
        rank = min(range(actors), key=lambda actor: (loads[actor][number], sum(loads[actor]), actor))
        tokens[number] += group.tokens
        loads[rank][number] += group.tokens
        dealt[rank][number].append(group.slot)
    return tuple(tuple(tuple(sorted(part)) for part in parts) for parts in dealt)


class NewWeights(NamedTuple):
    """An announcement of new weights to a rollout worker, in the stream of prompts."""

    version: int


def staleness(groups: list[GroupReport], version: int) -> tuple[float, int]:
    """Return by how many versions the tokens of groups lag `version`: the mean over tokens, and the maximum."""
    drawn = sum(sum(group.lengths) for group in groups)
    if not drawn:
        return 0.0, 0
    total = sum(group.version_sum for group in groups if group.lengths)
    return version - total / drawn, version - min(group.oldest for group in groups if sum(group.lengths))


class KeepUnfinished(NamedTuple):
    """A request to a rollout worker, in the stream of prompts, to copy unfinished answers into the checkpoint of a
    step.
    """

    step: int


class JudgeRequest(NamedTuple):
    """An answer to judge.

    Attributes:
        number: chosen by the sender, and returned with the reply.
        sender: the rank of the reward worker that asks.
        prompt, answer, text: the question, the right answer, and the answer to judge.
    """

    number: int
    sender: int
    prompt: str
    answer: str
    text: str


class JudgeReply(NamedTuple):
    """A verdict.

    Attributes:
        number: the number of the request.
        right: the verdict, 0 to 1; None: no verdict.
        reason: the end of the judge's text, or why there is no verdict.
        works: whether the judge could judge another answer, so that the lack of a verdict is this answer's fault.
    """

    number: int
    right: float | None
    reason: str
    works: bool = False


def orders_key(rank: int) -> str:
    """Return the channel key of orders to a rollout worker during asynchronous rollouts."""
    return f"orders:{rank}"


def unfinished_key(position: int) -> str:
    """Return the key, in the actors' channel, of a checkpoint's unfinished answers to a training problem."""
    return f"unfinished:{position}"


def judge_key(rank: int) -> str:
    """Return the channel key of requests to a judge."""
    return f"judge:{rank}"


def verdict_key(rank: int) -> str:
    """Return the channel key of verdicts for a reward worker."""
    return f"verdicts:{rank}"


class Inbox:
    """The items of one key of a channel.

    A wait ends only with an item or the sender's death, as a trainer may take hours for a step.

    Args:
        channel: the channel of the items.
        key: the key of the items.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._key = key
        # The pending request for the next item.
        self._next: Work[Any] | None = None

    def poll(self) -> list[Any]:
        """Return the items that have arrived, without waiting."""
        orders: list[Any] = []
        while self._asked().done():
            orders += self._take()
        return orders

    def wait(self) -> Any:
        """Return the next item, without requesting another."""
        while True:
            for item in self._take():
                return item

    def abandon(self) -> None:
        """Cancel the request for the next item, after a failure that ends the run."""
        if self._next is not None:
            # The callback avoids the warning of a handle that is never awaited.
            self._next.add_done_callback(lambda: None)
            self._next = None

    def _asked(self) -> Work[Any]:
        if self._next is None:
            self._next = self._channel.get(key=self._key, async_op=True)
        return self._next

    def _take(self) -> list[Any]:
        """Wait for the next item, and return it in a list; an empty list at a timeout."""
        work = self._asked()
        try:
            return [work.wait()]
        except CommunicationTimeoutError:
            return []
        finally:
            self._next = None
