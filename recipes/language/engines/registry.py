"""Construction of the engine that `rollout.backend` names, and the stand-in of a rehearsal.

A stand-in samples nothing: its answers are as long as a run recorded. `pacing` gives its steps their duration, as for
all timed calls in a rehearsal.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.sequences import FinishReason, Request
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.rollout_config import BACKENDS
from recipes.language.engines.engine import Answer as QueuedAnswer
from recipes.language.engines.engine import ArrivingTensors, Engine, PauseMode, QueuedEngine, RequestQueue
from recipes.language.models.fingerprint import Fingerprint
from recipes.language.models.load_model import make_model
from recipes.training.typed_tensors import DTYPES
from rlinf_core.process import pacing
from rlinf_core.runners.storage.first_contact import FirstContact
from rlinf_core.worker.timer import timer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_engine(
    config: LanguageConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
    device: torch.device,
    contact: FirstContact | None = None,
    owner: str = "rollout",
) -> Engine:
    """Return the engine that `rollout.backend` names, with its model; in a rehearsal, a stand-in.

    Args:
        config: the whole configuration.
        tokenizer: the tokenizer of the model.
        stop_token_ids: tokens that end every answer.
        device: the device of the model.
        contact: the start-up checks to which the engine's check is added.
        owner: the worker that owns the engine, for errors.

    Raises:
        ConfigError: the engine's package is missing, the model cannot be loaded, or the server does not answer.
    """
    if pacing.active is not None:
        return StandInEngine()
    name = BACKENDS[config.rollout.backend].name
    rollout, lora = config.rollout, config.actor.model.adapter()
    # Use float32 on a CPU, where half precision is slower.
    dtype = DTYPES[config.actor.model.precision] if device.type != "cpu" else torch.float32
    common: dict[str, Any] = {
        "stop_token_ids": stop_token_ids,
        "decode": tokenizer.decode,
        "max_running_tokens": rollout.max_running_tokens,
        "max_sequence_tokens": config.runner.seq_length,
        "adapter_scale": lora.alpha / lora.rank if lora else 1.0,
    }
    if name == "torch":
        from recipes.language.engines.torch_engine import TorchEngine, check_engine
        from recipes.language.models.policy import PLAIN

        model = make_model(config.actor, tokenizer, dtype)
        model.to(device)  # pyright: ignore[reportArgumentType] - a decorator of transformers hides the method
        what = f"greedy answers of `{type(model).__name__}` by the engine `torch`"
        (contact or FirstContact()).compare(what, PLAIN, lambda: check_engine(model))
        return TorchEngine(model, **common)
    folder = config.actor.model.model_path
    if folder is None:
        return _with_built_model(config, tokenizer, dtype, common, owner)
    return _of_folder(config, folder, dtype, common, owner)


def _of_folder(config: LanguageConfig, folder: str, dtype: torch.dtype, common: dict[str, Any], owner: str) -> Engine:
    """Return an external engine with the model of a folder."""
    rollout = config.rollout
    if BACKENDS[rollout.backend].name == "server":
        from recipes.language.engines.server_engine import ServerEngine

        return ServerEngine(rollout.server, folder, dtype=dtype, **common)
    shared: dict[str, Any] = {
        **common,
        "dtype": dtype,
        "temperature": rollout.sampling_params.temperature,
        **dict(rollout.vllm),
        "options": rollout.arguments,
    }
    from recipes.language.engines.vllm_engine import VllmEngine

    if rollout.enable_offload:
        shared["options"] = {"enable_sleep_mode": True, **rollout.arguments}
    lora = config.actor.model.adapter()
    return VllmEngine(folder, owner=owner, adapter_rank=lora.rank if lora else 0, **shared)


def _with_built_model(
    config: LanguageConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, common: dict[str, Any], owner: str
) -> Engine:
    """Return an external engine with a tiny random model, in a folder that is deleted with the engine."""
    folder = tempfile.mkdtemp(prefix="rlinf-model-")
    try:
        make_model(config.actor, tokenizer, dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = _of_folder(config, folder, dtype, common, owner)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
    return engine


# The recorded phase of answer lengths, and that of engine steps, which callers of `step` time.
_ANSWER: Final = "answer"
_STEP: Final = "engine/step"


class _Row(NamedTuple):
    """A running answer: its final length, and the versions of its tokens so far."""

    answer: QueuedAnswer
    length: int
    versions: list[int]

    def drawn(self, reason: FinishReason = "length") -> Answer:
        """Return the answer in the form that callers get."""
        count = len(self.versions)
        tokens = tuple(islice(cycle(self.answer.request.prompt), count))
        return self.answer.sequence(tokens, (-1.0,) * count, tuple(self.versions), reason)


class StandInEngine(QueuedEngine):
    """An engine whose answers repeat their prompts and are as long as recorded.

    Args:
        whole: whether every answer has `max_new_tokens`, so that the caller chooses its length.
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__(RequestQueue(stops_at_texts=True), 0)
        self._whole = whole
        self._rows: list[_Row] = []
        self._weights: dict[str, Tensor] = {}

    @property
    def _in_flight(self) -> int:
        return len(self._rows)

    @property
    def _reserved(self) -> int:
        return 0

    def submit(self, request: Request) -> None:
        super().submit(request)
        most = request.params.max_new_tokens
        while self._queue:
            answer = self._queue.pop()
            seed = f"{request.request_id}:{request.params.seed}:{answer.sample}"
            self._rows.append(_Row(answer, most if self._whole else _drawn(seed, most), []))

    def step(self) -> list[Answer]:
        if self._paused:
            return []
        self._generated += len(self._rows)
        for row in self._rows:
            row.versions.append(self._version)
        ended = [row.drawn() for row in self._rows if len(row.versions) >= row.length]
        self._rows = [row for row in self._rows if len(row.versions) < row.length]
        return ended

    def pause(self, mode: PauseMode) -> list[Answer]:
        done: list[Answer] = []
        while mode == "drain" and self._rows:
            with timer(_STEP, len(self._rows)):
                done += self.step()
        if mode == "abort":
            done, self._rows = [row.drawn("aborted") for row in self._rows], []
        self._paused = True
        return done

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`: accept any weights, and read them as an engine does."""
        digest = Fingerprint()
        keeps = isinstance(tensors, ArrivingTensors) and tensors.may_keep
        for name, value in tensors:
            own = self._weights.get(name)
            if keeps or own is None:
                own = self._weights[name] = value if keeps else torch.empty_like(value)
            if own is not value:
                own.copy_(value)
            digest.add(name, own)
        self._version = version
        return digest.text()

    def sleep(self, level: int = 1) -> None:
        if level > 1:
            self._weights.clear()

    def wake(self) -> None:
        """See `Engine`."""

    def stop(self) -> None:
        self._rows.clear()
        self._weights.clear()


def _drawn(seed: str, most: int) -> int:
    sizes = pacing.recorded(_ANSWER)
    if not sizes:
        return most
    lengths, numbers = zip(*sizes, strict=True)
    (length,) = random.Random(seed).choices(lengths, numbers)
    return max(1, min(most, round(length)))
