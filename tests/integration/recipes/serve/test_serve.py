"""`rlinf serve` as a command, and the unmodified Tinker SDK against it."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.integration.recipes.serve.service_command import NO_SDK, PYTHON, RLINF, run_client, service

PROGRAM = Path(__file__).with_name("tinker_program.py")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_service_starts_answers_and_ends(tmp_path: Path) -> None:
    with service(tmp_path, "actor.model.hidden_dim=32", "actor.model.num_layers=1") as running:
        headers = {"X-API-Key": running.key}
        answer = httpx.get(f"{running.url}/api/v1/get_server_capabilities", headers=headers)
        assert answer.json()["supported_models"][0]["model_name"] == "rlinf/base"
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        assert httpx.post(f"{running.url}/api/v1/create_session", json=fields).status_code == 401
        created = httpx.post(f"{running.url}/api/v1/create_session", json=fields, headers=headers).json()
        lora = {"rank": 4, "seed": 1}
        model = {"session_id": created["session_id"], "model_seq_id": 0, "base_model": "rlinf/base"}
        promised = httpx.post(
            f"{running.url}/api/v1/create_model", json={**model, "lora_config": lora}, headers=headers
        )
        request = {"request_id": promised.json()["request_id"]}
        result = httpx.post(f"{running.url}/api/v1/retrieve_future", json=request, headers=headers, timeout=60)
        assert result.json()["model_id"] == f"{created['session_id']}:train:0"
    assert running.process.returncode == 130
    assert json.loads((running.folder / "run.json").read_text())["status"] == "interrupted"
    # No key reaches a log.
    assert [file for file in (running.folder / "logs").rglob("*.log") if running.key in file.read_text()] == []


def test_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [str(RLINF), "serve", "serve_laptop", f"server.port={taken.getsockname()[1]}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "is in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_recipes_are_not_served(tmp_path: Path) -> None:
    done = subprocess.run([str(RLINF), "serve", "math_laptop"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "rlinf train" in done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason=NO_SDK)
def test_unmodified_sdk_trains_samples_and_resumes(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        done = run_client(running, [str(PROGRAM), str(tmp_path)], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["losses"] == sorted(seen["losses"], reverse=True)
    assert seen["resumed_is_equal"]
    assert seen["answers"] == [5, 5, 5]
    assert seen["sums"]["importance_sampling"] == pytest.approx(-56.0, rel=1e-4)
    assert seen["two_shape"] == [8, 2]
    assert "stable_reinforce" in seen["refused"]
    assert "no step was taken" in seen["after_refusal"]
    assert seen["final"].endswith("/sampler_weights/final")
    assert seen["scores"][0] is None
