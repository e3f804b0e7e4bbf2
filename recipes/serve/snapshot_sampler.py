"""The workers that sample from several snapshots at the same time."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Final

import torch

from recipes.language.answers.sequences import Sequence
from recipes.language.engines.torch_engine import check_engine
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.models.policy import PLAIN
from recipes.serve.adapters import load_base, served_facts
from recipes.serve.config import ServeConfig
from recipes.serve.snapshot_engines import SnapshotEngines, TorchSnapshots
from recipes.serve.values import Drawing, DrawnAnswer, SampleOutcome, ServedFacts, request_of
from recipes.training.comparing_worker import ComparingWorker
from rlinf_core import RLinfError, WorkerDiedError

LOGGER: Final = logging.getLogger("rlinf")


class SnapshotSampler(ComparingWorker):
    """A worker that samples from several snapshots at a time with the engine of `rollout.backend`."""

    config_section = "rollout"

    def __init__(self, config: ServeConfig) -> None:
        super().__init__()
        self._config = config
        # Requests whose snapshots have no room yet.
        self._waiting: deque[Drawing] = deque()
        self._drawings: dict[str, Drawing] = {}
        # Requests that an error interrupted: each is repeated alone, so that it fails alone.
        self._suspects: set[str] = set()
        self._answers: dict[str, list[Sequence]] = {}

    def init_worker(self) -> ServedFacts:
        """Load or build the model.

        Raises:
            ConfigError: the model cannot be loaded, or the engine's log-probabilities differ from transformers'.
        """
        config = self._config
        torch.set_num_threads(config.rollout.threads)
        tokenizer = make_tokenizer(config.actor)
        stops = stop_token_ids(tokenizer, config.actor.model.model_path)
        if config.rollout.backend == "vllm":
            from recipes.serve.vllm_snapshots import make_vllm_snapshots

            owner = str(self.worker_info.address)
            made, vocabulary = make_vllm_snapshots(config, tokenizer, self.torch_device, owner)
            self._engines: SnapshotEngines = made
            return ServedFacts(vocabulary, stops, made.adapts_output)
        model = load_base(config, tokenizer, self.torch_device)
        self._contact.compare(
            f"greedy answers of `{type(model).__name__}` by the engine `torch`", PLAIN, lambda: check_engine(model)
        )
        self._engines = TorchSnapshots(config, model, tokenizer)
        return served_facts(model, stops)

    def advance(self, requests: list[Drawing], cancelled: list[str], seconds: float) -> dict[str, SampleOutcome]:
        """Take requests, and sample until any request is done or the time is over.

        Args:
            requests: the new requests.
            cancelled: the ids of cancelled requests.
            seconds: the maximum time in seconds.

        Returns:
            The outcomes of the finished requests, by id.

        Raises:
            WorkerDiedError: the state of this worker cannot be trusted after an error.
        """
        try:
            return self._advance(requests, cancelled, seconds)
        except WorkerDiedError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {_first_line(error)}"
            raise WorkerDiedError(str(self.worker_info.address), cause=cause) from error

    def _advance(self, requests: list[Drawing], cancelled: list[str], seconds: float) -> dict[str, SampleOutcome]:
        done: dict[str, SampleOutcome] = {}
        self._waiting += requests
        for request_id in cancelled:
            self._forget(request_id)
        self._waiting = deque(drawing for drawing in self._waiting if drawing.request_id not in cancelled)
        ends = time.monotonic() + seconds
        while not done and (self._waiting or self._drawings):
            done |= self._begin()
            drawn = self._engines.draw()
            for answer in drawn.answers:
                done |= self._ended(answer)
            for request_id, error in drawn.lost.items():
                done |= self._interrupted(request_id, error)
            if time.monotonic() >= ends:
                break
        return done

    def _begin(self) -> dict[str, SampleOutcome]:
        """Begin waiting requests in order while there is room, and return the outcomes of those that fail."""
        failed: dict[str, SampleOutcome] = {}
        while self._waiting and self._may_begin(self._waiting[0]):
            drawing = self._waiting.popleft()
            try:
                self._engines.begin(drawing, request_of(drawing))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # noqa: BLE001 - such as a lack of memory for the snapshot
                refused = isinstance(error, ValueError | OSError | RLinfError)
                failed[drawing.request_id] = SampleOutcome([], failure=str(error)) if refused else _failed(error)
                self._forget(drawing.request_id)
                continue
            self._drawings[drawing.request_id] = drawing
            self._answers[drawing.request_id] = []
        return failed

    def _may_begin(self, drawing: Drawing) -> bool:
        """Return whether a request may begin; an interrupted request runs alone."""
        if drawing.request_id in self._suspects and self._drawings:
            return False
        return self._suspects.isdisjoint(self._drawings) and self._engines.has_room(drawing.snapshot)

    def _interrupted(self, request_id: str, error: Exception) -> dict[str, SampleOutcome]:
        """Repeat an interrupted request alone, or fail it if it already ran alone; its tokens are the same."""
        drawing, was_alone = self._drawings.get(request_id), request_id in self._suspects
        self._forget(request_id)
        if drawing is None:
            return {}  # done, or cancelled
        LOGGER.warning("a request was interrupted: %s: %s", type(error).__name__, _first_line(error))
        if was_alone:
            return {request_id: _failed(error)}
        self._suspects.add(request_id)
        self._waiting.appendleft(drawing)
        return {}

    def _forget(self, request_id: str) -> None:
        """Drop the data of a request."""
        self._drawings.pop(request_id, None)
        self._answers.pop(request_id, None)
        self._suspects.discard(request_id)
        self._engines.forget(request_id)

    def _ended(self, answer: Sequence) -> dict[str, SampleOutcome]:
        request_id = answer.request_id
        drawing = self._drawings.get(request_id)
        if drawing is None:
            return {}  # cancelled
        answers = self._answers[request_id]
        answers.append(answer)
        if len(answers) < drawing.samples:
            return {}
        failure = next((ended.failure for ended in answers if ended.failed), "")
        try:
            outcome = SampleOutcome([], failure=failure) if failure else self._outcome(drawing, answers)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - raised by the extras of this request
            outcome = _failed(error)
        self._forget(request_id)
        return {request_id: outcome}

    def _outcome(self, drawing: Drawing, answers: list[Sequence]) -> SampleOutcome:
        drawn = [
            DrawnAnswer(
                ended.tokens,
                ended.logprobs,
                "stop" if ended.finish_reason == "stop" else "length",
                self._engines.answer_top(drawing, ended) if drawing.answer_top else None,
            )
            for ended in sorted(answers, key=lambda ended: ended.sample)
        ]
        scored = self._engines.prompt_logprobs(drawing) if drawing.prompt_logprobs else None
        top = self._engines.prompt_top(drawing) if drawing.prompt_top else None
        return SampleOutcome(drawn, scored, "", top)


def _failed(error: Exception) -> SampleOutcome:
    """Return the outcome of a request that failed with an unexpected error."""
    return SampleOutcome([], failure=f"the engine failed: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
