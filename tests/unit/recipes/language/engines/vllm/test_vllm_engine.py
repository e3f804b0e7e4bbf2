"""vLLM as a stub that takes requests and weights, and fails, as its classes do."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.language.engines.engine import ArrivingTensors
from recipes.language.engines.vllm_engine import VllmEngine
from recipes.language.models.fingerprint import fingerprint
from rlinf_core.errors import WorkerDiedError
from tests.unit.recipes.language.engines.contract import contract_model, drawn, request


class EngineGenerateError(Exception):
    """As in vllm.v1.engine.exceptions: of requests; the engine goes on."""


class EngineDeadError(Exception):
    """As in vllm.v1.engine.exceptions: the engine is gone."""


class Core:
    """vLLM's engine as far as a step and weights need it: each step raises what comes next."""

    def __init__(self) -> None:
        self.raises: list[Exception] = []
        self.added: dict[str, Any] = {}
        self.emptied = 0
        self.adapters: list[tuple[Any, dict[str, Any], dict[str, Tensor]]] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.first_answer: Any = None

    def add_request(self, name: str, prompt: Any, params: Any, priority: int, lora_request: Any) -> None:
        self.added[name] = lora_request

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.added.pop(name, None)

    def step(self) -> list[Any]:
        if self.raises:
            raise self.raises.pop(0)
        outputs = [
            SimpleNamespace(request_id=name, outputs=[answered(-0.5, "length")], num_cached_tokens=0)
            for name in self.added
        ]
        if self.first_answer:
            outputs[0].outputs[0] = self.first_answer
        return outputs

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.emptied += reset_running_requests
        return True

    def add_lora(self, request: Any) -> bool:
        from safetensors.torch import load_file

        folder = Path(request.path)
        settings = json.loads((folder / "adapter_config.json").read_text())
        self.adapters.append((request, settings, load_file(folder / "adapter_model.safetensors")))
        return True


def answered(logprob: float, reason: str | None) -> Any:
    return SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=logprob)}], finish_reason=reason)


