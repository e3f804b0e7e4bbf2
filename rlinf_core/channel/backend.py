"""The seam between what users call and where the queues are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rlinf_core.channel.operation import ChannelOperation
from rlinf_core.channel.wire import Query


class Backend(ABC):
    """The queues of one channel.

    Every operation takes a `timeout` in seconds; None means `RLINF_TIMEOUT`.

    Attributes:
        name: of the channel.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def maxsize(self) -> int:
        """The number of items that each key holds; 0 means any number."""

    @abstractmethod
    def connect(self, timeout: float | None = None) -> None:
        """Return when the channel is there. By default it waits `RLINF_CONNECT_TIMEOUT` while it is not."""

    @abstractmethod
    def put(
        self, item: object, weight: float, key: str, *, wait: bool, timeout: float | None, detached: bool
    ) -> ChannelOperation[None]:
        """Issue a put; with `wait` it waits for room. `detached`: its caller goes on meanwhile."""

    @abstractmethod
    def get(
        self, key: str, batch_weight: float | None, *, wait: bool, timeout: float | None, detached: bool
    ) -> ChannelOperation[Any]:
        """Issue a get of one item, or of a batch of a weight."""

    @abstractmethod
    def ask(self, question: Query, key: str, timeout: float | None = None) -> Any:
        """Return the answer to a question."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Close the channel."""
