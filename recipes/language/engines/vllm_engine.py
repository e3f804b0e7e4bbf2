"""vLLM behind the interface of engines: the real engine, in this process."""

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
from recipes.language.engines.engine import ArrivingTensors, PauseMode
from recipes.language.engines.model_folder import ModelFolder
from recipes.language.engines.request_queue import NOT_FINITE, Answer, QueuedEngine, RequestQueue, StopTexts
from recipes.language.engines.sampling import prompt_key, stream_key
from recipes.language.engines.vllm_adapter import VllmAdapter
from recipes.language.models.fingerprint import Fingerprint
from rlinf_core import ConfigError, WorkerDiedError

# Memory of the KV cache on a CPU without a configured token limit.
_CPU_CACHE_BYTES = 1 << 30
_MAX_ANSWERS = 256


@dataclass(slots=True)
class _Running:
    """An answer that vLLM is drawing."""

    answer: Answer
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def sequence(self, reason: FinishReason, theirs: str | None = None) -> Sequence:
        failure = f"vLLM ended it for the reason {theirs!r}" if reason == "aborted" and theirs else ""
        return self.answer.sequence(tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), reason, failure)


class VllmEngine(QueuedEngine):
    """Generates with vLLM. Its scheduler runs in this process, so that weights can change between two steps.

    Answers that share a prompt find it in vLLM's prefix cache, which is emptied when weights change: frozen answers are
    then computed again, under the new weights, up to where they were.

    Args:
        folder: the folder of the model, as transformers reads it.
        dtype: the type of the weights.
        stop_token_ids: tokens that end every answer.
        decode: text of token ids, needed for `SamplingParams.stop`.
        max_running_tokens: bound on prompt and answer tokens of the answers that run at once; 0: what fits.
        max_sequence_tokens: longest prompt and answer together; 0: what the model's positions allow.
        adapter_scale: alpha / rank of a LoRA adapter whose weights are loaded.
        adapter_rank: the rank of the adapter; 0: none is loaded.
        temperature: the temperature of most requests. 1, the default, lets `top_k`, `top_p` and `min_new_tokens` be
            used: vLLM gives log-probabilities either before it looks at any of them, or after all.
        tensor_parallel_size: GPUs that share the model.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes.
        options: further arguments of `vllm.LLM`.
        owner: the worker whose engine this is, as in `RolloutGroup:0`, for errors.

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
        """Hand vLLM the answers that there is room for."""
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
        """Return vLLM's reference to the adapter of a request; None: it has none."""
        return None if self._adapter is None else self._adapter.request

    def _further_params(self, request: Request, sample: int) -> dict[str, Any]:
        """Return arguments of vLLM's `SamplingParams` besides those that follow from a request's parameters."""
        return {"logprobs": 0}

    def _see(self, answer: Answer, output: Any) -> None:
        """Look at what vLLM has drawn of an answer in one step."""

    def _params(self, request: Request, sample: int) -> Any:
        params, begun = request.params, len(request.begun.tokens)
        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens - begun,
            min_tokens=max(0, params.min_new_tokens - begun),
            stop_token_ids=[*self._stop_token_ids, *params.stop_token_ids],
            # Seeded by this answer alone, so that its tokens do not depend on the batch; reseeded after a resume.
            seed=stream_key(prompt_key(params.seed, request.context), sample) >> 1,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            **self._further_params(request, sample),
        )

    def unfinished_answers(self) -> list[Sequence]:
        return [running.sequence("aborted") for running in self._running.values()] + self._queue.waiting()

    # Steps

    def step(self) -> list[Sequence]:
        """See `Engine`: begin the answers that fit, and let vLLM take a step.

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
            # Prompt tokens count as prefilled when their answer ends.
            self._prefilled += len(running.answer.request.context) - (output.num_cached_tokens or 0)
        return ended

    def _failed(self, error: Exception) -> list[Sequence]:
        """Return the running answers, which were not drawn, so that they are drawn again.

        Raises:
            WorkerDiedError: vLLM's engine is dead: a new one begins at the last checkpoint (`runner.max_restarts`).
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
        """Append sampled tokens, and return `stop` if they complete a stop text; the rest is cut off.

        Of weights that are not finite, vLLM draws any token: `aborted` then.
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
        """See `Engine`. Of weights of the whole model, one at a time is held beside those of vLLM.

        vLLM adds an adapter itself; one that it cannot take is merged into the weights of the model's folder.
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
            if not isinstance(tensors, ArrivingTensors):
                named = dict(tensors)
                shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
                tensors = ArrivingTensors(shapes, iter(named.items()))
            # All is looked at before anything is changed.
            self._folder.check(tensors.shapes)
            self._reload(_noted(tensors, digest))
        # Keys and values of other weights must not be found; answers that run are computed again.
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not clear its prefix cache")
        self._version = version
        return digest.text()

    def _reload(self, named: Iterator[tuple[str, Tensor]]) -> None:
        """Hand vLLM all weights."""
        # Processes that share a model are sent a list; this one alone can take weights one by one.
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
    """Yield named tensors, and add each to a fingerprint on its way."""
    for name, tensor in tensors:
        digest.add(name, tensor)
        yield name, tensor


def _reason(reason: str) -> FinishReason:
    if reason == "stop":
        return "stop"
    return "length" if reason == "length" else "aborted"


def _vllm() -> Any:
    """Return the package, configured to run in this process and without usage reports.

    Raises:
        ConfigError: it is not installed.
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
        # Compiling the few functions that run without `enforce_eager` takes longer than it gains on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        import vllm  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise missing_package("vllm", str(error)) from None
    return vllm
