"""`recipe: math` with vLLM's own engine in an interpreter of its own, by the command that people type.

`RLINF_VLLM_PYTHON` names the interpreter: see docs/language-models.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PYTHON = os.environ.get("RLINF_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.nightly,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not PYTHON, reason="RLINF_VLLM_PYTHON names no interpreter with vllm"),
]

JOB = """\
recipe: math
cluster:
  num_nodes: 1
  component_placement:
    actor,reward: {{node_group: node, placement: 0}}
    rollout: {{node_group: engines, placement: '0:0'}}
  node_groups:
    - label: engines
      node_ranks: 0
      env_configs:
        - node_ranks: 0
          python_interpreter_path: {python}
          env_vars: [{{RLINF_TEST_MARK: {mark}}}]
rollout:
  backend: vllm
  check_logprobs: strict
  sampling_params: {{max_new_tokens: 8}}
reward: {{reward_type: exact}}
data: {{type: sums, rollout_batch_size: 32, max_prompt_length: 24, val_size: 50}}
algorithm: {{group_size: 8}}
actor: {{optim: {{lr: 3.0e-4}}}}
runner: {{seq_length: 32, max_steps: 4, save_interval: 1, val_check_interval: 4, max_restarts: 2}}
"""


def start(folder: Path, mark: str) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB.format(python=PYTHON, mark=mark))
    command = [sys.executable, "-m", "rlinf_cli", "train", "job.yaml", "runner.logger.log_path=runs"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment and vLLM in their memory."""
    result: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment, maps = (entry / "environ").read_bytes(), (entry / "maps").read_text()
        except OSError:
            continue
        if mark.encode() in environment and "/vllm/" in maps:
            result.append(int(entry.name))
    return result


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a job printed, once it has ended well."""
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output[-6000:]
    return output


def steps(folder: Path) -> list[tuple[int, dict[str, float]]]:
    files = list((folder / "runs").glob("*/metrics.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [(line["step"], line["metrics"]) for line in lines if "rollout/reward" in line["metrics"]]


def test_killed_engine_is_restarted_without_loss(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(start(whole, uuid.uuid4().hex))
    mark = uuid.uuid4().hex
    job = start(killed, mark)
    limit = time.monotonic() + 900
    # While the third step generates: the second is in the metrics.
    while not any(step >= 2 for step, _ in steps(killed)):
        assert job.poll() is None, ended(job)
        assert time.monotonic() < limit
        time.sleep(0.05)
    (engine,) = marked(mark)
    os.kill(engine, signal.SIGKILL)
    output = ended(job)

    assert "restart" in output
    undisturbed, recovered = steps(whole), steps(killed)
    assert [step for step, _ in undisturbed] == [1, 2, 3, 4]
    assert sorted({step for step, _ in recovered}) == [1, 2, 3, 4]
    for _, result in undisturbed:
        assert result["train/logprob_gap/max"] < 1e-3
    for name in ("rollout/reward", "rollout/response_length"):
        assert dict(recovered)[4][name] == undisturbed[3][1][name]

    from safetensors.torch import load_file

    first, second = (
        load_file(next((folder / "runs").iterdir()) / "model" / "model.safetensors") for folder in (whole, killed)
    )
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert float((value - second[name]).abs().max()) < 1e-5, name
