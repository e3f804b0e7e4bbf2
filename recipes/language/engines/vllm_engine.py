"""vLLM behind the engine interface, in this process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from recipes.language.answers.sequences import FinishReason, Request, Sequence
from recipes.language.config.rollout_config import last_line, missing_package
from recipes.language.engines.engine import (
    NOT_FINITE,
    Answer,
    ArrivingTensors,
    PauseMode,
    QueuedEngine,
    RequestQueue,
    StopTexts,
)
from recipes.language.engines.engine_weights import ModelFolder, VllmAdapter
from recipes.language.engines.sampling import prompt_key, stream_key
from recipes.language.models.fingerprint import Fingerprint
from rlinf_core import ConfigError, WorkerDiedError

# Memory of the KV cache on a CPU without a configured token limit.
_CPU_CACHE_BYTES = 1 << 30
_MAX_ANSWERS = 256


@dataclass(slots=True)
class _Running:
    """A running answer with its tokens so far."""

    answer: Answer
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def sequence(self, reason: FinishReason, theirs: str | None = None) -> Sequence:
        failure = f"vLLM ended it for the reason {theirs!r}" if reason == "aborted" and theirs else ""
        return self.answer.sequence(tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), reason, failure)


class VllmEngine(QueuedEngine):
    """An engine that uses vLLM, whose scheduler runs in this process, so that weights can change between steps.

    Answers to one prompt share it in vLLM's prefix cache. New weights empty the cache, and vLLM recomputes the keys and
    values of frozen answers under them.

    Args:
        folder: the folder of the model, in transformers' format.
        dtype: the type of the weights.
        stop_token_ids: tokens that end every answer.
        decode: returns the text of token ids; needed for `SamplingParams.stop`.
        max_running_tokens: the maximum prompt and answer tokens of all running answers; 0: as many as fit.
        max_sequence_tokens: the maximum length of prompt and answer together; 0: the model's positions.
        adapter_scale: alpha / rank of LoRA adapters to load.
        adapter_rank: the rank of adapters to load; 0: no adapter.
        temperature: the temperature of most requests. Only 0 and 1 allow `top_k`, `top_p` and `min_new_tokens`, as vLLM
            gives log-probabilities either before temperature and truncation or after both.
        tensor_parallel_size: the number of GPUs that share the model.
        gpu_memory_utilization: the share of a GPU's memory that vLLM reserves.
        options: further arguments of `vllm.LLM`.
        owner: the worker that owns the engine, such as `RolloutGroup:0`, for errors.

    Raises:
        ConfigError: vllm is not installed, or cannot load the model.
    """

    continues: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        stop_token_ids: Iterable[int] = (),
        decode: Callable[[SequenceABC[int]], str] | None = None,
        max_running_tokens: int = 0,
        max_sequence_tokens: int = 0,
        adapter_scale: float = 1.0,
        adapter_rank: int = 0,
        temperature: float = 1.0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        options: Mapping[str, Any] | None = None,
        owner: str = "rollout",
    ) -> None:
        self._owner = owner
        self._folder = ModelFolder(folder, adapter_scale)
        self._dtype = dtype
        longest = self._folder.longest(max_sequence_tokens)
        self._stop_token_ids = tuple(stop_token_ids)
        self._stop_texts = None if decode is None else StopTexts(decode)
        self._processes = tensor_parallel_size
        logprobs = "raw" if temperature in (0, 1) else "processed"
        queue = RequestQueue(
            max_sequence_tokens=longest,
            max_running_tokens=max_running_tokens,
            stops_at_texts=decode is not None,
            logprobs=logprobs,
        )
        super().__init__(queue, max_running_tokens)
        self._running: dict[str, _Running] = {}
        self._cache_bytes = max(max_running_tokens, longest) * self._folder.cache_bytes_per_token(dtype)
        vllm = _vllm()
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            self._cache_bytes = max(2 * self._cache_bytes, _CPU_CACHE_BYTES if not max_running_tokens else 1 << 26)
        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": longest,
            "max_num_seqs": _MAX_ANSWERS,
            "async_scheduling": False,
            "scheduling_policy": "priority",
            "enforce_eager": on_cpu,
            "use_tqdm_on_load": False,
            "logprobs_mode": f"{logprobs}_logprobs",
            "tensor_parallel_size": tensor_parallel_size,
        }
        options = options or {}
        self._adapter: VllmAdapter | None = None
        if VllmAdapter.serves(adapter_rank, options):
            self._adapter = VllmAdapter(adapter_rank, adapter_scale, dtype)
            arguments |= self._adapter.arguments()
        if on_cpu:
            arguments["kv_cache_memory_bytes"] = self._cache_bytes
        else:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        try:
            self._llm: Any = vllm.LLM(str(folder), **{**arguments, **options})
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise ConfigError(f"vLLM cannot load the model in `{folder}`", why=last_line(error)) from error
        self._vllm = vllm
        self._asleep = False

    # Requests

    def _begin(self) -> None:
        """Submit the waiting answers that fit to vLLM."""
        reserved = self._reserved
        for answer in self._queue.admit(reserved):
            request = answer.request
            name = f"{answer.number}"
            self._llm.llm_engine.add_request(
                name,
                {"prompt_token_ids": list(request.context)},
                self._params(request, answer.sample),
                priority=request.priority,
                lora_request=self._lora_request(request),
            )
            begun = request.begun
            self._running[name] = _Running(answer, list(begun.tokens), list(begun.logprobs), list(begun.versions))
            self._prompted += len(request.context)

    def _lora_request(self, request: Request) -> Any:
        """Return vLLM's reference to the adapter of a request; None: no adapter."""
        return None if self._adapter is None else self._adapter.request

    def _further_params(self, request: Request, sample: int) -> dict[str, Any]:
        """Return arguments of vLLM's `SamplingParams` beyond the parameters of a request; subclasses add theirs."""
        return {"logprobs": 0}

    def _see(self, answer: Answer, output: Any) -> None:
        """Inspect the output of vLLM for an answer in one step; a hook for subclasses."""

    def _params(self, request: Request, sample: int) -> Any:
        params, begun = request.params, len(request.begun.tokens)
        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens - begun,
            min_tokens=max(0, params.min_new_tokens - begun),
            stop_token_ids=[*self._stop_token_ids, *params.stop_token_ids],
            # Derive the seed from this answer alone, so that its tokens do not depend on the batch; it changes on
            # resumption.
            seed=stream_key(prompt_key(params.seed, request.context), sample) >> 1,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            **self._further_params(request, sample),
        )

    def unfinished_answers(self) -> list[Sequence]:
        return [running.sequence("aborted") for running in self._running.values()] + self._queue.waiting()

    # Steps

    def step(self) -> list[Sequence]:
        """See `Engine`: start the answers that fit, and let vLLM take a step.

        Raises:
            WorkerDiedError: vLLM's engine is dead.
        """
        if self._paused:
            return []
        self._check_awake()
        self._begin()
        return self._go_on()

    def _go_on(self) -> list[Sequence]:
        ended: list[Sequence] = []
        if not self._running:
            return ended
        try:
            outputs = self._llm.llm_engine.step()
        except Exception as error:  # noqa: BLE001 - classes of vLLM, told apart by name
            return self._failed(error)
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            (completion,) = output.outputs
            self._see(running.answer, output)
            reason = self._append(running, completion)
            if reason is None and not completion.finish_reason:
                continue
            if not completion.finish_reason:
                self._llm.llm_engine.abort_request([output.request_id])
            del self._running[output.request_id]
            if reason == "aborted":
                ended.append(running.answer.sequence(failure=NOT_FINITE))
            else:
                ended.append(running.sequence(reason or _reason(completion.finish_reason), completion.finish_reason))
            # Count prompt tokens as prefilled when the answer ends.
            self._prefilled += len(running.answer.request.context) - (output.num_cached_tokens or 0)
        return ended

    def _failed(self, error: Exception) -> list[Sequence]:
        """Return the running answers as failed after vLLM raised an error, so that they are sampled again.

        Raises:
            WorkerDiedError: vLLM's engine is dead; a new worker resumes from the last checkpoint
                (`runner.max_restarts`).
        """
        names = {kind.__name__ for kind in type(error).__mro__}
        if "EngineDeadError" in names or (isinstance(error, RuntimeError) and str(error).startswith("Executor failed")):
            raise WorkerDiedError(self._owner, cause=f"vLLM's engine died: {last_line(error)}") from error
        if "EngineGenerateError" not in names:
            raise error
        self._llm.llm_engine.abort_request(list(self._running))
        running, self._running = list(self._running.values()), {}
        why = f"vLLM raised {type(error).__name__}: {last_line(error)}"
        return [one.answer.sequence(failure=why) for one in running]

    def _append(self, running: _Running, completion: Any) -> FinishReason | None:
        """Append sampled tokens, and return `stop` at the token that completes a stop text; the rest is cut off.

        Return `aborted` for a log-probability that is not finite: vLLM samples any token if weights are not.
        """
        params = running.answer.request.params
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            if not math.isfinite(entry[token].logprob):
                return "aborted"
            running.tokens.append(token)
            running.logprobs.append(entry[token].logprob)
            running.versions.append(self._version)
            self._generated += 1
            texts = self._stop_texts if params.stop and len(running.tokens) >= params.min_new_tokens else None
            if texts is not None and texts.ended(running.tokens, params.stop):
                return "stop"
        return None

    # Control

    def pause(self, mode: PauseMode) -> list[Sequence]:
        done: list[Sequence] = []
        if mode == "drain":
            while self._running:
                done += self._go_on()
        elif mode == "abort":
            self._llm.llm_engine.abort_request(list(self._running))
            done = [running.sequence("aborted") for running in self._running.values()] + self._queue.abort()
            self._running.clear()
        self._paused = True
        return done

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`. A weight of the whole model is held beside vLLM's only while it is loaded.

        vLLM adds an adapter itself if it supports it; else the adapter is merged into the folder's weights.
        """
        self._check_awake("weights")
        digest = Fingerprint()
        if adapter_only:
            weights = dict(_noted(tensors, digest))
            if self._adapter is None:
                self._reload(self._folder.merged(weights, self._dtype))
            else:
                self._load_adapter(self._adapter, weights)
        else:
            arriving = ArrivingTensors.of(tensors)
            # Check all shapes before anything changes.
            self._folder.check(arriving.shapes)
            self._reload(_noted(arriving, digest))
        # Clear keys and values of the old weights; running answers are recomputed.
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not clear its prefix cache")
        self._version = version
        return digest.text()

    def _reload(self, named: Iterator[tuple[str, Tensor]]) -> None:
        """Load all weights into vLLM."""
        # Several processes need a list; a single one takes weights one by one.
        iterator = named if self._processes == 1 else list(named)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})

    def _load_adapter(self, adapter: VllmAdapter, weights: Mapping[str, Tensor]) -> None:
        self._folder.check_adapter(weights)
        if adapter.request is None and self._running:
            raise ValueError("answers run that began without the LoRA adapter: pause the engine first")
        adapter.load(self._llm.llm_engine, weights)

    def sleep(self, level: int = 1) -> None:
        if self._running:
            raise ValueError(f"{len(self._running)} answers are in progress: pause the engine first")
        if self._llm.llm_engine.model_config.enable_sleep_mode:
            self._llm.sleep(level)
            self._asleep = True
        else:
            self._llm.llm_engine.reset_prefix_cache()

    def wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _check_awake(self, what: str = "memory") -> None:
        if self._asleep:
            raise ValueError(f"the engine has released its {what}: wake it first")

    @property
    def _in_flight(self) -> int:
        return len(self._running)

    @property
    def _reserved(self) -> int:
        return sum(running.answer.most_tokens for running in self._running.values())

    def _cached_bytes(self) -> int:
        return self._cache_bytes

    def stop(self) -> None:
        self._queue.abort()
        self._running.clear()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _noted(tensors: Iterable[tuple[str, Tensor]], digest: Fingerprint) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors, and add each to a checksum."""
    for name, tensor in tensors:
        digest.add(name, tensor)
        yield name, tensor


def _reason(reason: str) -> FinishReason:
    if reason == "stop":
        return "stop"
    return "length" if reason == "length" else "aborted"


def _vllm() -> Any:
    """Return the package `vllm`, configured to run in this process without usage reports.

    Raises:
        ConfigError: the package is not installed.
    """
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # On a CPU, compiling the few functions that `enforce_eager` leaves takes longer than it saves.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        import vllm  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise missing_package("vllm", str(error)) from None
    return vllm
