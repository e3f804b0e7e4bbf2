"""vLLM itself, and its server on loopback, keep the contract of engines.

Run by `RLINF_VLLM_PYTHON=/opt/venvs/vllm/bin/python make nightly`, or by that interpreter's own pytest: see
docs/language-models.md.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.config.rollout_config import ServerSettings
from recipes.language.engines.engine import Engine
from recipes.language.engines.server_answers import JsonServer, ServerError
from recipes.language.engines.server_engine import ServerEngine
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.models.load_model import built_tokenizer
from tests.unit.recipes.language.engines.contract import (
    END,
    LONGEST,
    VOCABULARY,
    EngineContract,
    contract_model,
    decode,
    greedy,
    prompts_of,
    request,
    run,
)

HAS_VLLM = importlib.util.find_spec("vllm") is not None
OTHER = os.environ.get("RLINF_VLLM_PYTHON", "")
PYTHON = OTHER or (sys.executable if HAS_VLLM else "")
TOKEN = "a-token-for-this-test"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(HAS_VLLM or not OTHER, reason="RLINF_VLLM_PYTHON names no interpreter with vllm")
def test_the_contract_in_the_interpreter_that_has_vllm() -> None:
    command = [OTHER, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "--timeout=1700", "-k", "not Server", __file__]
    folder = Path(__file__).parents[6]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1750, check=False)
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
    requests = [request(prompt, greedy(8 + index % 40), str(index)) for index, prompt in enumerate(prompts)]
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    contract_model().save_pretrained(folder)
    # The server's texts are those of `decode`.
    built_tokenizer("".join(chr(64 + token) for token in range(3, VOCABULARY))).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def url(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM's server, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    arguments = f"--model {served} --served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32"
    arguments += f" --max-model-len {LONGEST} --enforce-eager --api-key {TOKEN} --generation-config vllm"
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *arguments.split()],
            env={**os.environ, **settings},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            server = JsonServer(address, token=TOKEN, timeout=5, retries=0)
            limit = time.monotonic() + 400
            while True:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < limit, log.read_text()[-4000:]
                try:
                    server.get("/v1/models")
                    break
                except ServerError:
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON, reason="RLINF_VLLM_PYTHON names no interpreter with vllm")
class TestVllmServer(EngineContract):
    keeps_partial = False

    @pytest.fixture(autouse=True)
    def its_server(self, url: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("TEST_SERVER_TOKEN", TOKEN)
        self._url, self._folder, self._weights = url, served, str(tmp_path)
        yield
        engine = self.make()
        engine.load_weights(contract_model().state_dict().items(), version=0)
        engine.stop()

    def make(self, **options: Any) -> Engine:
        inputs = {"url": self._url, "token_env": "TEST_SERVER_TOKEN", "weights_dir": self._weights, "timeout": 120}
        options = {"stop_token_ids": (END,), "decode": decode, "max_sequence_tokens": LONGEST} | options
        return ServerEngine(ServerSettings.model_validate(inputs), self._folder, **options)
