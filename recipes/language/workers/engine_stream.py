"""The loop of a worker with an engine, which receives requests and weights while it samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from recipes.language.answers.sequences import Sequence
from recipes.language.engines.engine import Engine
from recipes.language.loop.order_inbox import Inbox
from recipes.language.prompts.prompt_messages import NewWeights
from recipes.language.weights.weight_transfer import IncomingWeights, WeightUpdate
from rlinf_core.worker.timer import timer


class EngineStream:
    """A loop that serves requests and loads new weights between two tokens.

    Weights arrive while tokens are sampled. A request waits for the weights that it needs.

    Args:
        engine: the engine.
        begin: submits requests to the engine.
        collect: receives finished answers.
        receive: starts receiving weights; None: weights never change, and serve all requests.
        load: loads weights into the engine.
        partial: whether unfinished answers continue under new weights, or are finished under the old weights first.
        version: the version of the engine's weights; -1: none yet.

    Attributes:
        seconds: the seconds of the engine's work.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[list[Any]], object],
        collect: Callable[[Iterable[Sequence]], object],
        receive: Callable[[], IncomingWeights] | None = None,
        load: Callable[[WeightUpdate], None] = lambda update: None,
        *,
        partial: bool = True,
        version: int = -1,
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._collect = collect
        self._receive = receive
        self._load = load
        self._partial = partial
        self._version = version
        self._announced = 0
        self._receiving: IncomingWeights | None = None
        self.seconds = 0.0

    def run(
        self, orders: Inbox, take: Callable[[Any, list[Any]], Iterable[Any]] = lambda order, waiting: order
    ) -> None:
        """Generate until None has arrived and all earlier requests are done.

        Args:
            orders: the inbox of requests, `NewWeights`, and None at the end.
            take: returns the requests in a message that is neither `NewWeights` nor None, given the waiting ones.
        """
        engine, waiting, ended = self._engine, list[Any](), False
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
            self._begin([one for one in waiting if self._is_ready(one)])
            waiting = [one for one in waiting if not self._is_ready(one)]
            began = time.perf_counter()
            with timer("engine/step", engine.unfinished) if engine.unfinished else nullcontext():
                drawn = engine.step()
            self._collect(drawn)
            self.seconds += time.perf_counter() - began

    def _is_ready(self, request: Any) -> bool:
        return self._receive is None or request.version <= self._version

    @property
    def _weights_come(self) -> bool:
        return bool(self._announced or self._receiving)

    def _advance_weights(self) -> None:
        """Receive the next weights, and load them when they have arrived; wait for them if the engine is idle."""
        if self._receive is not None and self._announced and self._receiving is None:
            self._announced -= 1
            self._receiving = self._receive()
        if self._receiving is not None and (self._receiving.done() or not self._engine.unfinished):
            update = self._receiving.wait()
            self._collect(self._engine.pause("freeze" if self._partial else "drain"))
            self._load(update)
            self._engine.resume()
            self._version, self._receiving = update.version, None
