"""A stand-in for vLLM's interface as serving uses it: it draws with transformers, and merges adapters that it is sent.

Signatures and values are those of vLLM 0.32; the real one passes the same tests in an interpreter of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from recipes.language.models.load_model import load_model
from recipes.sections.model_folders import ADAPTED
from recipes.serve.adapters import WEIGHTS
from recipes.training.tensor_files import read_tensors


class LoRARequest(NamedTuple):
    """As `vllm.lora.request.LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class SamplingParams:
    """As `vllm.SamplingParams`: refuses arguments that it does not have."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        max_tokens: int,
        min_tokens: int,
        stop_token_ids: list[int],
        seed: int,
        detokenize: bool,
        output_kind: int,
        logprobs: int,
        ignore_eos: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        assert (min_tokens, detokenize, output_kind, ignore_eos) == (0, False, 1, True)
        self.cut = (top_k, top_p)
        if not 0 <= temperature <= 2:
            raise ValueError(f"temperature must be in [0, 2], got {temperature}.")
        assert seed >= 0
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.generator = torch.Generator().manual_seed(seed)


class _Running:
    def __init__(self, tokens: list[int], params: SamplingParams, model: Any) -> None:
        self.tokens = tokens
        self.params = params
        self.model = model
        self.drawn = 0


class LlmEngine:
    """As `vllm.LLM.llm_engine`: each step draws a token of each request."""

    def __init__(self, folder: str, arguments: dict[str, Any]) -> None:
        self._folder = folder
        self._arguments = arguments
        self._running: dict[str, _Running] = {}
        self._models: dict[int, Any] = {0: load_model(folder).eval()}
        self._names: dict[int, str] = {}
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(
        self, name: str, prompt: dict[str, list[int]], params: SamplingParams, *, priority: int, lora_request: Any
    ) -> None:
        # Log-probabilities would be those of what is left.
        assert params.cut == (-1, 1.0)
        most = self._arguments["max_logprobs"]
        assert max(params.logprobs, params.prompt_logprobs or 0) <= most
        number = 0 if lora_request is None else self._loaded(lora_request)
        self._running[name] = _Running(list(prompt["prompt_token_ids"]), params, self._models[number])

    def add_lora(self, request: LoRARequest) -> bool:
        self._loaded(request)
        return True

    def remove_lora(self, number: int) -> bool:
        return self._models.pop(number, None) is not None

    def _loaded(self, request: LoRARequest) -> int:
        assert self._arguments["enable_lora"]
        number = request.lora_int_id
        # An adapter is known by its number, and its keys and values by its name.
        assert self._names.setdefault(number, request.lora_path) == request.lora_path
        assert request.lora_name == str(number)
        if number not in self._models:
            folder = Path(request.lora_path)
            settings = json.loads((folder / ADAPTED).read_text())
            assert settings["r"] <= self._arguments["max_lora_rank"]
            weights, model = read_tensors(folder / WEIGHTS), load_model(self._folder).eval()
            with torch.no_grad():
                for path, module in list(model.named_modules()):
                    down = weights.pop(f"base_model.model.{path}.lora_A.weight", None)
                    if down is not None:
                        up = weights.pop(f"base_model.model.{path}.lora_B.weight")
                        module.weight += settings["lora_alpha"] / settings["r"] * up @ down  # type: ignore[operator]
            if "lm_head" in settings["target_modules"]:
                raise ValueError("expected target modules in {...} but received ['lm_head', 'lm_head']")
            assert not weights
            self._models[number] = model
        return number

    @torch.no_grad()
    def step(self) -> list[Any]:
        outputs: list[Any] = []
        for name, running in list(self._running.items()):
            logits = running.model(torch.tensor([running.tokens])).logits[0]
            params, prompt = running.params, None
            if not running.drawn and params.prompt_logprobs is not None:
                places = logits.log_softmax(-1)[:-1]
                pairs = zip(places, running.tokens[1:], strict=True)
                prompt = [None, *(_entry(place, token, params.prompt_logprobs) for place, token in pairs)]
            logprobs = (logits[-1] / (params.temperature or 1.0)).log_softmax(-1)
            token = int(logprobs.argmax())
            if params.temperature:
                token = int(torch.multinomial(logprobs.exp(), 1, generator=params.generator))
            running.tokens.append(token)
            running.drawn += 1
            stops = token in params.stop_token_ids
            reason = "stop" if stops else "length" if running.drawn == params.max_tokens else None
            if reason:
                del self._running[name]
            entry = _entry(logprobs, token, params.logprobs)
            completion = SimpleNamespace(token_ids=[token], logprobs=[entry], finish_reason=reason)
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[completion], num_cached_tokens=0, prompt_logprobs=prompt)
            )
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._running.pop(name, None)


def _entry(logprobs: torch.Tensor, token: int, k: int) -> dict[int, Any]:
    """Return what vLLM gives of a place: the token, and the k most likely ones."""
    chosen = [token, *(int(other) for other in logprobs.topk(k).indices)]
    return {number: SimpleNamespace(logprob=float(logprobs[number])) for number in chosen}


class LLM:
    """As `vllm.LLM`."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        assert arguments["logprobs_mode"] == "processed_logprobs"
        self.arguments = arguments
        self.llm_engine = LlmEngine(folder, arguments)


def modules() -> dict[str, Any]:
    """Return the modules of the stand-in, by the names under which they are imported."""
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1))
    return {
        "vllm": SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams, sampling_params=kinds),
        "vllm.lora": SimpleNamespace(),
        "vllm.lora.request": SimpleNamespace(LoRARequest=LoRARequest),
    }
