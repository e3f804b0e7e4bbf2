"""Recipe math learns what its configs promise, also by vLLM's own engine; and the memory that it takes is forecast.

`RLINF_VLLM_PYTHON` names an interpreter with vLLM: see docs/language-models.md.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.integration.recipes.conftest import Train
from tests.rlinf_command import rlinf


def train(folder: Path, name: str, *overrides: str) -> Path:
    """Run a shipped config to its end, and return the run's folder."""
    rlinf(folder, "train", name, "runner.logger.log_path=runs", *overrides)
    return max((folder / "runs").iterdir(), key=lambda item: item.stat().st_mtime)


def metrics(run: Path, name: str) -> list[float]:
    lines = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_built_on_the_spot_learns_sums(tmp_path: Path, seed: int) -> None:
    run = train(tmp_path, "math/sums-laptop", f"actor.seed={seed}", f"data.seed={seed}")

    rewards = metrics(run, "rollout/reward")
    last = statistics.fmean(rewards[-5:])
    assert last >= 0.88
    assert last - rewards[0] >= 0.4


def greedy_score(folder: Path, problems: list[tuple[str, str]], longest: int) -> float:
    """Return the share of problems that the model in a folder answers, by plain transformers, one at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    right = 0
    for asked, answer in problems:
        tokens = tokenizer(asked, return_tensors="pt")
        drawn = model.generate(**tokens, max_new_tokens=longest, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        text, ended, _ = tokenizer.decode(drawn, skip_special_tokens=True).partition("\n")
        right += bool(ended) and text.strip() == answer
    return right / len(problems)


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not os.environ.get("SMOLLM2"), reason="SMOLLM2 names no folder: see configs/math/smollm2-laptop.yaml"
)
@pytest.mark.parametrize("seed", [0, 1])
def test_pretrained_model_learns_two_digit_sums(tmp_path: Path, seed: int) -> None:
    from recipes.language.data.problem_sources import load_problems
    from rlinf_core.job.load import load_job

    run = train(tmp_path, "math/smollm2-laptop", f"actor.seed={seed}", "actor.threads=1")

    scores = metrics(run, "eval/pass@1")
    assert scores[0] == pytest.approx(0.3, abs=0.08)
    assert scores[-1] >= 0.65
    config: Any = load_job("math/smollm2-laptop", (), environ={}).config
    problems = load_problems(config.data, evaluation=True)
    asked = [(config.data.few_shot + problems[index].prompt, problems[index].answer) for index in range(len(problems))]
    # Greedy ties are broken by rounding, which differs between batches.
    longest = config.rollout.sampling_params.max_new_tokens
    assert greedy_score(run / "model", asked, longest) == pytest.approx(scores[-1], abs=0.011)


LOSSES = ("gmpo", "cispo", "sapo")
BY_SEQUENCE = "algorithm.loss_agg_func=seq-mean-token-mean"
# Rewards differ by length: a model so small has few right answers.
DIFFERING = "reward.soft_overlong=6"


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_losses_take_the_same_steps_at_ratio_one(train_math: Train) -> None:
    """One optimizer step a training step learns from tokens of the same weights: all gradients are the plain one."""
    small = (BY_SEQUENCE, DIFFERING, "algorithm.n_minibatches=1", "runner.max_steps=3")
    norms = {
        loss: [
            step.metrics["train/actor/grad_norm"] for step in train_math(f"algorithm.loss_type={loss}", *small).metrics
        ]
        for loss in ("actor", *LOSSES)
    }
    assert all(norm > 0 for norm in norms["actor"])
    for loss in LOSSES:
        assert norms[loss] == pytest.approx(norms["actor"], rel=1e-3), loss


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_learns_sums(tmp_path: Path, loss: str) -> None:
    run = train(tmp_path, "math/sums-laptop", f"algorithm.loss_type={loss}", BY_SEQUENCE, "runner.max_steps=60")

    rewards = metrics(run, "rollout/reward")
    # The rise is 0.23 to 0.35; its standard error 0.023, as a step has 256 answers.
    assert statistics.fmean(rewards[-5:]) - statistics.fmean(rewards[:3]) >= 0.15


PYTHON = os.environ.get("RLINF_VLLM_PYTHON", "")
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


def steps_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    files = list((folder / "runs").glob("*/metrics.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [(line["step"], line["metrics"]) for line in lines if "rollout/reward" in line["metrics"]]


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not PYTHON, reason="RLINF_VLLM_PYTHON names no interpreter with vllm")
def test_killed_engine_is_restarted_without_loss(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(start(whole, uuid.uuid4().hex))
    mark = uuid.uuid4().hex
    job = start(killed, mark)
    limit = time.monotonic() + 900
    # While the third step generates: the second is in the metrics.
    while not any(step >= 2 for step, _ in steps_of(killed)):
        assert job.poll() is None, ended(job)
        assert time.monotonic() < limit
        time.sleep(0.05)
    (engine,) = marked(mark)
    os.kill(engine, signal.SIGKILL)
    output = ended(job)

    assert "restart" in output
    undisturbed, recovered = steps_of(whole), steps_of(killed)
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


SHORT = ("runner.max_steps=2", "runner.val_check_interval=-1", "runner.save_interval=-1")
# Share of the peak by which a forecast of the host's memory may be off.
NEAR = 0.25
CONFIGURATIONS = {
    "embodied/pick-laptop": (),
    "embodied/franka-vla-laptop": (),
    "math/sums-laptop": (),
    "math/sums-ppo-laptop": (),
    "agent/calculator-laptop": ("actor.warm_start.steps=50",),
    "sft/pick-laptop": ("data.train_data_paths=shown",),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident set is read from /proc")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_forecast_is_near_the_peaks_of_a_run(name: str, tmp_path: Path) -> None:
    if name == "sft/pick-laptop":
        rlinf(tmp_path, "record", "embodied/pick-laptop", "-o", "shown", "-n", "4")
    rlinf(tmp_path, "train", name, *SHORT, *CONFIGURATIONS[name])
    (run,) = (tmp_path / "runs").iterdir()
    components = json.loads(rlinf(tmp_path, "inspect", "memory", str(run), "--json"))["components"]
    # Where nothing is evaluated, recipe `sft` measures its actor alone.
    measured = {component: item for component, item in components.items() if item["host_measured"] is not None}
    assert "actor" in measured
    ratios = {component: value["host"] / value["host_measured"] for component, value in measured.items()}
    print({component: round(ratio, 3) for component, ratio in ratios.items()})
    assert {component: ratio for component, ratio in ratios.items() if abs(ratio - 1) > NEAR} == {}
