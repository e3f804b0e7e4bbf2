"""The interface of engines that sample from several snapshots of one model, and the built-in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from recipes.language.answers.sequences import Request, Sequence
from recipes.language.engines.engine import Engine
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.models.policy import plain_attention
from recipes.serve.adapters import ModelVariants, data_logprobs, load_base
from recipes.serve.config import ServeConfig
from recipes.serve.values import Datum, Drawing, FloatArray, TopTokens, read_adapter

# The steps of an engine before it is the next engine's turn.
_TURN = 8
# The log-probability that means "no token" to clients.
NO_LOGPROB = -99999.0


class Drawn(NamedTuple):
    """The outcome of some steps.

    Attributes:
        answers: the answers that ended.
        lost: the error of each request whose engine failed, by id; the engines have forgotten these requests.
    """

    answers: list[Sequence]
    lost: dict[str, Exception]


class SnapshotEngines(ABC):
    """Engines that sample from snapshots, given by folder; None is the base model."""

    def __init__(self) -> None:
        # Requests that have begun, by id.
        self._drawn: dict[str, Drawing] = {}

    @abstractmethod
    def has_room(self, snapshot: str | None) -> bool:
        """Return whether a request to a snapshot can begin now, or must wait until others have ended."""

    @abstractmethod
    def begin(self, drawing: Drawing, request: Request) -> None:
        """Begin a request.

        Raises:
            ValueError: the request is invalid.
            OSError, RLinfError: the snapshot cannot be read.
        """

    @abstractmethod
    def draw(self) -> Drawn:
        """Sample some tokens for each request.

        Raises:
            WorkerDiedError, torch.AcceleratorError: no further computation is possible.
        """

    @abstractmethod
    def prompt_logprobs(self, drawing: Drawing) -> FloatArray:
        """Return log-probabilities of a prompt's tokens, float32 [N]; NaN for the first and those not requested."""

    @abstractmethod
    def prompt_top(self, drawing: Drawing) -> TopTokens:
        """Return the most likely tokens at each position of a prompt; none for the first and those not requested."""

    @abstractmethod
    def answer_top(self, drawing: Drawing, answer: Sequence) -> TopTokens:
        """Return the most likely tokens at each position of an answer, at its sampling temperature."""

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that ended or was cancelled."""
        self._drawn.pop(request_id, None)


class TorchSnapshots(SnapshotEngines):
    """A built-in engine for each snapshot, all over one model whose adapters take turns.

    A snapshot of all weights is a separate model, of which `server.max_full_models` are kept.

    Args:
        config: the whole configuration.
        model: the served model.
        tokenizer: the tokenizer of the model.
    """

    def __init__(self, config: ServeConfig, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self._config = config
        self._tokenizer = tokenizer
        copy = partial(load_base, config, tokenizer, model.device)
        self._variants = ModelVariants(model, config.actor.lora_alpha, copy)
        # The engines by folder of the snapshot, least recently used first.
        self._engines: OrderedDict[str | None, Engine] = OrderedDict()
        # The loaded snapshots of all weights.
        self._full: set[str] = set()

    def has_room(self, snapshot: str | None) -> bool:
        if snapshot in self._engines:
            return True
        return len(self._busy(self._alike(snapshot))) < self._most(snapshot)

    def _is_full(self, snapshot: str | None) -> bool:
        """Return whether a snapshot is of all weights."""
        if snapshot is None or snapshot in self._engines:
            return snapshot in self._full
        try:
            return read_adapter(Path(snapshot)).rank == 0
        except OSError:
            return False  # loading it raises the error

    def _alike(self, snapshot: str | None) -> list[str | None]:
        """Return the loaded snapshots of the same kind as another, least recently used first."""
        full = self._is_full(snapshot)
        return [name for name in self._engines if (name in self._full) == full]

    def _most(self, snapshot: str | None) -> int:
        full = self._is_full(snapshot)
        return self._config.server.max_full_models if full else self._config.rollout.max_snapshots

    def _busy(self, snapshots: list[str | None]) -> list[str | None]:
        return [name for name in snapshots if self._engines[name].unfinished]

    def begin(self, drawing: Drawing, request: Request) -> None:
        if drawing.snapshot not in self._engines:
            self._load(drawing.snapshot)
        self._engines.move_to_end(drawing.snapshot)
        self._engines[drawing.snapshot].submit(request)
        self._drawn[drawing.request_id] = drawing

    def _load(self, snapshot: str | None) -> None:
        """Create the engine of a snapshot, after unloading idle ones if there are too many."""
        loaded, most = self._alike(snapshot), self._most(snapshot)
        idle = [name for name in loaded if not self._engines[name].unfinished]
        for name in idle[: max(0, len(loaded) + 1 - most)]:
            self._unload(name)
        try:
            if snapshot is not None and not self._variants.load(snapshot, Path(snapshot)).rank:
                self._full.add(snapshot)
            with self._variants.using(snapshot) as policy:
                self._engines[snapshot] = TorchEngine(
                    policy.causal,
                    decode=self._tokenizer.decode,
                    max_running_tokens=self._config.rollout.max_running_tokens,
                    max_sequence_tokens=self._config.server.context_length,
                )
        except Exception:
            self._unload(snapshot)
            raise

    def _unload(self, snapshot: str | None) -> None:
        """Unload a snapshot, with the unfinished requests of its engine."""
        self._engines.pop(snapshot, None)
        if snapshot is not None:
            self._full.discard(snapshot)
            if snapshot in self._variants:
                self._variants.remove(snapshot)

    def draw(self) -> Drawn:
        """See `SnapshotEngines`: an error ends only the engine of one snapshot."""
        drawn = Drawn([], {})
        for snapshot, engine in list(self._engines.items()):
            try:
                with self._variants.using(snapshot):
                    for _ in range(_TURN):
                        if not engine.unfinished:
                            break
                        drawn.answers.extend(engine.step())
            except torch.AcceleratorError:
                raise
            except Exception as error:  # noqa: BLE001 - other snapshots continue after any error
                self._unload(snapshot)
                drawn.lost.update({name: error for name, one in self._drawn.items() if one.snapshot == snapshot})
        for request_id in drawn.lost:
            self.forget(request_id)
        return drawn

    @torch.no_grad()
    def prompt_logprobs(self, drawing: Drawing) -> FloatArray:
        tokens = np.asarray(drawing.prompt, np.int64)
        scores = np.full(len(tokens), np.nan, np.float32)
        if len(tokens) > 1:
            with self._variants.using(drawing.snapshot) as policy:
                row = [Datum(tokens[:-1], {"target_tokens": tokens[1:]})]
                scores[1:] = data_logprobs(policy, row, policy.causal.device).cpu().numpy()
            scores[: max(0, len(tokens) - drawing.prompt_last)] = np.nan
        return scores

    def prompt_top(self, drawing: Drawing) -> TopTokens:
        length, k = len(drawing.prompt), drawing.prompt_top
        top = no_tokens(length, k)
        first = max(1, length - drawing.prompt_last)
        if first < length:
            top.ids[first:], top.logprobs[first:] = self._most_likely(drawing, drawing.prompt, first, k, 1.0)
        return top

    def answer_top(self, drawing: Drawing, answer: Sequence) -> TopTokens:
        tokens, temperature = (*drawing.prompt, *answer.tokens), drawing.temperature or 1.0
        return self._most_likely(drawing, tokens, len(drawing.prompt), drawing.answer_top, temperature)

    @torch.no_grad()
    def _most_likely(
        self, drawing: Drawing, tokens: tuple[int, ...], first: int, k: int, temperature: float
    ) -> TopTokens:
        """Return the k most likely tokens from place `first` on."""
        with self._variants.using(drawing.snapshot) as policy, plain_attention(policy.causal):
            model: Any = policy.causal
            read = torch.tensor(tokens[:-1], device=model.device)[None]
            logits = model(input_ids=read, logits_to_keep=len(tokens) - first).logits[0].float()
        values, ids = (logits / temperature).log_softmax(-1).topk(k)
        return TopTokens(ids.cpu().numpy().astype(np.int32), values.cpu().numpy())


def no_tokens(length: int, k: int) -> TopTokens:
    """Return `TopTokens` without tokens at any position."""
    return TopTokens(np.zeros((length, k), np.int32), np.full((length, k), NO_LOGPROB, np.float32))
