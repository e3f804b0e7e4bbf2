"""Changes that save memory: sound, smaller, and those that leave what is learned as it is come first."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.embodied.memory import job_forecast
from recipes.embodied.memory.savings import savings
from rlinf_core import load_job

VLM = (
    "env.train.env_type=franka_vision",
    "env.train.task=touch",
    "env.train.total_num_envs=16",
    "actor.model={model_type: vlm_policy, hidden_dim: 32, options: {num_layers: 2}}",
)


@pytest.fixture(autouse=True)
def bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started to be measured."""
    empty = dict.fromkeys(("init", "train", "act", "start"), 0)
    monkeypatch.setattr(job_forecast, "empty_process", lambda component, model_type, modules=(): empty)  # pyright: ignore


def config_of(*overrides: str) -> Any:
    job = load_job("laptop", overrides)
    job.raise_if_bad()
    return job.config


def actor_peak(*overrides: str) -> int:
    return job_forecast.forecast(config_of(*overrides), {})[0].peak


def test_savings_are_sound_and_save() -> None:
    before = actor_peak()
    changes = savings(config_of())
    assert changes
    for change in (changes[0], changes[len(changes) // 2]):
        assert actor_peak(*change) < before


def test_fewer_environments_keep_parts_of_a_batch_large() -> None:
    fewer = [each for each in savings(config_of()) if each[0].startswith("env")]
    # 64 environments of 50 steps in four batches: of 32 a batch has 400.
    halves = [f"actor.micro_batch_size={size}" for size in (400, 200, 100, 50, 25, 10, 5, 2, 1)]
    half = ("env.train.total_num_envs=32", "env.eval.total_num_envs=32", "actor.global_batch_size=400")
    assert fewer[: len(halves)] == [(*half, each) for each in halves]


def test_a_large_policy_computes_activations_again_first() -> None:
    first, *others = savings(config_of(*VLM))
    assert first == ("actor.fsdp_config.gradient_checkpointing=true",)
    assert any(each[0] == first[0] and each[1].startswith("actor.micro_batch_size=") for each in others)
    assert actor_peak(*VLM, *first) < actor_peak(*VLM)
    again = savings(config_of(*VLM, *first))
    assert not any(first[0] in each for each in (*again, *savings(config_of())))


def test_fewer_simulator_processes_precede_fewer_environments() -> None:
    config = config_of()
    train = config.env.train.model_copy(update={"num_processes": 8})
    changes = savings(config.model_copy(update={"env": config.env.model_copy(update={"train": train})}))
    processes = [each for each in changes if each[0].startswith("env.train.num_processes")]
    assert processes == [(f"env.train.num_processes={count}",) for count in (4, 2, 1)]
    environments = next(number for number, each in enumerate(changes) if each[0].startswith("env.train.total_num_envs"))
    assert changes.index(processes[-1]) < environments
