"""The way of weights from the actors that train them to the rollout workers that act by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from recipes.training.weights.sent_weights import Place, SentWeights
from rlinf_core import RLinfError, Work, Worker

AboutT = TypeVar("AboutT")


class FirstPiece(NamedTuple, Generic[AboutT]):
    """The first message of an update, with the first of its pieces. The others follow, a tensor each.

    Attributes:
        about: further facts for the receiver, such as the version.
        pieces: see `SentWeights`.
        tensor: the first piece; None: there are no weights.
    """

    about: AboutT
    pieces: tuple[tuple[Place, ...], ...]
    tensor: Tensor | None


def piece_messages(
    weights: SentWeights, about: AboutT, *, copies: bool = False
) -> Iterator[FirstPiece[AboutT] | Tensor]:
    """Yield the messages of an update. Collective where `weights` are.

    Args:
        weights: the current ones.
        about: see `FirstPiece`.
        copies: whether the messages are copies on the host, which may be sent while training continues.
    """
    tensors = (piece.to("cpu", copy=copies) if copies else piece for piece in weights.tensors())
    yield FirstPiece(about, weights.pieces, next(tensors, None))
    yield from tensors


@torch.no_grad()
def load_pieces(first: FirstPiece[AboutT], others: Iterator[Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy the weights of an update, the first of whose messages is there, into tensors by name.

    Raises:
        RLinfError: the weights are not those that the tensors stand for.
    """
    names = {place.name for places in first.pieces for place in places}
    if names != set(into):
        _refuse(f"`{min(names ^ into.keys())}` is a weight of one of them only")
    piece = first.tensor
    for places in first.pieces:
        arrived = next(others) if piece is None else piece
        for place in places:
            mine, theirs = into[place.name], place.of(arrived)
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                _refuse(
                    f"`{place.name}` is {list(theirs.shape)} of {theirs.dtype} and {list(mine.shape)} of {mine.dtype}"
                )
            mine.copy_(theirs)
        piece = None


def _refuse(why: str) -> NoReturn:
    raise RLinfError(
        "the actor's policy and the rollout worker's differ",
        why=why,
        help="install the same versions of the policy's packages for both",
    )


def receiver_ranks(sender: int, senders: int, receivers: int) -> range:
    """Return the ranks of the rollout workers that get their weights from an actor."""
    return range(sender, receivers, senders)


class WeightSender:
    """Sends weights from one actor to its rollout workers.

    Args:
        worker: the actor.
        source: its group and its rank.
        group_name: the name of the group of the rollout workers.
        ranks: the ranks that it serves.
        in_background: return before the messages are received, because rollouts continue meanwhile.
    """

    def __init__(
        self, worker: Worker, source: tuple[str, int], group_name: str, ranks: range, *, in_background: bool
    ) -> None:
        self._worker = worker
        self._source = source
        self._groups = [(group_name, ranks)]
        self.in_background = in_background
        self._sending: list[Work[object]] = []

    def send(self, messages: Iterable[object]) -> None:
        """Send messages in order, one copy of each for all workers of a host.

        Without receivers they are made all the same: their weights are gathered by all ranks together. Returns when
        the memory of the messages may be changed; in the background at once, after those of an earlier call are sent.
        """
        while self._sending:
            self._sending.pop(0).wait()
        (_, ranks) = self._groups[0]
        for message in messages:
            if not ranks:
                continue
            if self.in_background:
                self._sending.append(self._worker.broadcast(message, self._groups, self._source, async_op=True))
            else:
                self._worker.broadcast(message, self._groups, self._source)
