"""vLLM itself keeps the contract of engines.

Run by `RLINF_VLLM_PYTHON=/opt/venvs/vllm/bin/python make nightly`, or by that interpreter's own pytest: see
docs/language-models.md.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request
from recipes.language.engines.engine import Engine
from recipes.language.engines.own.torch_engine import TorchEngine
from tests.unit.recipes.language.engines.contract import (
    END,
    LONGEST,
    EngineContract,
    contract_model,
    decode,
    greedy,
    prompts_of,
    run,
)

HAS_VLLM = importlib.util.find_spec("vllm") is not None
OTHER = os.environ.get("RLINF_VLLM_PYTHON", "")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(HAS_VLLM or not OTHER, reason="RLINF_VLLM_PYTHON names no interpreter with vllm")
def test_the_contract_in_the_interpreter_that_has_vllm() -> None:
    done = subprocess.run(
        [OTHER, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "--timeout=1700", __file__],
        cwd=Path(__file__).parents[6],
        capture_output=True,
        text=True,
        timeout=1750,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Engine]:
    """Start one engine for all tests: that takes ten seconds."""
    engine = make(folder, stop_token_ids=(END,), decode=decode, max_sequence_tokens=LONGEST)
    yield engine
    engine.stop()
    engine.stop()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_VLLM, reason="this interpreter has no vllm")
def test_200_greedy_answers_are_those_of_our_engine(shared: Engine) -> None:
    """Two engines add in other orders: where they part, the two likeliest tokens must be within rounding."""
    model = contract_model()
    ours = TorchEngine(contract_model(), stop_token_ids=(END,))
    prompts = prompts_of(200, seed=4)
    requests = [
        Request(request_id=str(index), prompt=prompt, params=greedy(8 + index % 40))
        for index, prompt in enumerate(prompts)
    ]
    first, second = run(shared, requests), run(ours, requests)

    ties = 0
    for name, answer in first.items():
        other = second[name]
        parted = next(
            (i for i, (a, b) in enumerate(zip(answer.tokens, other.tokens, strict=False)) if a != b),
            min(len(answer.tokens), len(other.tokens)),
        )
        difference = [abs(a - b) for a, b in zip(answer.logprobs[:parted], other.logprobs[:parted], strict=True)]
        assert max(difference, default=0.0) < 1e-3
        if answer.tokens != other.tokens:
            ties += 1
            with torch.no_grad():
                logits = model(torch.tensor([answer.prompt + answer.tokens[:parted]])).logits[0, -1]
            likeliest = logits.topk(2).values
            assert float(likeliest[0] - likeliest[1]) < 1e-4, name
    assert ties <= 4
    print(f"{len(first)} answers, {ties} parted at ties")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_VLLM, reason="this interpreter has no vllm")
class TestVllmEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def its_folder(self, folder: Path) -> None:
        self._folder = folder

    @pytest.fixture
    def engine(self, shared: Engine) -> Engine:
        shared.load_weights(contract_model().state_dict().items(), version=0)
        shared.resume()
        return shared

    def make(self, **options: Any) -> Engine:
        return make(self._folder, **options)


def make(folder: Path, **options: Any) -> Engine:
    from recipes.language.engines.vllm_engine import VllmEngine

    return VllmEngine(folder, **options)
