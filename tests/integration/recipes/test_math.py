"""`recipe: math` by the command that people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlinf_cli", "train", "math_laptop", "runner.logger.log_path=runs", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=550, check=False)


def run_folder(folder: Path) -> Path:
    return max((folder / "runs").iterdir(), key=lambda each: each.stat().st_mtime)


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if "rollout/reward" in line["metrics"]]


def test_a_model_built_on_the_spot_is_trained_kept_and_shown(tmp_path: Path) -> None:
    done = train(tmp_path, "runner.max_steps=4", "rollout.check_logprobs=warn")
    assert done.returncode == 0, done.stderr
    run = run_folder(tmp_path)

    steps = metrics(run)
    assert len(steps) == 4
    # Engine and trainer are the same model: what they say of the drawn tokens differs by rounding.
    assert max(step["train/logprob_gap/max"] for step in steps) < 1e-4
    assert all(0 <= step["rollout/reward"] <= 1 for step in steps)
    shown = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "samples", str(run), "--order", "best", "-n", "2", "--output", "json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    record = json.loads(shown.stdout)
    assert record["schema"] == "rlinf.samples/1"
    assert [each["reward"] for each in record["samples"]] == [1.0, 1.0]
    assert all(each["text"] == each["answer"] for each in record["samples"])
    assert "".join(record["samples"][0]["pieces"]).startswith(record["samples"][0]["text"])

    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, tokenizer = (kind.from_pretrained(run / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer)


def test_a_resumed_run_ends_with_the_weights_of_one_that_went_on(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
    common = ("runner.val_check_interval=-1", "runner.save_interval=2", "actor.optim.total_training_steps=4")
    assert train(straight, "runner.max_steps=4", *common).returncode == 0
    assert train(stopped, "runner.max_steps=2", *common).returncode == 0
    resumed = train(stopped, "runner.max_steps=4", "runner.resume_dir=auto", *common)
    assert resumed.returncode == 0, resumed.stderr

    import torch
    from safetensors.torch import load_file

    first, second = (load_file(run_folder(folder) / "model" / "model.safetensors") for folder in (straight, stopped))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_several_of_each_share_the_work(tmp_path: Path) -> None:
    placement = "{actor: {node_group: node, placement: '0:0-1'}, rollout: {node_group: node, placement: '0:0-1'},"
    placement += " reward: {node_group: node, placement: '0:0-1'}}"

    done = train(tmp_path, "runner.max_steps=2", f"cluster.component_placement={placement}")

    assert done.returncode == 0, done.stderr
    assert len(metrics(run_folder(tmp_path))) == 2