class Llm:
    """vLLM's class: notes its arguments, and copies weights one by one."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        self.arguments = arguments
        self.llm_engine = Core()
        self.loaded: dict[str, Tensor] = {}
        self.most_alive = 0

    def collective_rpc(self, what: str, *, kwargs: dict[str, Any]) -> None:
        assert what == "reload_weights"
        alive: list[weakref.ref[Tensor]] = []
        for name, tensor in kwargs["weights_iterator"]:
            alive.append(weakref.ref(tensor))
            self.loaded[name] = tensor.clone()
            del tensor
            self.most_alive = max(self.most_alive, sum(one() is not None for one in alive))


def lora_request(name: str, number: int, path: str, load_inplace: bool = False) -> Any:
    return SimpleNamespace(name=name, number=number, path=path, load_inplace=load_inplace)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub: Any = SimpleNamespace(
        LLM=Llm,
        SamplingParams=lambda **values: values,
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1)),
    )
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=lora_request))
    contract_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def engine(folder: Path) -> VllmEngine:
    engine = VllmEngine(folder, stop_token_ids=(1,), max_sequence_tokens=32, owner="RolloutGroup:3")
    engine.submit(request((2, 3), drawn(1), group_size=2))
    return engine


def core_of(engine: VllmEngine) -> Core:
    return engine._llm.llm_engine


def test_requests_that_vllm_fails_are_told_as_failed(engine: VllmEngine) -> None:
    core_of(engine).raises = [EngineGenerateError("a kernel failed")]
    failed = engine.step()
    assert [(one.finish_reason, one.tokens) for one in failed] == [("aborted", ())] * 2
    assert {one.failure for one in failed} == {"vLLM raised EngineGenerateError: a kernel failed"}
    assert engine.unfinished == 0
    engine.submit(request((2, 3), drawn(1), "b"))
    assert [one.tokens for one in engine.step()] == [(5,)]


@pytest.mark.parametrize("error", [EngineDeadError("see the root cause above"), RuntimeError("Executor failed.")])
def test_dead_engine_is_the_death_of_its_worker(engine: VllmEngine, error: Exception) -> None:
    core_of(engine).raises = [error, ValueError("priority")]
    with pytest.raises(WorkerDiedError, match="vLLM's engine died: ") as caught:
        engine.step()
    assert caught.value.address == "RolloutGroup:3"
    # Other errors end the run as they are.
    with pytest.raises(ValueError, match="priority"):
        engine.step()


@pytest.mark.parametrize("reason", ["length", None])
@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_an_answer_without_probabilities_fails_alone(engine: VllmEngine, reason: str | None, logprob: float) -> None:
    core_of(engine).first_answer = answered(logprob, reason)
    failed, whole = engine.step()
    assert failed.failed
    assert (failed.tokens, whole.tokens, whole.failed) == ((), (5,), False)
    assert engine.unfinished == 0


def weights_of(model: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}


def adapter_of(layer: str, rank: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    up, down = contract_model().get_submodule(layer).weight.shape
    name = f"base_model.model.{layer}"
    return {
        f"{name}.lora_A.default.weight": torch.randn(rank, down, generator=generator),
        f"{name}.lora_B.default.weight": torch.randn(up, rank, generator=generator),
    }


LAYER = "model.layers.0.self_attn.q_proj"


def test_weights_go_into_vllm_one_by_one(folder: Path) -> None:
    engine = VllmEngine(folder, max_sequence_tokens=32)
    weights = weights_of(contract_model(), 1)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}

    def arriving() -> Iterator[tuple[str, Tensor]]:
        for name in list(weights):
            yield name, weights[name].clone()

    digest = engine.load_weights(ArrivingTensors(shapes, arriving()), version=3)
    assert digest == fingerprint(weights.items())
    assert engine._llm.loaded.keys() == weights.keys()
    assert all(torch.equal(engine._llm.loaded[name], value) for name, value in weights.items())
    # The tensor that is next may exist while vLLM holds the one before.
    assert engine._llm.most_alive <= 2
    assert engine._llm.llm_engine.emptied == 1
    assert engine.stats().version == 3


def test_wrong_weights_reach_vllm_not_at_all(folder: Path) -> None:
    engine = VllmEngine(folder, max_sequence_tokens=32)
    weights = weights_of(contract_model(), 1)
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"weight `model.norm.weight` of the engine's model has no value"):
        engine.load_weights(weights.items(), version=1)
    assert not engine._llm.loaded


def test_an_adapter_goes_into_vllm_as_an_adapter(folder: Path) -> None:
    engine = VllmEngine(folder, max_sequence_tokens=32, adapter_scale=2.0, adapter_rank=4)
    core = engine._llm.llm_engine
    for version in (1, 2):
        adapter = adapter_of(LAYER, 4, version)
        assert engine.load_weights(adapter.items(), version, adapter_only=True) == fingerprint(adapter.items())
        asked, settings, tensors = core.adapters[-1]
        assert asked.load_inplace
        assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 8.0, ["q_proj"])
        up = f"base_model.model.{LAYER}.lora_B"
        assert torch.equal(tensors[f"{up}.weight"], adapter[f"{up}.default.weight"])
    engine.submit(request((2, 3), drawn(1)))
    engine.step()
    assert not engine._llm.loaded
    assert core.emptied == 2
    assert engine._llm.arguments["max_lora_rank"] == 8
    assert [(asked.number, asked.load_inplace) for asked in core.added.values()] == [(1, False)]


def test_an_adapter_of_another_model_is_refused(folder: Path) -> None:
    engine = VllmEngine(folder, max_sequence_tokens=32, adapter_rank=4)
    adapter = {name.replace("q_proj", "p_proj"): value for name, value in adapter_of(LAYER, 4, 1).items()}
    with pytest.raises(ValueError, match="no layer"):
        engine.load_weights(adapter.items(), 1, adapter_only=True)
    assert not engine._llm.llm_engine.adapters


def test_without_adapters_in_vllm_one_is_merged(folder: Path) -> None:
    options = {"enable_lora": False}
    engine = VllmEngine(folder, max_sequence_tokens=32, adapter_scale=2.0, adapter_rank=4, options=options)
    adapter = adapter_of(LAYER, 4, 1)
    engine.load_weights(adapter.items(), 1, adapter_only=True)
    down, up = adapter.values()
    merged = contract_model().get_submodule(LAYER).weight + 2.0 * up @ down
    torch.testing.assert_close(engine._llm.loaded[f"{LAYER}.weight"], merged)
