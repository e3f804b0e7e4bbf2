"""An engine that never stops: requests and new weights reach it while it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from recipes.language.answers.sequences import Sequence
from recipes.language.engines.engine import Engine
from recipes.language.prompts.prompt_messages import NewWeights
from recipes.language.weights.weight_transfer import WeightUpdate
from rlinf_core.worker.timer import timer

T = TypeVar("T", covariant=True)


class Arriving(Protocol[T]):
    """Something that is on its way to this process."""

    def done(self) -> bool: ...
    def wait(self) -> T: ...


class Orders(Protocol):
    """Messages to the engine: requests, `NewWeights`, and None at the end."""

    def poll(self) -> list[Any]: ...
    def wait(self) -> Any: ...


class Versioned(Protocol):
    """A request that weights of a version, or newer ones, may answer."""

    @property
    def version(self) -> int: ...


RequestT = TypeVar("RequestT", bound=Versioned)


class EngineStream(Generic[RequestT]):
    """Serves requests continuously, and loads new weights between two tokens, until the end.

    Weights travel while tokens are drawn. A request waits for the weights that it needs.

    Args:
        engine: the engine that draws.
        receive: begins to receive weights.
        load: loads them into the engine.
        collect: takes what the engine has drawn.
        partial: whether answers under way continue under new weights; else they are ended under the old ones first.
        version: the version of the engine's weights; -1: there are none yet.
    """

    def __init__(
        self,
        engine: Engine,
        receive: Callable[[], Arriving[WeightUpdate]],
        load: Callable[[WeightUpdate], None],
        collect: Callable[[Iterable[Sequence]], None],
        *,
        partial: bool,
        version: int = -1,
    ) -> None:
        self._engine = engine
        self._receive = receive
        self._load = load
        self._collect = collect
        self._partial = partial
        self._version = version
        self._announced = 0
        self._receiving: Arriving[WeightUpdate] | None = None

    def run(
        self,
        orders: Orders,
        take: Callable[[Any, list[RequestT]], Iterable[RequestT]],
        begin: Callable[[list[RequestT]], None],
    ) -> None:
        """Generate until None has arrived and all earlier requests are done.

        Args:
            orders: what is to be done.
            take: returns the requests in a message that is neither `NewWeights` nor None, given those that wait.
            begin: hands requests to the engine.
        """
        engine, waiting, ended = self._engine, list[RequestT](), False
        while not ended or self._weights_come or waiting or engine.unfinished:
            idle = not (ended or self._weights_come or engine.unfinished)
            for order in [orders.wait()] if idle else orders.poll():
                if order is None:
                    ended = True
                elif isinstance(order, NewWeights):
                    self._announced += 1
                else:
                    waiting += take(order, waiting)
            self._advance_weights()
            begin([order for order in waiting if order.version <= self._version])
            waiting = [order for order in waiting if order.version > self._version]
            if not engine.unfinished:
                self._collect(engine.step())
                continue
            with timer("engine/step", engine.unfinished):
                drawn = engine.step()
            self._collect(drawn)

    @property
    def _weights_come(self) -> bool:
        return bool(self._announced or self._receiving)

    def _advance_weights(self) -> None:
        """Receive the next weights, and load them when they have arrived; wait for them if nothing is to be sampled."""
        if self._announced and self._receiving is None:
            self._announced -= 1
            self._receiving = self._receive()
        if self._receiving is not None and (self._receiving.done() or not self._engine.unfinished):
            update = self._receiving.wait()
            self._collect(self._engine.pause("freeze" if self._partial else "drain"))
            self._load(update)
            self._engine.resume()
            self._version, self._receiving = update.version, None
