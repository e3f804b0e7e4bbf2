"""Batches of answers as flat arrays, for transport and training, and answers in checkpoints.

A checkpoint keeps groups that are buffered for training, and unfinished answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.sequences import FinishReason
from recipes.language.answers.sequences import Sequence as Answer
from recipes.training.tensor_files import below, read_tensors, write_tensors
from recipes.training.typed_tensors import floats, integers, pieces
from rlinf_core import Channel, CheckpointError


class ScoredAnswers(NamedTuple):
    """The answers to one prompt with their rewards.

    Attributes:
        answers: the sequences; segments of a trajectory are adjacent.
        group: the number of the prompt.
        rewards: the reward of each answer's trajectory.
    """

    answers: Sequence[Answer]
    group: int
    rewards: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """n answers with their prompts, without padding.

    An answer of several turns includes the text between its turns. A trajectory that branched is several adjacent
    answers, its segments.

    Attributes:
        tokens: int64 [T], prompt and answer of each sequence, concatenated.
        lengths: int64 [n], tokens of each sequence, prompt and answer.
        prompt_lengths: int64 [n], tokens of each prompt.
        trained: bool [A], whether an answer token is trained on; A is the sum of the answers' lengths.
        logprobs: float32 [A], log-probability of each answer token under the policy that drew it.
        versions: int64 [A], version of the weights that drew each answer token.
        groups: int64 [n], number of each answer's prompt.
        samples: int64 [n], number of the trajectory within its group; equal for its segments.
        rewards: float32 [n], reward of the trajectory.
        step_rewards: float32 [A], the part of the reward that came with a token before the end.
        finished: bool [n], whether the answer ended by itself, not at its length limit.
        minibatches: int64 [n], number of the optimizer step within a pass that learns from the answer; equal within a
            group, and chosen for all ranks together.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    trained: Tensor
    logprobs: Tensor
    versions: Tensor
    groups: Tensor
    samples: Tensor
    rewards: Tensor
    step_rewards: Tensor
    finished: Tensor
    minibatches: Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], group: int, rewards: Sequence[float]) -> RolloutBatch:
        """Return a batch of the answers to one prompt; see `ScoredAnswers`."""
        return cls.of_groups([ScoredAnswers(answers, group, rewards)])

    @classmethod
    def of_groups(cls, groups: Sequence[ScoredAnswers]) -> RolloutBatch:
        """Return a batch of the answers to several prompts, in their order."""
        answers = [answer for part in groups for answer in part.answers]
        return cls(
            tokens=_whole([token for answer in answers for token in (*answer.prompt, *answer.tokens)]),
            lengths=_whole([len(answer.prompt) + len(answer.tokens) for answer in answers]),
            prompt_lengths=_whole([len(answer.prompt) for answer in answers]),
            trained=torch.tensor(
                [is_trained for answer in answers for is_trained in answer.trained or (True,) * len(answer.tokens)],
                dtype=torch.bool,
            ),
            logprobs=torch.tensor([value for answer in answers for value in answer.logprobs], dtype=torch.float32),
            versions=_whole([value for answer in answers for value in answer.versions]),
            groups=_whole([part.group for part in groups for _ in part.answers]),
            samples=_whole([answer.sample for answer in answers]),
            rewards=torch.tensor([reward for part in groups for reward in part.rewards], dtype=torch.float32),
            step_rewards=torch.tensor(
                [reward for answer in answers for reward in answer.rewards or (0.0,) * len(answer.tokens)],
                dtype=torch.float32,
            ),
            finished=torch.tensor([answer.finish_reason == "stop" for answer in answers], dtype=torch.bool),
            minibatches=torch.zeros(len(answers), dtype=torch.int64),
        )

    @classmethod
    def joined(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Return several batches concatenated."""
        if not batches:
            return cls.empty()
        return cls(**{field.name: torch.cat([getattr(b, field.name) for b in batches]) for field in fields(cls)})

    @classmethod
    def empty(cls) -> RolloutBatch:
        """Return a batch without answers."""
        return cls.of_groups(())

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def answer_lengths(self) -> Tensor:
        """Tokens of each answer, int64 [n]."""
        return self.lengths - self.prompt_lengths

    @property
    def trajectories(self) -> tuple[Tensor, Tensor]:
        """The first answer of each trajectory, and its number of answers; both int64 [trajectories]."""
        begins = torch.ones(len(self), dtype=torch.bool)
        begins[1:] = (self.groups[1:] != self.groups[:-1]) | (self.samples[1:] != self.samples[:-1])
        first = begins.nonzero()[:, 0]
        return first, first.diff(append=torch.tensor([len(self)]))

    def drawn_by(self, version: int) -> Tensor:
        """Return the trained tokens of answers that this version of the weights sampled entirely, as a mask, bool [A].

        In mixed answers, tokens of new weights attended to keys and values of older weights.
        """
        others = answer_sums((self.trained & (self.versions != version)).float(), self.answer_lengths)
        return self.trained & per_token(others == 0, self.answer_lengths)

    def select(self, rows: Tensor) -> RolloutBatch:
        """Return the answers with these row numbers, int64 [m]."""
        of_answers = ("trained", "logprobs", "versions", "step_rewards")
        lengths = {"tokens": self.lengths, **dict.fromkeys(of_answers, self.answer_lengths)}
        columns: dict[str, Tensor] = {field.name: getattr(self, field.name) for field in fields(self)}
        return RolloutBatch(
            **{
                name: _ragged(values, lengths[name], rows) if name in lengths else values[rows]
                for name, values in columns.items()
            }
        )


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def per_token(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat a value of each answer, [n], for each of its tokens, [A]."""
    return values.repeat_interleave(lengths)


def answer_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of token values, [A], over each answer, [n]; differentiable."""
    index = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    return values.new_zeros(len(lengths)).index_add(0, index, values)


def _ragged(values: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the pieces numbered `rows` of a tensor that concatenates pieces of these lengths."""
    starts = lengths.cumsum(0) - lengths
    chosen = lengths[rows]
    within = torch.arange(int(chosen.sum())) - (chosen.cumsum(0) - chosen).repeat_interleave(chosen)
    return values[starts[rows].repeat_interleave(chosen) + within]


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return items distributed over parts of similar total weight, each in ascending order.

    The heaviest item goes first, to the lightest part so far (Graham's LPT rule: at most 4/3 of the best). Ties go to
    the lower number, so that the result depends on the weights alone.
    """
    heap = [(0, part) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        total, part = heapq.heappop(heap)
        dealt[part].append(item)
        heapq.heappush(heap, (total + weights[item], part))
    return [sorted(share) for share in dealt]


def token_budget_parts(
    costs: Sequence[int],
    budget: int,
    counts: Sequence[int] = (),
    most: int | None = None,
    *,
    shares_row: int | None = None,
) -> list[list[int]]:
    """Return items in parts of at most `budget` total cost, with items of similar cost together.

    Parts are filled in descending order of cost; an item above the budget gets a part alone.

    Args:
        costs: the costs of the items.
        budget: largest sum of the costs of a part.
        counts: a second cost of each item.
        most: largest sum of the counts of a part; None: any.
        shares_row: items up to this cost share rows; in a part with a costlier item, each item costs as much as the
            costliest. None: all share rows.
    """
    parts: list[list[int]] = []
    room = left = -1
    widest = 0
    for item in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        count = 0 if most is None else counts[item]
        if max(costs[item], widest) > room or count > left:
            parts.append([])
            room, left = budget, most or 0
            widest = 0 if shares_row is None or costs[item] <= shares_row else costs[item]
        parts[-1].append(item)
        room -= max(costs[item], widest)
        left -= count
    return parts


def whole_groups(batch: RolloutBatch) -> list[list[int]]:
    """Return the numbers of the answers of each group, in the order in which groups first occur."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(integers(batch.groups)):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


_FILE: Final = "buffered.safetensors"
_UNFINISHED_FILE: Final = "unfinished.safetensors"
_REASONS: Final[tuple[FinishReason, ...]] = ("aborted", "stop", "length")


class UnfinishedGroup(NamedTuple):
    """The partly drawn answers to a training problem.

    Attributes:
        position: the problem's place in the endless order of training problems.
        answers: the answers with at least one token; unfinished ones are `aborted`.
    """

    position: int
    answers: tuple[Answer, ...]

    @property
    def oldest(self) -> int:
        """Version of the oldest weights that drew a token."""
        return min(version for answer in self.answers for version in answer.versions)


class UnfinishedReport(NamedTuple):
    """The prompts that a rollout worker is answering.

    Attributes:
        positions: the positions of all problems being answered.
        groups: the groups with at least one drawn token.
    """

    positions: tuple[int, ...]
    groups: tuple[UnfinishedGroup, ...]

    @property
    def oldest(self) -> dict[int, int | None]:
        """Version of the oldest weights that drew a token, by position; None without drawn tokens."""
        return {**dict.fromkeys(self.positions), **{group.position: group.oldest for group in self.groups}}


def save_buffered(channel: Channel, slots: tuple[int, ...], folder: Path) -> None:
    """Write the groups under the keys `slots` of a channel, without taking them."""
    tensors: dict[str, Tensor] = {}
    for slot in slots:
        (batch,) = channel.peek_all(key=str(slot))
        tensors |= {f"{slot}.{field.name}": getattr(batch, field.name) for field in fields(RolloutBatch)}
    write_tensors(folder / _FILE, tensors)


def load_buffered(channel: Channel, slots: tuple[int, ...], folder: Path) -> None:
    """Put the groups that `save_buffered` wrote into a channel, under the keys `slots`.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a group.
    """
    with _stored(folder / _FILE, "buffered answer groups") as groups:
        # Groups of earlier releases have an extra column.
        names = [field.name for field in fields(RolloutBatch)]
        batches = {slot: RolloutBatch(**{name: groups[f"{slot}.{name}"] for name in names}) for slot in slots}
    for slot, batch in batches.items():
        channel.put(batch, weight=int(batch.lengths.sum()), key=str(slot))


def save_unfinished(groups: Iterable[UnfinishedGroup], folder: Path) -> None:
    """Write unfinished answers."""
    named = ((group.position, _tensors(group.answers)) for group in groups)
    tensors = {f"{position}.{name}": tensor for position, answers in named for name, tensor in answers.items()}
    write_tensors(folder / _UNFINISHED_FILE, tensors)


def load_unfinished(positions: Sequence[int], folder: Path) -> list[UnfinishedGroup]:
    """Return the unfinished answers to problems that `save_unfinished` wrote.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a problem.
    """
    with _stored(folder / _UNFINISHED_FILE, "unfinished answers") as stored:
        return [UnfinishedGroup(position, _answers(below(stored, str(position)))) for position in positions]


@contextmanager
def _stored(file: Path, what: str) -> Generator[dict[str, Tensor]]:
    """Yield the tensors in a file of a checkpoint, by the names of groups and of their parts.

    Raises:
        CheckpointError: the file is missing or damaged, or a lookup within the block fails.
    """
    try:
        yield read_tensors(file)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint lacks {what}",
            where=str(file),
            why=str(error) or type(error).__name__,
            help="resume from another checkpoint",
        ) from None


def _tensors(answers: Sequence[Answer]) -> dict[str, Tensor]:
    """Return the answers to one prompt as tensors."""
    return {
        "prompt": torch.tensor(answers[0].prompt, dtype=torch.int64),
        "samples": torch.tensor([answer.sample for answer in answers]),
        "lengths": torch.tensor([len(answer.tokens) for answer in answers]),
        "reasons": torch.tensor([_REASONS.index(answer.finish_reason) for answer in answers]),
        "tokens": torch.tensor([token for answer in answers for token in answer.tokens], dtype=torch.int64),
        "logprobs": torch.tensor([number for answer in answers for number in answer.logprobs], dtype=torch.float64),
        "versions": torch.tensor([version for answer in answers for version in answer.versions], dtype=torch.int64),
    }


def _answers(stored: dict[str, Tensor]) -> tuple[Answer, ...]:
    lengths = integers(stored["lengths"])
    tokens, logprobs, versions = (pieces(stored[name], lengths) for name in ("tokens", "logprobs", "versions"))
    return tuple(
        Answer(
            request_id="",
            sample=sample,
            prompt=tuple(integers(stored["prompt"])),
            tokens=tuple(integers(tokens[number])),
            logprobs=tuple(floats(logprobs[number])),
            versions=tuple(integers(versions[number])),
            finish_reason=_REASONS[reason],
        )
        for number, (sample, reason) in enumerate(
            zip(integers(stored["samples"]), integers(stored["reasons"]), strict=True)
        )
    )
