"""Answers in checkpoints: groups buffered for training, and unfinished answers."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import FinishReason, Sequence
from recipes.training.tensor_files import below, read_tensors, write_tensors
from recipes.training.typed_tensors import floats, integers, pieces
from rlinf_core import Channel, CheckpointError

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
    answers: tuple[Sequence, ...]

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


def load_unfinished(positions: SequenceABC[int], folder: Path) -> list[UnfinishedGroup]:
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


def _tensors(answers: SequenceABC[Sequence]) -> dict[str, Tensor]:
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


def _answers(stored: dict[str, Tensor]) -> tuple[Sequence, ...]:
    lengths = integers(stored["lengths"])
    tokens, logprobs, versions = (pieces(stored[name], lengths) for name in ("tokens", "logprobs", "versions"))
    return tuple(
        Sequence(
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
