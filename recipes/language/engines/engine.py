"""The interface of generation engines, and the base of those with a queue of waiting answers."""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from torch import Tensor

from recipes.language.answers.sequences import FinishReason, Request, Sequence
from rlinf_core import RLinfError

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

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> ArrivingTensors:
        """Return named tensors unchanged if they arrive with their shapes, else after collecting them all."""
        if isinstance(tensors, cls):
            return tensors
        named = dict(tensors)
        return cls({name: tuple(tensor.shape) for name, tensor in named.items()}, iter(named.items()))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors


class EngineAnswerError(RLinfError):
    """An engine's answer that cannot be trained on; `help` is set if a setting is wrong."""


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


# The failure of an answer whose next token has no finite probability.
NOT_FINITE: Final = "the model's weights or the temperature give probabilities that are not finite numbers"
# The decoded text of an incomplete UTF-8 character.
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One requested answer.

    Attributes:
        request: the request of the answer.
        sample: the answer's number within the group.
        since: the time of the request's acceptance, by the monotonic clock, in seconds.
        number: the number of the answer, in the order of requests.
    """

    request: Request
    sample: int
    since: float
    number: int

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of prompt and answer."""
        return len(self.request.prompt) + self.request.params.max_new_tokens

    def unbegun(self) -> Sequence:
        """Return the unfinished answer with the tokens of its request alone."""
        begun = self.request.begun
        return self.sequence(begun.tokens, begun.logprobs, begun.versions)

    def sequence(
        self,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        versions: tuple[int, ...] = (),
        finish_reason: FinishReason = "aborted",
        failure: str = "",
    ) -> Sequence:
        """Return the answer in the form that callers get."""
        return Sequence(
            request_id=self.request.request_id,
            sample=self.sample,
            prompt=self.request.prompt,
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            finish_reason=finish_reason,
            seconds=time.monotonic() - self.since,
            metadata=self.request.metadata,
            failure=failure,
        )


