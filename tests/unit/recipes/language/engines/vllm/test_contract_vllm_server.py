"""The engine that asks a server keeps the contract with vLLM's own server, on loopback.

`RLINF_VLLM_PYTHON` names an interpreter with vllm: see docs/language-models.md.
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

pytest.importorskip("transformers")

from recipes.language.config.rollout_config import ServerSettings
from recipes.language.engines.engine import Engine
from recipes.language.engines.http_json import JsonServer, ServerError
from recipes.language.engines.server_engine import ServerEngine
from recipes.language.models.load_model import built_tokenizer
from tests.unit.recipes.language.engines.contract import (
    END,
    LONGEST,
    VOCABULARY,
    EngineContract,
    contract_model,
    decode,
)

PYTHON = os.environ.get("RLINF_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
TOKEN = "a-token-for-this-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder)
    # The server's texts are those of `decode`.
    built_tokenizer("".join(chr(64 + token) for token in range(3, VOCABULARY))).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM's server, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    arguments = f"--model {folder} --served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32"
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
    def its_server(self, url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("TEST_SERVER_TOKEN", TOKEN)
        self._url, self._folder, self._weights = url, folder, str(tmp_path)
        yield
        engine = self.make()
        engine.load_weights(contract_model().state_dict().items(), version=0)
        engine.stop()

    def make(self, **options: Any) -> Engine:
        inputs = {
            "url": self._url,
            "token_env": "TEST_SERVER_TOKEN",
            "weights_dir": self._weights,
            "timeout": 120,
        }
        options = {"stop_token_ids": (END,), "decode": decode, "max_sequence_tokens": LONGEST} | options
        return ServerEngine(ServerSettings.model_validate(inputs), self._folder, **options)
