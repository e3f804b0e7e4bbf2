"""The forecast of memory of language models: sizes by hand, and what saves some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.language.memory import job_forecast
from rlinf_core import ConfigError, load_job
from rlinf_core.job.process_forecast import ProcessForecast

# An empty process of each kind, in bytes.
BASES = {"actor": 120, "critic": 110, "reference": 105, "rollout": 95, "reward": 50}
WIDTH, LAYERS, SYMBOLS = 64, 2, 24
# Attention with three biases, an MLP of twice the width, two norms; embedding, output matrix and the last norm.
LAYER = 4 * WIDTH**2 + 3 * WIDTH + 3 * 2 * WIDTH**2 + 2 * WIDTH
WEIGHTS = 4 * (LAYERS * LAYER + 2 * SYMBOLS * WIDTH + WIDTH)
SMALL = (f"actor.model.hidden_dim={WIDTH}", "actor.warm_start.steps=0", "data.rollout_batch_size=4")


@pytest.fixture(autouse=True)
def bases(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(config: Any, component: str, module: str, program: str = "") -> dict[str, int]:
        size = BASES[component]
        return {"start": size - 10, "init": size - 5, "work": size}

    monkeypatch.setattr(job_forecast, "empty_process", empty)


def config_of(*overrides: str, file: str = "math_laptop") -> Any:
    job = load_job(file, (*SMALL, *overrides))
    job.raise_if_bad()
    return job.config


def forecast(*overrides: str, file: str = "math_laptop", **counts: int) -> dict[str, ProcessForecast]:
    found = job_forecast.forecast(config_of(*overrides, file=file), counts)
    return {each.component: each for each in found}


def parts(found: ProcessForecast, phase: str) -> dict[str, int]:
    return dict(next(each.parts for each in found.phases if each.phase == phase))


def test_weights_are_counted_without_their_memory() -> None:
    found = forecast()
    actor = parts(found["actor"], "run_training")
    assert actor["base"] == BASES["actor"]
    assert actor["weights"] == actor["gradients"] == WEIGHTS
    assert actor["optimizer"] == 2 * WEIGHTS
    assert parts(found["rollout"], "sync_model_from_actor")["weights"] == WEIGHTS
    # They become one buffer, that is sent from.
    assert parts(found["actor"], "init_worker") == {"base": 115, "weights": WEIGHTS, "copied weights": WEIGHTS}


def test_sole_engine_keeps_the_received_weights() -> None:
    alone, shared = (parts(forecast(rollout=count)["actor"], "run_training")["sent weights"] for count in (1, 2))
    assert alone == shared + WEIGHTS


def test_adapters_alone_are_trained_and_sent() -> None:
    found = forecast("actor.model.lora={rank: 4, alpha: 8}")
    actor, rollout = parts(found["actor"], "run_training"), parts(found["rollout"], "generate")
    # Two matrices of rank 4 for each of seven layers: four squares, three of an MLP of twice the width.
    adapter = 4 * LAYERS * 4 * (4 * 2 * WIDTH + 3 * 3 * WIDTH)
    assert actor["gradients"] == adapter
    assert actor["weights"] == WEIGHTS + adapter
    assert rollout["merged adapter"] == 4 * LAYERS * (4 * WIDTH**2 + 3 * 2 * WIDTH**2)
    assert rollout["weights"] == WEIGHTS


def test_keys_and_values_are_those_of_the_longest_answers() -> None:
    few, many = (
        parts(forecast(f"data.rollout_batch_size={prompts}", "runner.val_check_interval=-1")["rollout"], "generate")
        for prompts in (4, 8)
    )
    assert many["keys and values"] == 2 * few["keys and values"]
    # Prompts of four characters and answers of eight tokens; each token has a row of numbers, too.
    token = 4 * 2 * LAYERS * WIDTH
    assert few["keys and values"] == 4 * 8 * (12 * token + 8 * 20)


def test_evaluations_are_drawn_too() -> None:
    drawn = forecast("runner.val_check_interval=10")["rollout"]
    none = forecast("runner.val_check_interval=-1")["rollout"]
    # 200 problems of evaluation against 32 answers.
    assert parts(drawn, "generate")["keys and values"] * 32 == parts(none, "generate")["keys and values"] * 200


def test_a_bound_on_running_tokens_bounds_keys_and_values() -> None:
    found = parts(forecast("rollout.max_running_tokens=120")["rollout"], "generate")
    assert found["keys and values"] == 10 * (12 * 4 * 2 * LAYERS * WIDTH + 8 * 20)


def test_fewer_tokens_in_a_pass_take_less() -> None:
    longer = ("runner.seq_length=160", "rollout.sampling_params.max_new_tokens=128")
    most, few = (
        parts(forecast(*longer, f"actor.max_tokens_per_micro_batch={tokens}")["actor"], "run_training")["activations"]
        for tokens in (4096, 256)
    )
    assert few < most / 3


def test_critic_and_reference_are_counted_where_they_are() -> None:
    assert set(forecast()) == {"actor", "rollout", "reward"}
    critic = parts(forecast(file="math_laptop_ppo")["critic"], "run_training")
    # A value in the place of logits, whose matrix stays and is not trained.
    assert critic["weights"] == WEIGHTS + 4 * (WIDTH + 1)
    assert critic["gradients"] == critic["weights"] - 4 * SYMBOLS * WIDTH
    place = "cluster.component_placement.reference={node_group: node, placement: 0}"
    reference = forecast("algorithm.kl_beta=0.1", place)["reference"]
    assert parts(reference, "evaluate")["weights"] == WEIGHTS
    assert "gradients" not in parts(reference, "evaluate")


def test_shards_are_parts_of_weights_and_are_sent_whole() -> None:
    whole, half = (parts(forecast(actor=count, rollout=2)["actor"], "run_training") for count in (1, 2))
    assert half["weights"] == whole["weights"] // 2
    assert half["optimizer"] == whole["optimizer"] // 2
    assert half["sent weights"] > WEIGHTS


def folder_of(path: Path, **sizes: Any) -> str:
    from transformers import LlamaConfig

    config: Any = LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, **sizes)
    config.save_pretrained(path)
    return f"actor.model.model_path={path}"


def test_the_configuration_of_a_model_is_enough(tmp_path: Path) -> None:
    found = forecast(folder_of(tmp_path, num_attention_heads=4, num_key_value_heads=2))["actor"]
    layer = 2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert parts(found, "run_training")["weights"] == 4 * (3 * layer + 2 * 1000 * 64 + 64)
    assert "the tokenizer is not counted: its folder has none on this machine" in found.notes
    assert any("max_prompt_length" in note for note in found.notes)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        forecast("actor.model.model_path=/elsewhere")


def test_of_another_engine_it_is_told_what_is_known(tmp_path: Path) -> None:
    path = folder_of(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=256)
    short = ("runner.seq_length=64", "rollout.sampling_params.max_new_tokens=32", "data.max_prompt_length=32")
    notes = forecast(path, *short, file="math_grpo_8gpu")["rollout"].notes
    assert notes[0].startswith("vllm takes 85% of each of its accelerators")
    # Three layers of two heads of 256 numbers, keys and values, in bf16.
    assert notes[0].endswith("for each token 6 KiB of keys and values")
    assert notes[1] == "what vllm takes of the host's memory is not counted"


def test_savings_are_sound_and_save() -> None:
    longer = ("runner.seq_length=160", "rollout.sampling_params.max_new_tokens=128", "data.rollout_batch_size=32")
    before = forecast(*longer)
    changes = job_forecast.savings(config_of(*longer))
    tokens = next(each for each in changes if each == ("actor.max_tokens_per_micro_batch=1024",))
    running = next(each for each in changes if each[0].startswith("rollout.max_running_tokens"))
    fewer = next(each for each in changes if each[0] == "data.rollout_batch_size=8")
    assert forecast(*longer, *tokens)["actor"].peak < before["actor"].peak
    assert forecast(*longer, *running)["rollout"].peak < before["rollout"].peak
    assert sum(each.peak for each in forecast(*longer, *fewer).values()) < sum(each.peak for each in before.values())
    assert changes.index(tokens) < changes.index(running) < changes.index(fewer)
