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
from recipes.language.models.plain_check import PLAIN, plain_attention
from recipes.serve.config import ServeConfig
from recipes.serve.values import Datum, Drawing, DrawnAnswer, FloatArray, SampleOutcome, ServedFacts, TopTokens
from recipes.serve.workers.adapter_actor import load_base, served_facts
from recipes.serve.workers.adapters import AdapterModel
from recipes.serve.workers.datum_packing import data_logprobs
from recipes.training.comparing_worker import ComparingWorker
from rlinf_core import RLinfError

# Tokens that an engine draws before the next one has its turn.
_TURN = 8
# The log-probability of a place without tokens, which clients know.
_NONE = -99999.0


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
        self._top: dict[str, TopTokens] = {}

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
            for kept in (self._drawings, self._answers, self._scored, self._top):
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
        if request.prompt_top:
            self._top[request.request_id] = self._prompt_top(request)
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
            DrawnAnswer(
                ended.tokens,
                ended.logprobs,
                "stop" if ended.finish_reason == "stop" else "length",
                self._answer_top(request, ended.tokens) if request.answer_top and not failure else None,
            )
            for ended in sorted(answers, key=lambda ended: ended.sample)
        ]
        scored, top = self._scored.pop(request_id, None), self._top.pop(request_id, None)
        return {request_id: SampleOutcome(drawn, scored, failure, top)}

    @torch.no_grad()
    def _score(self, request: Drawing) -> FloatArray:
        """Return log-probabilities of a prompt's tokens, float32 [N]; those of the first and the unasked are NaN."""
        tokens = np.asarray(request.prompt, np.int64)
        scores = np.full(len(tokens), np.nan, np.float32)
        if len(tokens) > 1:
            row = [Datum(tokens[:-1], {"target_tokens": tokens[1:]})]
            with self._adapters.using(request.snapshot):
                scores[1:] = data_logprobs(self._adapters.policy, row, self.torch_device).cpu().numpy()
            scores[: max(0, len(tokens) - request.prompt_last)] = np.nan
        return scores

    def _prompt_top(self, request: Drawing) -> TopTokens:
        """Return the most likely tokens at each place of a prompt; the first and the unasked have none."""
        length, k = len(request.prompt), request.prompt_top
        ids, logprobs = np.zeros((length, k), np.int32), np.full((length, k), _NONE, np.float32)
        first = max(1, length - request.prompt_last)
        if first < length:
            ids[first:], logprobs[first:] = self._most_likely(request, request.prompt, first, k, 1.0)
        return TopTokens(ids, logprobs)

    def _answer_top(self, request: Drawing, answer: tuple[int, ...]) -> TopTokens:
        """Return the most likely tokens at each place of an answer, at the temperature that it was drawn with."""
        tokens, temperature = (*request.prompt, *answer), request.temperature or 1.0
        return self._most_likely(request, tokens, len(request.prompt), request.answer_top, temperature)

    @torch.no_grad()
    def _most_likely(
        self, request: Drawing, tokens: tuple[int, ...], first: int, k: int, temperature: float
    ) -> TopTokens:
        """Return the k most likely tokens from place `first` on."""
        model: Any = self._adapters.model
        read = torch.tensor(tokens[:-1], device=self.torch_device)[None]
        with self._adapters.using(request.snapshot), plain_attention(model):
            logits = model(input_ids=read, logits_to_keep=len(tokens) - first).logits[0].float()
        values, ids = (logits / temperature).log_softmax(-1).topk(k)
        return TopTokens(ids.cpu().numpy().astype(np.int32), values.cpu().numpy())
