"""The engine that speaks to SGLang keeps the contract, with a stand-in of the signatures of sglang 0.5.23.

`sglang.Engine` needs a GPU. The stand-in has the names, arguments and shapes of results that its source has
(`srt/entrypoints/engine.py`), and lets our engine draw.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.engines.engine import Engine
from recipes.language.engines.own.torch_engine import TorchEngine
from rlinf_core.errors import ConfigError, RLinfError
from tests.unit.recipes.language.engines.contract import EngineContract, contract_model, greedy, run


class StandIn:
    """`sglang.Engine`: the arguments that are used, and no others."""

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "auto",
        skip_tokenizer_init: bool = False,
        context_length: int | None = None,
        tp_size: int = 1,
        mem_fraction_static: float | None = None,
        log_level: str = "error",
        enable_deterministic_inference: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM

        assert skip_tokenizer_init
        assert context_length is not None
        self._engine = TorchEngine(AutoModelForCausalLM.from_pretrained(model_path))
        self._seeded = enable_deterministic_inference

    def generate(
        self,
        prompt: Any = None,
        sampling_params: list[dict[str, Any]] | None = None,
        input_ids: list[list[int]] | None = None,
        return_logprob: bool = False,
    ) -> list[dict[str, Any]]:
        assert prompt is None
        assert return_logprob
        for index, (tokens, inputs) in enumerate(zip(input_ids or [], sampling_params or [], strict=True)):
            # What is left out comes from `preferred_sampling_params` of the engine, or from the model's folder.
            drawn = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0}
            assert {name: inputs[name] for name in drawn} == drawn
            params = SamplingParams(
                temperature=inputs["temperature"],
                top_k=inputs["top_k"],
                top_p=inputs["top_p"],
                max_new_tokens=inputs["max_new_tokens"],
                min_new_tokens=inputs["min_new_tokens"],
                stop_token_ids=tuple(inputs["stop_token_ids"]),
                seed=inputs["sampling_seed"] if self._seeded else index,
            )
            self._engine.submit(Request(request_id=str(index), prompt=tuple(tokens), params=params))
        results = sorted(self._engine.results(), key=lambda item: int(item.request_id))
        return [
            {
                "text": "",
                "output_ids": list(result.tokens),
                "meta_info": {
                    "id": result.request_id,
                    "finish_reason": {"type": result.finish_reason},
                    "prompt_tokens": len(result.prompt),
                    "completion_tokens": len(result.tokens),
                    "cached_tokens": 0,
                    "output_token_logprobs": [
                        (value, token, None) for value, token in zip(result.logprobs, result.tokens, strict=True)
                    ],
                },
            }
            for result in results
        ]

    def update_weights_from_tensor(
        self, named_tensors: list[Any], load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        assert isinstance(named_tensors, list)
        assert flush_cache
        self._engine.load_weights(named_tensors, 0)
        return True, "Success"

    def flush_cache(self) -> Any:
        return None

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._engine.sleep(2 if "weights" in (tags or []) else 1)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._engine.wake()

    def shutdown(self) -> None:
        self._engine.stop()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("sglang")
    module.Engine = StandIn
    monkeypatch.setitem(sys.modules, "sglang", module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder)
    return str(folder)


def make(folder: str, **options: Any) -> Engine:
    from recipes.language.engines.sglang_engine import SglangEngine

    return SglangEngine(folder, options={"enable_deterministic_inference": True}, **options)


class TestSglangEngine(EngineContract):
    keeps_partial = False

    @pytest.fixture(autouse=True)
    def stand_in(self, sglang: Any, folder: str) -> None:
        self._folder = folder

    def make(self, **options: Any) -> Engine:
        import torch

        return make(self._folder, dtype=torch.float32, **options)


def test_without_the_package_the_error_says_what_to_install(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ConfigError) as raised:
        make(folder)
    assert "pip install sglang" in (raised.value.help or "")


def test_an_answer_with_too_few_tokens_is_an_error(sglang: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StandIn.generate

    def short(self: StandIn, **fields: Any) -> Any:
        result = whole(self, **fields)
        for item in result:
            del item["meta_info"]["output_token_logprobs"][-2:]
        return result

    monkeypatch.setattr(StandIn, "generate", short)
    with pytest.raises(RLinfError, match="unusable answer") as raised:
        run(make(folder), [Request(request_id="a", prompt=(5, 6), params=greedy(6))])
    assert "after 4 tokens; at least 6 were requested" in str(raised.value)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 3.0])
def test_an_answer_without_probabilities_fails_alone(
    sglang: Any, folder: str, monkeypatch: pytest.MonkeyPatch, logprob: float
) -> None:
    generate = StandIn.generate

    def spoiled(self: StandIn, **arguments: Any) -> list[dict[str, Any]]:
        results = generate(self, **arguments)
        for place, tokens in enumerate(arguments["input_ids"]):
            if tokens[0] == 13:
                drawn = results[place]["meta_info"]["output_token_logprobs"]
                drawn[0] = (logprob, *drawn[0][1:])
        return results

    monkeypatch.setattr(StandIn, "generate", spoiled)
    engine = make(folder)
    prompts = {"good": (3, 4), "bad": (13, 4), "other": (5,)}
    requests = [Request(request_id=name, prompt=prompt, params=greedy(4)) for name, prompt in prompts.items()]
    answers = run(engine, requests)
    assert {name for (name, _), answer in answers.items() if answer.failed} == {"bad"}
    # Asked again by itself.
    assert run(engine, requests[1:2])["bad", 0].failed
