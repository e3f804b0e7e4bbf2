from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.engines import vllm_engine
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.engines.registry import make_engine
from recipes.language.models.load_model import built_tokenizer
from recipes.math.config import MathConfig
from rlinf_core.errors import ConfigError
from tests.unit.recipes.language.engines.contract import run

CPU = torch.device("cpu")


def config(backend: str, **rollout: Any) -> MathConfig:
    inputs = {
        "recipe": "math",
        "cluster": {"num_nodes": 1},
        "actor": {"model": {"hidden_dim": 32, "num_layers": 1}},
        "rollout": {"backend": backend, **rollout},
        "runner": {"seq_length": 32},
    }
    return MathConfig.model_validate(inputs)


def answer(engine: Any) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_new_tokens=6)
    return run(engine, [Request(request_id="a", prompt=(4, 5, 6), params=params)])["a", 0].tokens


class Reading:
    """Stands for an engine that reads a folder: draws with the model in it."""

    def __init__(self, folder: str, **options: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=options["dtype"])
        self.engine = TorchEngine(model, stop_token_ids=options["stop_token_ids"])


def test_locally_built_model_is_written_for_another_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(vllm_engine, "VllmEngine", Reading)
    tokenizer = built_tokenizer()

    ours = make_engine(config("torch"), tokenizer, (1,), CPU)
    assert isinstance(ours, TorchEngine)
    other: Any = make_engine(config("vllm"), tokenizer, (1,), CPU)
    assert answer(other.engine) == answer(ours)
    assert list(tmp_path.glob("rlinf-model-*"))

    del other
    gc.collect()
    assert not list(tmp_path.glob("rlinf-model-*"))


def test_an_engine_that_does_not_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(ConfigError, match="needs the package vllm") as raised:
        make_engine(config("vllm"), built_tokenizer(), (1,), CPU)
    assert "python_interpreter_path" in (raised.value.help or "")
    assert not list(tmp_path.glob("rlinf-model-*"))
