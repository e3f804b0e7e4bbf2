"""vLLM as the engine of several snapshots, with one adapter per request."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from recipes.language.answers.sequences import Request, Sequence
from recipes.language.engines.engine import Answer
from recipes.language.engines.engine_weights import ModelFolder, reserved_rank
from recipes.language.engines.vllm_engine import VllmEngine
from recipes.language.models.load_model import make_model
from recipes.sections.model_folders import ADAPTED
from recipes.serve.adapters import WEIGHTS, served_dtype
from recipes.serve.config import MOST_LIKELY, ServeConfig
from recipes.serve.snapshot_engines import Drawn, SnapshotEngines, no_tokens
from recipes.serve.values import Drawing, FloatArray, TopTokens, read_adapter
from recipes.training.tensor_files import write_tensors
from rlinf_core import WorkerDiedError

# The maximum adapters in one step of vLLM; requests to others wait for the next step.
_AT_ONCE: Final = 4
# The maximum adapters whose numbers are remembered.
_KNOWN: Final = 1024
# vLLM's output at a position: log-probabilities by token, including the token itself.
_Place = Mapping[int, Any]


class AdaptersEngine(VllmEngine):
    """vLLM with an adapter for each request, and log-probabilities of prompts and of the most likely tokens.

    Attributes:
        prompts: vLLM's output at each position of a prompt, by request.
        places: vLLM's output at each position of an answer, by request and number of the answer.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.prompts: dict[str, list[_Place | None]] = {}
        self.places: dict[tuple[str, int], list[_Place]] = {}
        # vLLM's numbers of adapters, by folder.
        self._numbers: dict[str, int] = {}
        self._counter = itertools.count(1)

    def forget(self, request_id: str, samples: int) -> None:
        """Drop the data of a request, and abort its running answers."""
        self.prompts.pop(request_id, None)
        for sample in range(samples):
            self.places.pop((request_id, sample), None)
        self._queue.drop(request_id)
        running = [name for name, one in self._running.items() if one.answer.request.request_id == request_id]
        if running:
            self._llm.llm_engine.abort_request(running)
        for name in running:
            del self._running[name]

    def check(self, request: Request) -> None:
        """Check that vLLM accepts the parameters and the adapter of a request, as a refusal in a step would fail all.

        Raises:
            ValueError: vLLM does not accept them.
        """
        self._params(request, 0)
        adapter = self._lora_request(request)
        if adapter is not None and not self._llm.llm_engine.add_lora(adapter):
            raise ValueError("vLLM did not load the LoRA adapter")

    def adapts_output(self, width: int, vocabulary: int) -> bool:
        """Return whether vLLM supports adapters of the output layer, which depends on its model class.

        Args:
            width: the width of the model.
            vocabulary: the number of token ids.
        """
        layer = "base_model.model.lm_head.lora"
        weights = {f"{layer}_A.weight": torch.zeros(1, width), f"{layer}_B.weight": torch.zeros(vocabulary, 1)}
        settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["lm_head"], "bias": "none"}
        with tempfile.TemporaryDirectory(prefix="rlinf-adapter-") as folder:
            write_tensors(Path(folder) / WEIGHTS, weights)
            (Path(folder) / ADAPTED).write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
            try:
                taken = self._llm.llm_engine.add_lora(self._reference(folder))
            except (ValueError, AssertionError):
                return False
        self._llm.llm_engine.remove_lora(self._numbers[folder])
        return bool(taken)

    def _reference(self, snapshot: str) -> Any:
        if snapshot not in self._numbers:
            self._numbers[snapshot] = next(self._counter)
            # A forgotten adapter that returns is read again, under another number.
            while len(self._numbers) > _KNOWN:
                self._numbers.pop(next(iter(self._numbers)))
        number = self._numbers[snapshot]
        # The name is part of the keys of vLLM's prefix cache, so it must be unique.
        return importlib.import_module("vllm.lora.request").LoRARequest(str(number), number, snapshot)

    def _lora_request(self, request: Request) -> Any:
        snapshot = _drawing(request).snapshot
        return None if snapshot is None else self._reference(snapshot)

    def _further_params(self, request: Request, sample: int) -> dict[str, Any]:
        """See `VllmEngine`: only the request's tokens end an answer."""
        drawing = _drawing(request)
        params: dict[str, Any] = {"logprobs": drawing.answer_top, "ignore_eos": True}
        if sample == 0 and (drawing.prompt_logprobs or drawing.prompt_top):
            params["prompt_logprobs"] = drawing.prompt_top
        return params

    def _failed(self, error: Exception) -> list[Sequence]:
        """See `VllmEngine`: always raise the error, since one request may have caused it."""
        super()._failed(error)
        raise error

    def _see(self, answer: Answer, output: Any) -> None:
        drawing = _drawing(answer.request)
        if output.prompt_logprobs:
            self.prompts.setdefault(drawing.request_id, []).extend(output.prompt_logprobs)
        if drawing.answer_top:
            places = self.places.setdefault((drawing.request_id, answer.sample), [])
            places += output.outputs[0].logprobs


