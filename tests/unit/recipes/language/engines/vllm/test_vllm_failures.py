"""What becomes of answers when vLLM fails, by a stub that raises as its classes do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.engines.vllm_engine import VllmEngine
from rlinf_core.errors import WorkerDiedError
from tests.unit.recipes.language.engines.contract import contract_model


class EngineGenerateError(Exception):
    """As in vllm.v1.engine.exceptions: of requests; the engine goes on."""


class EngineDeadError(Exception):
    """As in vllm.v1.engine.exceptions: the engine is gone."""


class Core:
    """vLLM's engine as far as a step needs it: each step raises what comes next."""

    def __init__(self) -> None:
        self.raises: list[Exception] = []
        self.added: list[str] = []
        self.ended: list[str] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name: str, prompt: Any, params: Any, priority: int, lora_request: Any) -> None:
        self.added.append(name)

    def abort_request(self, names: list[str]) -> None:
        self.ended += names

    def step(self) -> list[Any]:
        if self.raises:
            raise self.raises.pop(0)
        tokens = {5: SimpleNamespace(logprob=-0.5)}
        done = SimpleNamespace(token_ids=[5], logprobs=[tokens], finish_reason="length")
        return [
            SimpleNamespace(request_id=name, outputs=[done], num_cached_tokens=0)
            for name in self.added
            if name not in self.ended
        ]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1))
    stub: Any = SimpleNamespace(
        LLM=lambda *_, **__: SimpleNamespace(llm_engine=Core()),
        SamplingParams=lambda **values: values,
        sampling_params=kinds,
    )
    monkeypatch.setitem(sys.modules, "vllm", stub)
    contract_model().save_pretrained(tmp_path)
    engine = VllmEngine(tmp_path, stop_token_ids=(1,), max_sequence_tokens=32, owner="RolloutGroup:3")
    engine.submit(Request(request_id="a", prompt=(2, 3), params=SamplingParams(max_new_tokens=1), group_size=2))
    return engine


def test_requests_that_vllm_fails_are_told_as_failed(engine: VllmEngine) -> None:
    engine._llm.llm_engine.raises = [EngineGenerateError("a kernel failed")]
    failed = engine.step()
    assert [(one.finish_reason, one.tokens) for one in failed] == [("aborted", ())] * 2
    assert {one.failure for one in failed} == {"vLLM raised EngineGenerateError: a kernel failed"}
    assert engine.unfinished == 0
    engine.submit(Request(request_id="b", prompt=(2, 3), params=SamplingParams(max_new_tokens=1)))
    assert [one.tokens for one in engine.step()] == [(5,)]


@pytest.mark.parametrize("error", [EngineDeadError("see the root cause above"), RuntimeError("Executor failed.")])
def test_dead_engine_is_the_death_of_its_worker(engine: VllmEngine, error: Exception) -> None:
    engine._llm.llm_engine.raises = [error]
    with pytest.raises(WorkerDiedError, match="vLLM's engine died: ") as caught:
        engine.step()
    assert caught.value.address == "RolloutGroup:3"


def test_other_errors_of_vllm_end_the_run(engine: VllmEngine) -> None:
    engine._llm.llm_engine.raises = [ValueError("priority")]
    with pytest.raises(ValueError, match="priority"):
        engine.step()


@pytest.mark.parametrize("reason", ["length", None])
@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_an_answer_without_probabilities_fails_alone(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, reason: str | None, logprob: float
) -> None:
    step = Core.step

    def spoiled(self: Core) -> list[Any]:
        outputs = step(self)
        for output in outputs[:1]:
            output.outputs[0] = SimpleNamespace(
                token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=logprob)}], finish_reason=reason
            )
        return outputs

    monkeypatch.setattr(Core, "step", spoiled)
    failed, whole = engine.step()
    assert failed.failed
    assert (failed.tokens, whole.tokens, whole.failed) == ((), (5,), False)
    assert engine.unfinished == 0
