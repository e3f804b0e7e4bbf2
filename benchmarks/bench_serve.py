"""Four tenants of `rlinf serve` at once against the same work by one after another.

    python -m benchmarks.bench_serve [--steps 60] [--rows 8]

Each tenant trains an adapter of its own with data of its own: a pass of so many rows, an optimizer step, and at every
fifth step four answers from a snapshot. Its losses at once must be those alone to the bit, and all work together may
take at most 1/0.9 of its time by one tenant after another. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.table import Result, run_parts
from recipes.serve.wire.messages import PASS_MESSAGE, PASS_RESULT

TENANTS = ("ann", "ben", "cleo", "dan")
LENGTH, SHARE = 64, 0.9


class Tenant:
    """A tenant's client, which speaks the wire without the SDK: its own time would count."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60)

    def _result(self, path: str, **request: Any) -> Any:
        promised = self._http.post(path, **request).raise_for_status().json()
        while True:
            response = self._http.post("retrieve_future", json={"request_id": promised["request_id"]})
            if response.status_code != httpx.codes.REQUEST_TIMEOUT:
                break
        is_json = "json" in response.headers["content-type"]
        if is_json and "error" in response.json():
            raise SystemExit(response.json()["error"])
        return response.json() if is_json else response.content

    def train(self, seed: int, steps: int, rows: int) -> list[float]:
        """Train a new adapter, and return its losses."""
        draw = random.Random(seed)
        session = self._http.post("create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        lora = {"rank": 8, "seed": seed}
        fields = {"session_id": session, "model_seq_id": 0, "base_model": "rlinf/base", "lora_config": lora}
        model = self._result("create_model", json=fields)["model_id"]
        losses: list[float] = []
        seq = 0
        for step in range(steps):
            data = [[draw.randrange(3, 15) for _ in range(LENGTH)] for _ in range(rows)]
            body = {"content": _pass(model, seq + 1, data), "headers": {"Content-Type": "application/x-protobuf"}}
            losses.append(PASS_RESULT.FromString(self._result("forward_backward", **body)).metrics["loss:sum"])
            adam = {"model_id": model, "seq_id": seq + 2, "adam_params": {"learning_rate": 1e-3}}
            self._result("optim_step", json=adam)
            seq += 2
            if step % 5 == 4:
                seq += 1
                self._sample(model, seq, step, data[0][:8])
        self._http.post(f"sessions/{session}/finish", json={})
        return losses

    def _sample(self, model: str, seq: int, number: int, prompt: list[int]) -> None:
        saved = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number}
        sampler = self._result("save_weights_for_sampler", json=saved)["sampling_session_id"]
        chunks = [{"type": "encoded_text", "tokens": prompt}]
        params = {"max_tokens": 16, "stop": [], "seed": number}
        asked = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 4, "sampling_params": params}
        self._result("asample", json={**asked, "prompt": {"chunks": chunks}})


def _pass(model: str, seq: int, rows: Sequence[Sequence[int]]) -> bytes:
    message = PASS_MESSAGE(model_id=model, seq_id=seq, loss="cross_entropy")
    for row in rows:
        item = message.data.add()
        item.input.add().text.tokens = np.asarray(row[:-1], np.int32).tobytes()
        for name, values, kind in (
            ("target_tokens", np.asarray(row[1:], np.int64), 2),
            ("weights", np.ones(len(row) - 1, np.float32), 1),
        ):
            tensor = item.values[name]
            tensor.dense, tensor.dtype = values.tobytes(), kind
            tensor.shape.append(len(values))
    return message.SerializeToString()


def measure(steps: int, rows: int) -> Iterable[Result]:
    """Serve, and measure both ways."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        names = f"server.tenants=[{','.join(TENANTS)}]"
        command = [sys.executable, "-m", "rlinf_cli", "serve", "serve_laptop", f"server.port={port}", names]
        state = f"server.state_dir={folder}/state"
        service = subprocess.Popen(
            [*command, state], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            for line in service.stdout or ():
                if "# dan" in line:
                    break
            keys = [Path(folder, "state/keys", name).read_text().strip() for name in TENANTS]
            tenants = [Tenant(f"http://127.0.0.1:{port}", key) for key in keys]
            tenants[0].train(9, 2, rows)  # what is done once
            began = time.perf_counter()
            alone = [tenant.train(seed, steps, rows) for seed, tenant in enumerate(tenants)]
            middle = time.perf_counter()
            with ThreadPoolExecutor(len(tenants)) as pool:
                together = list(pool.map(lambda pair: pair[1].train(pair[0], steps, rows), enumerate(tenants)))
            ended = time.perf_counter()
        finally:
            service.send_signal(signal.SIGINT)
            service.communicate(timeout=60)
    equal = sum(one == other for one, other in zip(alone, together, strict=True))
    ratio = (middle - began) / (ended - middle)
    seconds = f"{middle - began:.1f} s one after another, {ended - middle:.1f} s at once"
    yield Result(
        "losses at once, those of a run alone", f"{steps} steps each", f"{equal} of 4", "4 of 4", equal == len(TENANTS)
    )
    yield Result("throughput of four tenants at once", seconds, f"{ratio:.2f}", f">= {SHARE}", ratio >= SHARE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8)
    asked = parser.parse_args()
    return run_parts({"tenants": lambda: measure(asked.steps, asked.rows)}, None)


if __name__ == "__main__":
    sys.exit(main())
