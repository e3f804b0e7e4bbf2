"""The interface of generation engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from recipes.language.answers.sequences import Request, Sequence

PauseMode = Literal["drain", "freeze", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The counters of an engine.

    Attributes:
        running: answers being generated.
        waiting: answers that wait for cache memory.
        reserved_tokens: cache tokens that running answers may need until they end.
        max_running_tokens: limit of `reserved_tokens`; 0: none.
        generated_tokens: tokens drawn since the start.
        prefilled_tokens: prompt tokens computed since the start; shared tokens count once.
        prompt_tokens: prompt tokens of all answers since the start.
        cache_bytes: memory of keys and values.
        version: the version of the weights.
    """

    running: int
    waiting: int
    reserved_tokens: int
    max_running_tokens: int
    generated_tokens: int
    prefilled_tokens: int
    prompt_tokens: int
    cache_bytes: int
    version: int


class ArrivingTensors(Iterable[tuple[str, Tensor]]):
    """Named tensors that arrive one by one, with shapes known in advance.

    Args:
        shapes: the shapes of all tensors, by name.
        tensors: names and values, to be iterated once.
        may_keep: whether the engine may keep the tensors, whose memory nobody else changes.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        tensors: Iterator[tuple[str, Tensor]],
        *,
        may_keep: bool = False,
    ) -> None:
        self.shapes = shapes
        self.may_keep = may_keep
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors


class Engine(ABC):
    """A generator of answers to prompts, driven by its caller in small steps.

    `step` or `pause` returns every submitted answer exactly once. Not thread-safe.

    Attributes:
        continues: whether `unfinished_answers` returns partial answers, and `Request.begun` resumes one.
    """

    continues: ClassVar[bool] = False

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Submit a request; later steps return its answers.

        Raises:
            ValueError: the prompt is empty or does not fit, or a sampling parameter cannot be obeyed.
        """

    @abstractmethod
    def step(self) -> list[Sequence]:
        """Run one step and return the answers that ended; none if there is nothing to do.

        An answer that the engine failed to generate has a `failure`.
        """

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt and its answer together; 0: unlimited."""
        return 0

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of answers that were not returned yet."""

    def unfinished_answers(self) -> list[Sequence]:
        """Return copies of all unfinished answers, which continue; empty if the engine cannot report them."""
        return []

    @abstractmethod
    def pause(self, mode: PauseMode) -> list[Sequence]:
        """Stop generating between two steps, and return the answers that ended through this.

        Args:
            mode: `drain` finishes running answers and starts no waiting ones; `freeze` keeps unfinished answers, which
                continue after `resume` under the weights of that time; `abort` returns all answers, running and
                waiting, unfinished.
        """

    @abstractmethod
    def resume(self) -> None:
        """Continue after `pause`."""

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """Replace weights between two steps, and return a checksum of the loaded weights.

        Args:
            tensors: names and values, as the trainer's `state_dict` has them; they may still be arriving.
            version: the version of these weights; tokens drawn from now on carry it.
            adapter_only: whether the tensors are those of a LoRA adapter alone.

        Raises:
            ValueError: the model lacks a name, or its shape differs.
        """

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Release memory: level 1, the KV cache; level 2, weights as well. Nothing may be running."""

    @abstractmethod
    def wake(self) -> None:
        """Reallocate the memory that `sleep` released; after level 2 the weights must be loaded again."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the current counters."""

    @abstractmethod
    def stop(self) -> None:
        """Shut down and release all resources. Idempotent."""

    def results(self) -> Iterator[Sequence]:
        """Yield answers as they end, until none is left."""
        while self.unfinished:
            yield from self.step()
