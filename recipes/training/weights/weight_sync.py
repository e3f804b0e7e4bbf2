"""The way of weights from the actors that train them to the rollout workers that act by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from recipes.training.weights.flat_weights import FlatWeights
from rlinf_core import Work, Worker


def receiver_ranks(sender: int, senders: int, receivers: int) -> range:
    """Return the ranks of the rollout workers that get their weights from an actor."""
    return range(sender, receivers, senders)


class WeightSender:
    """Sends weights from one actor to its rollout workers.

    Args:
        worker: the actor.
        source: its group and its rank.
        group_name: of the rollout workers.
        ranks: of those that it serves.
        in_background: send a copy and return at once, because rollouts go on meanwhile.
    """

    def __init__(
        self, worker: Worker, source: tuple[str, int], group_name: str, ranks: range, *, in_background: bool
    ) -> None:
        self._worker = worker
        self._source = source
        self._groups = [(group_name, ranks)]
        self._in_background = in_background
        self._copy: FlatWeights | None = None
        self._sending: Work[object] | None = None

    def send(self, weights: FlatWeights, message: Callable[[FlatWeights], object]) -> None:
        """Send weights, and return when they are received, or before where they are sent in the background.

        Args:
            weights: the current ones, whole.
            message: makes the message of them, or of a copy of them.
        """
        self._wait()
        if self._in_background:
            if self._copy is None:
                self._copy = FlatWeights(weights.views)
            for mine, current in zip(self._copy.buffers, weights.buffers, strict=True):
                mine.copy_(current)
            weights = self._copy
        (_, ranks) = self._groups[0]
        if ranks:
            # One copy for all workers of a host: each takes the weights out of it.
            self._sending = self._worker.broadcast(message(weights), self._groups, self._source, async_op=True)
        if not self._in_background:
            self._wait()

    def send_each(self, messages: Iterable[object]) -> None:
        """Send messages in order, and return when their memory may be changed; no-op without receivers."""
        (_, ranks) = self._groups[0]
        if ranks:
            for message in messages:
                self._worker.broadcast(message, self._groups, self._source)

    def _wait(self) -> None:
        if self._sending is not None:
            self._sending.wait()
        self._sending = None
