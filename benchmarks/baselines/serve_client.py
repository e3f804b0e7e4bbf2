"""`rlinf serve` as its own process, and a client that speaks its wire without the SDK, whose time would count."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from recipes.serve.service.requests_and_results import PASS_MESSAGE, PASS_RESULT, SAMPLE_RESULT

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 240.0
_DTYPES = {np.dtype(np.float32): 1, np.dtype(np.int64): 2}


class RefusedError(Exception):
    """A result that the service refused."""


class Client:
    """A tenant's client with one model."""

    def __init__(self, url: str, key: str, base_model: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=300)
        self._base_model = base_model
        self._seq = 0
        self._samplers = 0

    def begin(self, rank: int, seed: int, **lora_settings: bool) -> str:
        """Begin a session with a new adapter, and return the id of the model."""
        self.session = self.http.post("create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        lora = {"rank": rank, "seed": seed, **lora_settings}
        fields = {"session_id": self.session, "model_seq_id": 0, "base_model": self._base_model, "lora_config": lora}
        self.model = self.result(self._post("create_model", fields))["model_id"]
        self._seq = self._samplers = 0
        return self.model

    def end(self) -> None:
        """End the session."""
        self.http.post(f"sessions/{self.session}/finish", json={})

    def result(self, request_id: str) -> Any:
        """Return the result of a request: an object, or the bytes of a message.

        Raises:
            RefusedError: the request was refused.
        """
        while True:
            response = self.http.post("retrieve_future", json={"request_id": request_id})
            if response.status_code != httpx.codes.REQUEST_TIMEOUT:
                break
        if "json" not in response.headers["content-type"]:
            return response.content
        content = response.json()
        if response.is_error or "error" in content:
            raise RefusedError(content)
        return content

    def _post(self, path: str, fields: Mapping[str, Any]) -> str:
        return self.http.post(path, json=dict(fields)).raise_for_status().json()["request_id"]

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def forward_backward(
        self, data: Sequence[tuple[Sequence[int], Mapping[str, Any]]], loss: str, **settings: float
    ) -> str:
        """Send a pass over rows of tokens with the inputs of a loss, and return the id of its result."""
        body = pass_body(self.model, self._next(), data, loss, **settings)
        response = self.http.post(
            "forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"}
        ).raise_for_status()
        return response.json()["request_id"]

    def loss(self, request_id: str) -> float:
        """Return the loss of a pass."""
        return PASS_RESULT.FromString(self.result(request_id)).metrics["loss:sum"]

    def optim_step(self, rate: float, **adam: float) -> str:
        """Send an optimizer step, and return the id of its result."""
        fields = {"model_id": self.model, "seq_id": self._next(), "adam_params": {"learning_rate": rate, **adam}}
        return self._post("optim_step", fields)

    def snapshot(self) -> str:
        """Return a sampler of the weights as they are."""
        number = self._samplers
        self._samplers += 1
        saved = {"model_id": self.model, "seq_id": self._next(), "sampling_session_seq_id": number}
        return self.result(self._post("save_weights_for_sampler", saved))["sampling_session_id"]

    def sample(self, sampler: str, number: int, prompt: Sequence[int], samples: int, **params: Any) -> str:
        """Send a request for answers to a prompt, and return the id of its result."""
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        fields = {"sampling_session_id": sampler, "seq_id": number, "num_samples": samples, "sampling_params": params}
        return self._post("asample", {**fields, "prompt": {"chunks": chunks}})

    def answers(self, request_id: str) -> list[tuple[list[int], list[float]]]:
        """Return answers: tokens, and their log-probabilities."""
        message = SAMPLE_RESULT.FromString(self.result(request_id))
        return [
            (np.frombuffer(answer.tokens, np.int32).tolist(), np.frombuffer(answer.logprobs, np.float32).tolist())
            for answer in message.sequences
        ]


def pass_body(
    model: str,
    seq: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
    loss: str,
    **settings: float,
) -> bytes:
    """Return the bytes of a request for a pass."""
    message = PASS_MESSAGE(model_id=model, seq_id=seq, loss=loss)
    for name, value in settings.items():
        message.numbers[name] = value
    for tokens, inputs in data:
        item = message.data.add()
        item.input.add().text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            array = np.asarray(values, np.int64 if name == "target_tokens" else np.float32)
            tensor = item.values[name]
            tensor.dense, tensor.dtype = array.tobytes(), _DTYPES[array.dtype]
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


class Service(NamedTuple):
    """A running service.

    Attributes:
        url: the address.
        keys: the keys by tenant.
        pid: the process of the server.
        base_model: the name of the model.
    """

    url: str
    keys: dict[str, str]
    pid: int
    base_model: str

    def client(self, tenant: str) -> Client:
        """Return a client of a tenant."""
        return Client(self.url, self.keys[tenant], self.base_model)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the server and all processes that it has started, ended ones included."""
        rows: dict[int, tuple[int, float]] = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            rows[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
        below = {self.pid}
        while children := {pid for pid, (parent, _) in rows.items() if parent in below} - below:
            below |= children
        return sum(rows[pid][1] for pid in below if pid in rows)


@contextmanager
def serving(tenants: Sequence[str], config: str, *overrides: str) -> Iterator[Service]:
    """Serve a shipped configuration as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        name = "benchmark/model"
        settings = (
            f"server.port={port}",
            f"server.tenants=[{','.join(tenants)}]",
            f"server.state_dir={folder}/state",
            f"server.model_name={name}",
            "server.session_timeout=3600",
        )
        command = [sys.executable, "-m", "rlinf_cli", "serve", config, *settings, *overrides]
        log = Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Beside whatever cluster there is on this machine.
                env={**os.environ, "RLINF_ADDRESS": "local"},
            )
        try:
            end = time.monotonic() + _START_SECONDS
            while "TINKER_API_KEY" not in log.read_text():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the service did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            keys = {tenant: Path(folder, "state/keys", tenant).read_text().strip() for tenant in tenants}
            yield Service(f"http://127.0.0.1:{port}", keys, process.pid, name)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