class VllmSnapshots(SnapshotEngines):
    """A single vLLM engine for all snapshots.

    Args:
        engine: the engine.
        most: the maximum snapshots in memory.
        adapts_output: whether the engine supports adapters of the output layer.
    """

    def __init__(self, engine: AdaptersEngine, most: int, *, adapts_output: bool) -> None:
        super().__init__()
        self.adapts_output = adapts_output
        self._engine = engine
        self._most = most

    def has_room(self, snapshot: str | None) -> bool:
        return len({snapshot, *(drawing.snapshot for drawing in self._drawn.values())} - {None}) <= self._most

    def begin(self, drawing: Drawing, request: Request) -> None:
        if drawing.snapshot is not None:
            read_adapter(Path(drawing.snapshot))
        self._engine.check(request)
        self._engine.submit(request)
        self._drawn[drawing.request_id] = drawing

    def draw(self) -> Drawn:
        """See `SnapshotEngines`: an error fails all requests, which can be repeated."""
        try:
            return Drawn(self._engine.step(), {})
        except (WorkerDiedError, torch.AcceleratorError):
            raise
        except Exception as error:  # noqa: BLE001 - from vLLM, or caused by one request
            lost = dict.fromkeys(self._drawn, error)
            for request_id in lost:
                self.forget(request_id)
            return Drawn([], lost)

    def forget(self, request_id: str) -> None:
        drawing = self._drawn.pop(request_id, None)
        if drawing is not None:
            self._engine.forget(request_id, drawing.samples)

    def prompt_logprobs(self, drawing: Drawing) -> FloatArray:
        scores = np.full(len(drawing.prompt), np.nan, np.float32)
        for place, token, entry in self._asked(drawing):
            scores[place] = entry[token].logprob
        return scores

    def prompt_top(self, drawing: Drawing) -> TopTokens:
        top = no_tokens(len(drawing.prompt), drawing.prompt_top)
        for place, _, entry in self._asked(drawing):
            top.ids[place], top.logprobs[place] = _most_likely(entry, drawing.prompt_top)
        return top

    def _asked(self, drawing: Drawing) -> list[tuple[int, int, _Place]]:
        """Return the requested positions of a prompt, each with its token and vLLM's output."""
        places = list(enumerate(zip(drawing.prompt, self._engine.prompts[drawing.request_id], strict=True)))
        first = max(1, len(places) - drawing.prompt_last)
        return [(place, token, entry) for place, (token, entry) in places[first:] if entry is not None]

    def answer_top(self, drawing: Drawing, answer: Sequence) -> TopTokens:
        top = no_tokens(len(answer.tokens), drawing.answer_top)
        places = self._engine.places[drawing.request_id, answer.sample]
        # The answer may be cut off at a stop text.
        for place, entry in enumerate(places[: len(answer.tokens)]):
            top.ids[place], top.logprobs[place] = _most_likely(entry, drawing.answer_top)
        return top


def make_vllm_snapshots(
    config: ServeConfig, tokenizer: Any, device: torch.device, owner: str
) -> tuple[VllmSnapshots, int]:
    """Return vLLM with the served model, and the number of its token ids.

    Args:
        config: the whole configuration.
        tokenizer: the tokenizer of the model.
        device: the device of the model.
        owner: the worker that owns the engine, for errors.

    Raises:
        ConfigError: vllm is not installed, or cannot load the model.
    """
    folder, built = config.actor.model.model_path, None
    rollout, dtype = config.rollout, served_dtype(config, device)
    if folder is None:
        folder = built = tempfile.mkdtemp(prefix="rlinf-model-")
        make_model(config.actor, tokenizer, dtype).save_pretrained(folder)
    adapters = {
        "enable_lora": True,
        "max_loras": min(_AT_ONCE, rollout.max_snapshots),
        "max_cpu_loras": rollout.max_snapshots,
        "max_lora_rank": reserved_rank(config.server.max_rank),
        "max_logprobs": MOST_LIKELY,
    }
    try:
        engine = AdaptersEngine(
            folder,
            dtype=dtype,
            decode=tokenizer.decode,
            max_running_tokens=rollout.max_running_tokens,
            max_sequence_tokens=config.server.context_length,
            # A temperature other than 1 selects log-probabilities after temperature, like those of the built-in engine.
            temperature=0.5,
            **dict(rollout.vllm),
            options={**adapters, **rollout.arguments},
            owner=owner,
        )
    except BaseException:
        if built is not None:
            shutil.rmtree(built, ignore_errors=True)
        raise
    if built is not None:
        weakref.finalize(engine, shutil.rmtree, built, ignore_errors=True)
    model = ModelFolder(folder)
    adapts_output = engine.adapts_output(model.width, model.vocabulary)
    return VllmSnapshots(engine, rollout.max_snapshots, adapts_output=adapts_output), model.vocabulary


def _drawing(request: Request) -> Drawing:
    return cast("Drawing", request.metadata["drawing"])


def _most_likely(entry: _Place, k: int) -> tuple[list[int], list[float]]:
    """Return the k most likely tokens at a position, and possibly the sampled token."""
    ordered = sorted(entry.items(), key=lambda item: -item[1].logprob)[:k]
    return [token for token, _ in ordered], [item.logprob for _, item in ordered]
