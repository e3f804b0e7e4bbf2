"""SGLang behind the interface of engines, by its documented `Engine`.

Not run here, where it needs a GPU: tests hold it against the signatures of sglang 0.5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.language.answers.sequences import Request, Sequence
from recipes.language.config.engine_facts import last_line, missing_package
from recipes.language.engines.engine import Engine, EngineStats, PauseMode
from recipes.language.engines.foreign_answers import checked_sequence, checked_together
from recipes.language.engines.model_folder import ModelFolder
from recipes.language.engines.request_queue import Answer, RequestQueue
from recipes.language.engines.sampling import prompt_key, stream_key
from recipes.language.engines.stop_texts import StopTexts
from recipes.language.models.fingerprint import fingerprint
from rlinf_core import ConfigError, RLinfError


class SglangEngine(Engine):
    """Generates with SGLang: a step submits all answers that fit, and returns when all have ended.

    So nothing is running between two steps: `freeze` and `abort` find no unfinished answers.

    Args:
        folder: the folder of the model, as transformers reads it.
        dtype: the type of the weights.
        stop_token_ids: tokens that end every answer.
        decode: text of token ids, needed for `SamplingParams.stop`.
        max_running_tokens: bound on prompt and answer tokens of the answers of one step; 0: none.
        max_sequence_tokens: longest prompt and answer together; 0: what the model's positions allow.
        adapter_scale: alpha / rank of a LoRA adapter whose weights are loaded.
        temperature: the temperature of most requests; SGLang does not need to know.
        tensor_parallel_size: GPUs that share the model.
        gpu_memory_utilization: share of a GPU's memory for weights, keys and values.
        options: further arguments of `sglang.Engine`.

    Raises:
        ConfigError: sglang is not installed, or cannot load the model.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        stop_token_ids: Iterable[int] = (),
        decode: Callable[[SequenceABC[int]], str] | None = None,
        max_running_tokens: int = 0,
        max_sequence_tokens: int = 0,
        adapter_scale: float = 1.0,
        temperature: float = 1.0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = ModelFolder(folder, adapter_scale)
        self._dtype = dtype
        longest = self._folder.longest(max_sequence_tokens)
        self._limit = max_running_tokens
        self._stop_token_ids = tuple(stop_token_ids)
        self._stop_texts = None if decode is None else StopTexts(decode)
        self._queue = RequestQueue(
            max_sequence_tokens=longest, max_running_tokens=max_running_tokens, stops_at_texts=decode is not None
        )
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import sglang  # pyright: ignore[reportMissingImports] - optional
        except ImportError as error:
            raise missing_package("sglang", str(error)) from None
        arguments: dict[str, Any] = {
            "model_path": str(folder),
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            # One more than a sequence may have: SGLang keeps a place for the token that would come next.
            "context_length": longest + 1,
            "tp_size": tensor_parallel_size,
            "mem_fraction_static": gpu_memory_utilization,
            "log_level": "error",
        }
        try:
            self._engine: Any = sglang.Engine(**{**arguments, **(options or {})})
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise ConfigError(f"SGLang cannot load the model in `{folder}`", why=last_line(error)) from error
        self._seeded = bool((options or {}).get("enable_deterministic_inference"))
        self._paused = self._asleep = False
        self._version = self._generated = self._prefilled = self._prompted = self._reserved = 0

    def submit(self, request: Request) -> None:
        """See `Engine`."""
        self._queue.add(request)

    @property
    def unfinished(self) -> int:
        """See `Engine`."""
        return len(self._queue)

    def step(self) -> list[Sequence]:
        """See `Engine`: answer all that there is room for."""
        if self._paused or not self._queue:
            return []
        if self._asleep:
            raise ValueError("the engine has released its memory: wake it first")
        taken = list(self._queue.admit(0))
        self._reserved = sum(answer.most_tokens for answer in taken)
        outputs: Any = self._engine.generate(
            input_ids=[list(answer.request.prompt) for answer in taken],
            sampling_params=[self._params(answer) for answer in taken],
            return_logprob=True,
        )
        pairs = zip(taken, outputs, strict=True)
        answers = checked_together(
            ((answer, partial(self._sequence, answer, output)) for answer, output in pairs), worked=self._generated > 0
        )
        self._prompted += sum(len(answer.prompt) for answer in answers)
        self._generated += sum(len(answer.tokens) for answer in answers)
        return answers

    def _params(self, answer: Answer) -> dict[str, Any]:
        params = answer.request.params
        settings: dict[str, Any] = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "max_new_tokens": params.max_new_tokens,
            "min_new_tokens": params.min_new_tokens,
            "stop_token_ids": [*self._stop_token_ids, *params.stop_token_ids],
            # Given, so that neither `preferred_sampling_params` nor the model's generation_config.json decides.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
            "ignore_eos": False,
        }
        if self._seeded:
            settings["sampling_seed"] = stream_key(prompt_key(params.seed, answer.request.prompt), answer.sample)
        return settings

    def _sequence(self, answer: Answer, output: Mapping[str, Any]) -> Sequence:
        info = output["meta_info"]
        drawn = info["output_token_logprobs"]
        reason = info["finish_reason"]
        self._prefilled += len(answer.request.prompt) - int(info.get("cached_tokens", 0))
        return checked_sequence(
            answer,
            [entry[1] for entry in drawn],
            [entry[0] for entry in drawn],
            reason.get("type") if isinstance(reason, Mapping) else reason,
            self._version,
            self._stop_texts,
            "SGLang",
            self._folder.vocabulary,
        )

    def pause(self, mode: PauseMode) -> list[Sequence]:
        """See `Engine`."""
        self._paused = True
        return self._queue.abort() if mode == "abort" else []

    def resume(self) -> None:
        """See `Engine`."""
        self._paused = False

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`. An adapter is merged into the weights of the model's folder, which SGLang then gets whole.

        Raises:
            RLinfError: SGLang did not take them.
        """
        weights = dict(tensors)
        digest = fingerprint(weights.items())
        named = self._folder.merged(weights, self._dtype) if adapter_only else self._folder.checked(weights)
        done, said = self._engine.update_weights_from_tensor(list(named), flush_cache=True)[:2]
        if not done:
            raise RLinfError(f"SGLang did not load the weights of version {version}", why=str(said))
        self._version = version
        return digest

    def sleep(self, level: int = 1) -> None:
        """See `Engine`. SGLang gives up memory where it was started with `enable_memory_saver: true`."""
        self._engine.flush_cache()
        self._engine.release_memory_occupation(tags=["kv_cache"] if level < 2 else ["kv_cache", "weights"])
        self._asleep = True

    def wake(self) -> None:
        """See `Engine`."""
        if self._asleep:
            self._engine.resume_memory_occupation()
            self._asleep = False

    def stats(self) -> EngineStats:
        """See `Engine`. `reserved_tokens` are those of the last step while there is more to do."""
        return EngineStats(
            running=0,
            waiting=len(self._queue),
            reserved_tokens=self._reserved if self._queue else 0,
            max_running_tokens=self._limit,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            prompt_tokens=self._prompted,
            cache_bytes=0,
            version=self._version,
        )

    def stop(self) -> None:
        """See `Engine`."""
        self._queue.abort()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
