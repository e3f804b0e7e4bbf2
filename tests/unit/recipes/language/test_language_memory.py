"""The forecast of memory of language models: sizes by hand, and what saves some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.language import language_memory
from recipes.language.models.load_model import built_model, make_tokenizer
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import with_lora
from rlinf_core import ConfigError, HybridComponentPlacement, load_job
from rlinf_core.job.recipe import ProcessForecast

WIDTH, LAYERS, SYMBOLS = 64, 2, 24
# Attention with three biases, an MLP of twice the width, two norms; embedding, output matrix and the last norm.
LAYER = 4 * WIDTH**2 + 3 * WIDTH + 3 * 2 * WIDTH**2 + 2 * WIDTH
WEIGHTS = 4 * (LAYERS * LAYER + 2 * SYMBOLS * WIDTH + WIDTH)
SMALL = (f"actor.model.hidden_dim={WIDTH}", "actor.warm_start.steps=0", "data.rollout_batch_size=4")


def config_of(*overrides: str, file: str = "math_laptop") -> Any:
    job = load_job(file, (*SMALL, *overrides))
    job.raise_if_bad()
    return job.config


def forecast(*overrides: str, file: str = "math_laptop", **counts: int) -> dict[str, ProcessForecast]:
    results = language_memory.forecast(config_of(*overrides, file=file), counts)
    return {result.component: result for result in results}


def parts(component: str, *overrides: str, file: str = "math_laptop", **counts: int) -> dict[str, int]:
    return dict(forecast(*overrides, file=file, **counts)[component].parts)


def test_weights_are_counted_by_hand() -> None:
    actor = parts("actor")
    assert actor["weights"] == actor["gradients"] == WEIGHTS
    assert actor["optimizer"] == 2 * WEIGHTS
    assert parts("rollout")["weights"] == WEIGHTS


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_parameters_equal_those_of_the_built_model(lora: Any) -> None:
    actor = config_of().actor
    section = actor.model.model_copy(update={"lora": lora and LoraSettings(**lora)})
    built: Any = built_model(make_tokenizer(actor), hidden_dim=WIDTH, layers=LAYERS)
    built = built if lora is None else with_lora(built, section.adapter())
    sizes = language_memory.model_sizes(actor, section)
    assert sizes.weights == 4 * sum(weight.numel() for weight in built.parameters())
    assert sizes.trained == 4 * sum(weight.numel() for weight in built.parameters() if weight.requires_grad)
    assert sizes.vocabulary == 4 * SYMBOLS


def test_an_engine_alone_keeps_what_it_is_sent() -> None:
    alone, shared = (parts("actor", rollout=count)["sent weights"] for count in (1, 2))
    assert alone == shared + WEIGHTS


def test_adapters_alone_are_trained_and_sent() -> None:
    lora = "actor.model.lora={rank: 4, alpha: 8}"
    actor, rollout = parts("actor", lora), parts("rollout", lora)
    # Two matrices of rank 4 for each of seven layers: four squares, three of an MLP of twice the width.
    adapter = 4 * LAYERS * 4 * (4 * 2 * WIDTH + 3 * 3 * WIDTH)
    assert actor["gradients"] == adapter
    assert actor["weights"] == WEIGHTS + adapter
    assert rollout["merged adapter"] == 4 * LAYERS * (4 * WIDTH**2 + 3 * 2 * WIDTH**2)
    assert rollout["weights"] == WEIGHTS


def test_keys_and_values_are_those_of_the_longest_answers() -> None:
    few, many = (
        parts("rollout", f"data.rollout_batch_size={prompts}", "runner.val_check_interval=-1")["keys and values"]
        for prompts in (4, 8)
    )
    assert many == 2 * few
    # A prompt and an answer of 32 tokens, 8 of which are drawn; each token has a row of numbers, too.
    assert few == 4 * 8 * (32 * 4 * 2 * LAYERS * WIDTH + 8 * 20)


def test_evaluations_are_drawn_too() -> None:
    drawn, none = (parts("rollout", f"runner.val_check_interval={steps}")["keys and values"] for steps in (10, -1))
    # 200 problems of evaluation against 32 answers.
    assert drawn * 32 == none * 200


def test_running_tokens_bound_keys_and_values() -> None:
    bound = parts("rollout", "rollout.max_running_tokens=320")["keys and values"]
    assert bound == 10 * (32 * 4 * 2 * LAYERS * WIDTH + 8 * 20)


def test_fewer_tokens_in_a_pass_take_less() -> None:
    longer = ("runner.seq_length=160", "rollout.sampling_params.max_new_tokens=128")
    most, few = (
        parts("actor", *longer, f"actor.max_tokens_per_micro_batch={tokens}")["activations"] for tokens in (4096, 256)
    )
    assert few < most / 3


def test_checkpointing_holds_less() -> None:
    deep = ("actor.model.num_layers=8", "actor.fsdp_config.gradient_checkpointing=")
    kept, again = (parts("actor", deep[0], deep[1] + value)["activations"] for value in ("false", "true"))
    assert again < kept / 2


def test_critic_and_reference_are_counted_where_they_are() -> None:
    assert set(forecast()) == {"actor", "rollout", "reward"}
    critic = parts("critic", file="math_laptop_ppo")
    # A matrix of logits stands for the value, which is smaller.
    assert critic["weights"] == WEIGHTS
    place = "cluster.component_placement.reference={node_group: node, placement: 0}"
    reference = parts("reference", "algorithm.kl_beta=0.1", place)
    assert reference["weights"] == WEIGHTS
    assert "gradients" not in reference


def test_shards_divide_weights_and_are_sent_whole() -> None:
    whole, half = (parts("actor", actor=count, rollout=2) for count in (1, 2))
    assert half["weights"] == whole["weights"] // 2
    assert half["optimizer"] == whole["optimizer"] // 2
    assert "copied weights" not in half
    assert half["gathered weights"] > 0


def test_gradients_are_summed_layer_by_layer() -> None:
    small = ("actor.model.num_layers=16", "actor.max_tokens_per_micro_batch=32")
    learning = parts("actor", *small, actor=2)
    assert learning["gathered gradients"] < 2 * learning["gradients"] / 3


def folder_of(path: Path, **sizes: Any) -> str:
    from transformers import LlamaConfig

    config: Any = LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, **sizes)
    config.save_pretrained(path)
    return f"actor.model.model_path={path}"


def test_the_configuration_of_a_model_is_enough(tmp_path: Path) -> None:
    actor = parts("actor", folder_of(tmp_path, num_attention_heads=4, num_key_value_heads=2))
    layer = 2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert actor["weights"] == 4 * (3 * layer + 2 * 1000 * 64 + 64)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        forecast("actor.model.model_path=/elsewhere")


def test_another_engine_has_notes_of_what_is_known(tmp_path: Path) -> None:
    path = folder_of(tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=256)
    short = ("runner.seq_length=64", "rollout.sampling_params.max_new_tokens=32", "data.max_prompt_length=32")
    notes = forecast(path, *short, file="math_grpo_8gpu")["rollout"].notes
    assert notes[0].startswith("vllm takes 85% of each of its accelerators")
    # Three layers of two heads of 256 numbers, keys and values, in bf16.
    assert notes[0].endswith("for each token 6 KiB of keys and values")
    assert notes[1] == "what vllm takes of the host's memory is not counted"


def test_a_model_that_writes_no_text_has_no_forecast(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match="`clip` is not a causal language model"):
        config_of(f"actor.model.model_path={tmp_path}")


# Published sizes: width, width of the MLP, layers, heads, heads of keys, vocabulary.
SIZES: dict[str, tuple[int, ...]] = {
    "7 B": (3584, 18944, 28, 28, 4, 152064),
    "14 B": (5120, 13824, 48, 40, 8, 152064),
    "32 B": (5120, 27648, 64, 40, 8, 152064),
    "70 B": (8192, 28672, 80, 64, 8, 128256),
}
OFFLOAD, HALF, SHORT = (
    "actor.fsdp_config.cpu_offload=true",
    "actor.optim.state_dtype=bf16",
    "actor.max_tokens_per_micro_batch=8192",
)


@pytest.mark.parametrize(
    ("size", "actors", "gib", "keys"),
    [
        ("7 B", 4, 24, (OFFLOAD,)),
        ("7 B", 1, 24, ("actor.model.lora={rank: 16, alpha: 32}", SHORT)),
        ("14 B", 8, 40, (HALF, SHORT)),
        pytest.param("32 B", 8, 80, (HALF, SHORT), marks=pytest.mark.nightly),
        pytest.param("70 B", 32, 80, (SHORT,), marks=pytest.mark.nightly),
    ],
)
def test_large_models_fit_where_they_should(
    tmp_path: Path, size: str, actors: int, gib: int, keys: tuple[str, ...]
) -> None:
    from transformers import LlamaConfig

    width, inner, layers, heads, keys_of, vocabulary = SIZES[size]
    config: Any = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys_of,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
    )
    config.save_pretrained(tmp_path)
    overrides = (f"actor.model.model_path={tmp_path}", "actor.fsdp_config.gradient_checkpointing=true", *keys)
    job = load_job("math_grpo_8gpu", overrides, environ={})
    results = language_memory.forecast(cast("Any", job.config), {"actor": actors, "rollout": actors})
    _, device = next(result for result in results if result.component == "actor").held(accelerated=True)
    assert device < gib * 2**30
    # The model is what fills it: with twice as much memory the keys would not be asked for.
    assert device > gib * 2**30 / 2


# config.json of the models that shipped layouts are for, by their published sizes.
SHIPPED: dict[str, dict[str, Any]] = {
    "math_32b_8node": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "math_moe_8gpu": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}


def shipped_forecast(file: str, folder: Path, **changes: Any) -> ProcessForecast:
    (folder / "config.json").write_text(json.dumps({**SHIPPED[file], **changes}))
    job = load_job(file, [f"actor.model.model_path={folder}"], environ={})
    assert job.cluster is not None
    placed = HybridComponentPlacement(job.cluster, job.topology)
    sizes = {name: placed.get_world_size(name) for name in ("actor", "rollout", "reward")}
    (actor, *_) = language_memory.forecast(cast("Any", job.config), sizes)
    return actor


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "actors"), [("math_32b_8node", 32), ("math_moe_8gpu", 8)])
def test_shipped_layouts_fit_their_accelerators(tmp_path: Path, file: str, actors: int) -> None:
    actor = shipped_forecast(file, tmp_path)
    _, device = actor.held(accelerated=True)
    assert actor.processes == actors
    assert 40 * 2**30 < device < 80 * 2**30


def test_experts_are_gathered_with_their_layer(tmp_path: Path) -> None:
    parts = shipped_forecast("math_moe_8gpu", tmp_path, num_hidden_layers=4).parts
    layer, vocabulary = 128 * 3 * 2048 * 768, 2 * 151936 * 2048
    # Two layers at a time, and what is in no layer, in bf16.
    assert parts["gathered weights"] == pytest.approx(2 * (2 * layer + vocabulary), rel=0.1)
    assert parts["gathered gradients"] < parts["gathered weights"] * 3
