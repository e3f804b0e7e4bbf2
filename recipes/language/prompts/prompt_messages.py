"""Prompts of language models: distribution to workers, reports about their answers, and requests to judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Prompt(NamedTuple):
    """A problem that a rollout worker is to answer.

    Attributes:
        slot: number of the group of its answers; no other group that is under way has it.
        position: place in the endless order of training problems, or number of the evaluation problem.
        step: the training step that learns from the answers, which draws depend on; 0: evaluation.
        worker: rank of the rollout worker that answers.
        answers: the number of answers.
        temperature: the temperature of the draws; 0 takes the most likely token.
        version: the version of the oldest weights that may draw an answer's tokens.
        shown: whether people may read the answers.
        begun: whether a checkpoint has restored the partial answers.
        set_aside: whether it killed its processes: nothing of it is done, and its answers count as failed.
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


def unlearned_prompts(
    first: int, count: int, workers: int, answers: int, temperature: float, version: int
) -> list[Prompt]:
    """Return prompts of the problems of evaluation from `first` on, dealt to that many workers; see `Prompt`."""
    return [Prompt(slot, first + slot, 0, slot % workers, answers, temperature, version) for slot in range(count)]


class GenerationReport(NamedTuple):
    """Figures of a worker's share of a generation.

    Attributes:
        tokens: drawn.
        seconds: the seconds that the engine worked.
    """

    tokens: int
    seconds: float


class GroupReport(NamedTuple):
    """The facts about the answers to one prompt that the runner knows.

    An answer that could not be scored is not a sample: `failures` counts it, and nothing else does.

    Attributes:
        slot: the slot of the prompt.
        step: the step of the prompt; 0: evaluation.
        problem: number of the problem in its set.
        source: name of that set.
        difficulty: label of the problem, or "".
        tokens: the number of tokens of all sequences, prompts included.
        rewards: the reward of each answer that was scored.
        lengths: tokens drawn of each answer.
        truncated: the number of answers that ended at their limit.
        failures: answers that could not be scored, by kind.
        parts: sums of named parts of rewards.
        oldest: version of the oldest weights that drew a token.
        version_sum: sum of the versions of all tokens drawn.
        skipped: whether the prompt was longer than the limit; it has no answers then.
        dropped: whether the answers are not trained on, because their rewards are equal (`algorithm.filter_groups`).
        figures: sums over the answers of further metrics, by their full names.
        corrects: which of the answers are right.
        spoiled: whether too few answers are left of the group, since others could not be scored.
        failure: why the first of those could not be; "" where there is none.
        exits: bad ends that the policy can have caused, by their names; these answers are samples.
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
    """A group that was scored.

    Attributes:
        report: its facts.
        samples: answers for people to read, as lines of `samples/step_N.jsonl`.
    """

    report: GroupReport
    samples: tuple[Mapping[str, Any], ...] = ()


# The groups of a batch that each actor learns from, by their slots: by rank, and by optimizer step of a pass.
Assignment = tuple[tuple[tuple[int, ...], ...], ...]


def assign(groups: Sequence[GroupReport], actors: int, minibatches: int) -> Assignment:
    """Return which actor learns from which groups in which optimizer step of a pass.

    Each optimizer step gets about as many tokens as every other one, whatever the number of actors, and each actor
    about as many of them as every other one. Largest first, to the actor with the least so far (Graham's LPT rule).
    """
    dealt: list[list[list[int]]] = [[[] for _ in range(minibatches)] for _ in range(actors)]
    tokens = [0] * minibatches
    loads = [[0] * minibatches for _ in range(actors)]
    for group in sorted(groups, key=lambda group: (-group.tokens, group.slot)):
        number = tokens.index(min(tokens))
        rank = min(range(actors), key=lambda actor: (loads[actor][number], sum(loads[actor]), actor))
        tokens[number] += group.tokens
        loads[rank][number] += group.tokens
        dealt[rank][number].append(group.slot)
    return tuple(tuple(tuple(sorted(part)) for part in parts) for parts in dealt)


class NewWeights(NamedTuple):
    """A notice to a rollout worker, in the stream of prompts, that the actor sends weights."""

    version: int


def staleness(groups: list[GroupReport], version: int) -> tuple[float, int]:
    """Return by how many versions the tokens of groups lag `version`: the mean over tokens, and the maximum."""
    drawn = sum(sum(group.lengths) for group in groups)
    if not drawn:
        return 0.0, 0
    total = sum(group.version_sum for group in groups if group.lengths)
    return version - total / drawn, version - min(group.oldest for group in groups if sum(group.lengths))


class KeepUnfinished(NamedTuple):
    """A request to a rollout worker, in the stream of prompts, to hand over unfinished answers for the checkpoint of a
    step and to continue them."""

    step: int


class JudgeRequest(NamedTuple):
    """An answer to judge.

    Attributes:
        number: comes back with the reply; given by the process that asks.
        sender: rank of the reward worker that asks.
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
        right: 0 to 1; None where there is no verdict.
        reason: the end of what the judge said; or why there is no verdict.
        works: whether the judge can judge another answer, so that there is no verdict because of this one.
    """

    number: int
    right: float | None
    reason: str
    works: bool = False


def judge_key(rank: int) -> str:
    """Return the channel key of requests to a judge."""
    return f"judge:{rank}"


def verdict_key(rank: int) -> str:
    """Return the channel key of verdicts for a reward worker."""
    return f"verdicts:{rank}"
