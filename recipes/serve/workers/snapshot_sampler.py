"""The workers that sample: an engine for each snapshot, all over one model whose adapters take turns."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.engines.engine import Engine
from recipes.language.engines.own.engine_check import check_engine
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.models.plain_check import PLAIN
from recipes.serve.config import ServeConfig
from recipes.serve.values import Datum, Drawing, DrawnAnswer, FloatArray, SampleOutcome, ServedFacts
from recipes.serve.workers.adapter_actor import load_base, served_facts
from recipes.serve.workers.adapters import AdapterModel
from recipes.serve.workers.datum_packing import pack_data
from recipes.training.comparing_worker import ComparingWorker
from rlinf_core import RLinfError

# Tokens that an engine draws before the next one has its turn.
_TURN = 8


class SnapshotSampler(ComparingWorker):
    """Samples from snapshots, several at a time, each with its own adapter."""

    config_section = "rollout"

    def __init__(self, config: ServeConfig) -> None:
        super().__init__()
        self._config = config
        # By the folder of the snapshot, least recently used first.
        self._engines: OrderedDict[str | None, Engine] = OrderedDict()
        self._drawings: dict[str, Drawing] = {}
        self._answers: dict[str, list[Sequence]] = {}
        self._scored: dict[str, FloatArray] = {}

    def init_worker(self) -> ServedFacts:
        """Load or build the model.

        Raises:
            ConfigError: the model cannot be loaded, or the engine computes otherwise than transformers.
        """
        config = self._config
        torch.set_num_threads(config.rollout.threads)
        self._tokenizer: Any = make_tokenizer(config.actor)
        model = load_base(config, self._tokenizer, self.torch_device)
        self._contact.compare(
            f"greedy answers of `{type(model).__name__}` by the engine `torch`", PLAIN, lambda: check_engine(model)
        )
        self._adapters = AdapterModel(model, config.actor.lora_alpha)
        return served_facts(model, stop_token_ids(self._tokenizer, config.actor.model.model_path))

    def advance(self, requests: list[Drawing], cancelled: list[str], seconds: float) -> dict[str, SampleOutcome]:
        """Take requests, and draw until one of all is done or some time is over.

        Args:
            requests: new ones.
            cancelled: ids of requests whose answers nobody waits for.
            seconds: longest time.

        Returns:
            The requests that are done, by id.
        """
        done: dict[str, SampleOutcome] = {}
        for request in requests:
            try:
                self._take(request)
            except (ValueError, OSError, RLinfError) as error:
                done[request.request_id] = SampleOutcome([], failure=str(error))
        for request_id in cancelled:
            for kept in (self._drawings, self._answers, self._scored):
                kept.pop(request_id, None)
        ends = time.monotonic() + seconds
        while not done and self._drawings:
            done |= self._turns()
            if time.monotonic() >= ends:
                break
        return done

    def _take(self, request: Drawing) -> None:
        """Begin a request."""
        if request.snapshot not in self._engines:
            self._load(request.snapshot)
        engine = self._engines[request.snapshot]
        self._engines.move_to_end(request.snapshot)
        if request.prompt_logprobs:
            self._scored[request.request_id] = self._score(request)
        params = SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            max_new_tokens=request.max_tokens,
            stop_token_ids=request.stop_tokens,
            stop=request.stop_texts,
            seed=request.seed,
        )
        engine.submit(
            Request(request_id=request.request_id, prompt=request.prompt, params=params, group_size=request.samples)
        )
        self._drawings[request.request_id] = request
        self._answers[request.request_id] = []

    def _load(self, snapshot: str | None) -> None:
        """Make the engine of a snapshot, in the place of one that is idle where there are too many."""
        idle = [name for name, engine in self._engines.items() if not engine.unfinished]
        for name in idle[: max(0, len(self._engines) + 1 - self._config.rollout.max_snapshots)]:
            self._engines.pop(name).stop()
            if name is not None:
                self._adapters.remove(name)
        if snapshot is not None:
            self._adapters.load(snapshot, Path(snapshot))
        with self._adapters.using(snapshot):
            self._engines[snapshot] = TorchEngine(
                self._adapters.model,
                decode=self._tokenizer.decode,
                max_running_tokens=self._config.rollout.max_running_tokens,
                max_sequence_tokens=self._config.server.context_length,
            )

    def _turns(self) -> dict[str, SampleOutcome]:
        """Draw some tokens with each engine that has something to draw, and return the requests that this ends."""
        done: dict[str, SampleOutcome] = {}
        for snapshot, engine in list(self._engines.items()):
            with self._adapters.using(snapshot):
                for _ in range(_TURN):
                    if not engine.unfinished:
                        break
                    for answer in engine.step():
                        done |= self._ended(answer)
        return done

    def _ended(self, answer: Sequence) -> dict[str, SampleOutcome]:
        request_id = answer.request_id
        request = self._drawings.get(request_id)
        if request is None:
            return {}  # cancelled
        answers = self._answers[request_id]
        answers.append(answer)
        if len(answers) < request.samples:
            return {}
        del self._drawings[request_id], self._answers[request_id]
        failure = next((ended.failure for ended in answers if ended.failed), "")
        drawn = [
            DrawnAnswer(ended.tokens, ended.logprobs, "stop" if ended.finish_reason == "stop" else "length")
            for ended in sorted(answers, key=lambda ended: ended.sample)
        ]
        return {request_id: SampleOutcome(drawn, self._scored.pop(request_id, None), failure)}

    @torch.no_grad()
    def _score(self, request: Drawing) -> FloatArray:
        """Return log-probabilities of a prompt's tokens, float32 [N]; that of the first is NaN."""
        tokens = np.asarray(request.prompt, np.int64)
        scores = np.full(len(tokens), np.nan, np.float32)
        if len(tokens) > 1:
            row = pack_data([Datum(tokens[:-1], {"target_tokens": tokens[1:]})], self.torch_device)
            with self._adapters.using(request.snapshot):
                scores[1:] = self._adapters.policy(row).logprobs.cpu().numpy()
        return scores