class RequestQueue:
    """A queue of waiting answers: smaller `priority` first, then in the order of requests.

    Args:
        max_sequence_tokens: the maximum length of prompt and answer together; 0: no limit.
        max_running_tokens: the maximum prompt and answer tokens of all running answers; 0: no limit.
        stops_at_texts: whether the engine supports `SamplingParams.stop`.
        logprobs: the stage of the engine's log-probabilities: after temperature alone (`exact`), the model's (`raw`),
            or after temperature and truncation (`processed`).
    """

    def __init__(
        self,
        *,
        max_sequence_tokens: int = 0,
        max_running_tokens: int = 0,
        stops_at_texts: bool,
        logprobs: Literal["exact", "raw", "processed"] = "exact",
    ) -> None:
        self._longest = max_sequence_tokens
        self._limit = max_running_tokens
        self._stops_at_texts = stops_at_texts
        self._logprobs = logprobs
        self._heap: list[tuple[int, int, Answer]] = []
        self._numbers = itertools.count()
        self._prompts: Counter[tuple[int, ...]] = Counter()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Answer]:
        """Yield the answers in no particular order."""
        return (answer for _, _, answer in self._heap)

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt and its answer together; 0: no limit."""
        return min(filter(None, (self._longest, self._limit)), default=0)

    def add(self, request: Request) -> None:
        """Append the answers of a request.

        Raises:
            ValueError: the prompt is empty or does not fit, `group_size` is below 1, stop texts are not supported, or
                the log-probabilities would not be those that `Sequence` defines.
        """
        params, prompt = request.params, request.prompt
        needed = len(prompt) + params.max_new_tokens
        if not prompt or request.group_size < 1:
            raise ValueError(f"request `{request.request_id}` has an empty prompt, or asks for no answers")
        if self._longest and needed > self._longest:
            raise ValueError(
                f"request `{request.request_id}`: {len(prompt)} prompt tokens and {params.max_new_tokens} new ones"
                f" exceed the model's limit of {self._longest}"
            )
        if self._limit and needed > self._limit:
            raise ValueError(
                f"request `{request.request_id}` may need {needed} tokens, but `max_running_tokens` is {self._limit}"
            )
        if params.stop and not self._stops_at_texts:
            raise ValueError("an engine without a tokenizer cannot stop at texts; use `stop_token_ids`")
        cut = params.top_k != -1 or params.top_p < 1 or params.min_new_tokens > 0
        unlike = {"exact": False, "raw": params.temperature != 1, "processed": cut}[self._logprobs]
        if params.temperature and unlike:
            names = "a temperature other than 1" if self._logprobs == "raw" else "`top_k`, `top_p` or `min_new_tokens`"
            raise ValueError(
                f"request `{request.request_id}`: with {names}, this engine's log-probabilities ({self._logprobs})"
                " differ from those that training needs"
            )
        if len(request.begun.tokens) >= params.max_new_tokens:
            raise ValueError(
                f"request `{request.request_id}` continues after {len(request.begun.tokens)} tokens, but its limit is"
                f" {params.max_new_tokens}"
            )
        now = time.monotonic()
        for index in range(request.group_size):
            self.put_back(Answer(request, request.sample_offset + index, now, next(self._numbers)))

    def put_back(self, answer: Answer) -> None:
        """Put an answer into its place in the order."""
        heapq.heappush(self._heap, (answer.request.priority, answer.number, answer))
        self._prompts[answer.request.prompt] += 1

    def waiting_for(self, prompt: tuple[int, ...]) -> int:
        """Return the number of waiting answers to a prompt."""
        return self._prompts[prompt]

    def first(self) -> Answer:
        """Return the next answer of a queue that is not empty."""
        return self._heap[0][2]

    def pop(self) -> Answer:
        """Take the next answer of a queue that is not empty."""
        answer = heapq.heappop(self._heap)[2]
        prompt = answer.request.prompt
        self._prompts[prompt] -= 1
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        return answer

    def admit(self, reserved: int) -> Iterator[Answer]:
        """Pop and yield answers that fit beside `reserved` tokens."""
        while self._heap and (not self._limit or reserved + self.first().most_tokens <= self._limit):
            reserved += self.first().most_tokens
            yield self.pop()

    def drop(self, request_id: str) -> None:
        """Discard the waiting answers of a request."""
        kept = [entry for entry in self._heap if entry[2].request.request_id != request_id]
        if len(kept) < len(self._heap):
            self._heap = kept
            heapq.heapify(self._heap)
            self._prompts = Counter(answer.request.prompt for _, _, answer in kept)

    def abort(self) -> list[Sequence]:
        """Take all answers in order, and return them unfinished."""
        ordered = [answer for _, _, answer in sorted(self._heap, key=lambda entry: entry[:2])]
        self._heap.clear()
        self._prompts.clear()
        return [answer.unbegun() for answer in ordered]

    def waiting(self) -> list[Sequence]:
        """Return unfinished copies of all waiting answers."""
        return [answer.unbegun() for _, _, answer in self._heap]


class QueuedEngine(Engine):
    """An engine that takes answers from a queue and counts tokens.

    Args:
        queue: the queue of waiting answers.
        max_running_tokens: see `EngineStats`.
    """

    def __init__(self, queue: RequestQueue, max_running_tokens: int) -> None:
        self._queue = queue
        self._limit = max_running_tokens
        self._paused = False
        self._version = self._generated = self._prefilled = self._prompted = 0

    @property
    @abstractmethod
    def _in_flight(self) -> int:
        """Number of answers being generated."""

    @property
    @abstractmethod
    def _reserved(self) -> int:
        """Maximum tokens of the answers being generated."""

    def _cached_bytes(self) -> int:
        """Return the memory of the KV cache, in bytes."""
        return 0

    def submit(self, request: Request) -> None:
        self._queue.add(request)

    @property
    def longest(self) -> int:
        return self._queue.longest

    @property
    def unfinished(self) -> int:
        return len(self._queue) + self._in_flight

    def resume(self) -> None:
        self._paused = False

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._in_flight,
            waiting=len(self._queue),
            reserved_tokens=self._reserved,
            max_running_tokens=self._limit,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            prompt_tokens=self._prompted,
            cache_bytes=self._cached_bytes(),
            version=self._version,
        )


class StopTexts:
    """A detector of stop texts at the end of an answer.

    Args:
        decode: returns the text of token ids.
    """

    def __init__(self, decode: Callable[[SequenceABC[int]], str]) -> None:
        self._decode = decode
        self._single: dict[int, str] = {}

    def may_end(self, token: int, stop: SequenceABC[str]) -> bool:
        """Return whether a token may complete a stop text; a cheap check with false positives."""
        text = self._single.get(token)
        if text is None:
            text = self._single[token] = self._decode([token])
        # A tokenizer may drop the space before a single token.
        return _INCOMPLETE in text or any(ending[-1] in text or ending[-1] == " " for ending in stop)

    def ended(self, tokens: SequenceABC[int], stop: SequenceABC[str]) -> bool:
        """Return whether the last token of an answer completes a stop text."""
        if not self.may_end(tokens[-1], stop):
            return False
        # A stop text spans at most this many tokens, each of at least one byte.
        reach = 4 * max(len(text) for text in stop) + 4
        tail = list(tokens[-reach:])
        now, before = self._decode(tail), self._decode(tail[:-1])
        return any(now.count(text) > before.count(text) for text in stop)
