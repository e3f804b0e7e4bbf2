"""Forecasts of language models: memory by hand, and the loop of answers in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.language import language_memory
from recipes.language.language_flow import ANSWER, LAG, PAUSE, SCORE, STEP, TURNS, UPDATE, LanguageFlow, flow_of
from recipes.language.models.load_model import built_model, make_tokenizer
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import with_lora
from rlinf_core import ConfigError, HybridComponentPlacement, RLinfError, load_job
from rlinf_core.job.arrangements import Arrangement, DeviceSpan, Flow
from rlinf_core.job.flow import CallRow, Duration, Durations
from rlinf_core.job.recipe import ProcessForecast
from tests.unit.recipes.language.tiny import job_config

WIDTH, LAYERS, SYMBOLS = 64, 2, 24
# Attention with three biases, an MLP of twice the width, two norms; embedding, output matrix and the last norm.
LAYER = 4 * WIDTH**2 + 3 * WIDTH + 3 * 2 * WIDTH**2 + 2 * WIDTH
WEIGHTS = 4 * (LAYERS * LAYER + 2 * SYMBOLS * WIDTH + WIDTH)
LEARNED, KEPT = ("weights", "gradients", "optimizer"), "keys and values"
SMALL = (f"actor.model.hidden_dim={WIDTH}", "actor.warm_start.steps=0", "data.rollout_batch_size=4")


def config_of(*overrides: str, file: str = "math/sums-laptop") -> Any:
    return job_config(*SMALL, *overrides, file=file)


def forecast(*overrides: str, file: str = "math/sums-laptop", **counts: int) -> dict[str, ProcessForecast]:
    results = language_memory.forecast(config_of(*overrides, file=file), counts)
    return {result.component: result for result in results}


def parts(component: str, *overrides: str, file: str = "math/sums-laptop", **counts: int) -> dict[str, int]:
    return dict(forecast(*overrides, file=file, **counts)[component].parts)


LORA = "actor.model.lora={rank: 4, alpha: 8}"
# Two matrices of rank 4 for each of seven layers: four squares, three of an MLP of twice the width.
ADAPTER = 4 * LAYERS * 4 * (4 * 2 * WIDTH + 3 * 3 * WIDTH)
REFERENCE = "cluster.component_placement.reference={node_group: node, placement: 0}"
# A prompt and an answer of 32 tokens, 8 of which are drawn; each token has a row of numbers, too.
ANSWER_BYTES = 32 * 4 * 2 * LAYERS * WIDTH + 8 * 20
UNEVALUATED = "runner.val_check_interval=-1"


@pytest.mark.parametrize(
    ("component", "overrides", "part", "expected"),
    [
        *(("actor", (), part, size) for part, size in zip(LEARNED, (WEIGHTS, WEIGHTS, 2 * WEIGHTS), strict=True)),
        ("rollout", (), "weights", WEIGHTS),
        ("actor", (LORA,), "weights", WEIGHTS + ADAPTER),
        ("actor", (LORA,), "gradients", ADAPTER),
        ("rollout", (LORA,), "weights", WEIGHTS),
        ("rollout", (LORA,), "merged adapter", 4 * LAYERS * (4 * WIDTH**2 + 3 * 2 * WIDTH**2)),
        ("rollout", ("data.rollout_batch_size=4", UNEVALUATED), KEPT, 4 * 8 * ANSWER_BYTES),
        ("rollout", ("data.rollout_batch_size=8", UNEVALUATED), KEPT, 8 * 8 * ANSWER_BYTES),
        # Problems of evaluation against 32 answers.
        ("rollout", ("runner.val_check_interval=10",), KEPT, 200 * ANSWER_BYTES),
        ("rollout", ("rollout.max_running_tokens=320",), KEPT, 10 * ANSWER_BYTES),
        ("reference", ("algorithm.kl_beta=0.1", REFERENCE), "weights", WEIGHTS),
        ("reference", ("algorithm.kl_beta=0.1", REFERENCE), "gradients", None),
    ],
)
def test_parts_are_what_arithmetic_says(
    component: str, overrides: tuple[str, ...], part: str, expected: int | None
) -> None:
    assert parts(component, *overrides).get(part) == expected


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


def test_fewer_tokens_in_a_pass_take_less() -> None:
    longer = ("runner.seq_length=160", "rollout.sampling_params.max_new_tokens=128")
    bound = "actor.max_tokens_per_micro_batch="
    most, few = (parts("actor", *longer, f"{bound}{tokens}")["activations"] for tokens in (4096, 256))
    assert few < most / 3


def test_checkpointing_holds_less() -> None:
    deep = ("actor.model.num_layers=8", "actor.fsdp_config.gradient_checkpointing=")
    kept, again = (parts("actor", deep[0], deep[1] + value)["activations"] for value in ("false", "true"))
    assert again < kept / 2


def test_critics_are_counted_where_they_are() -> None:
    assert set(forecast()) == {"actor", "rollout", "reward"}
    # A matrix of logits stands for the value, which is smaller.
    assert parts("critic", file="math/sums-ppo-laptop")["weights"] == WEIGHTS


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
    notes = forecast(path, *short, file="math/grpo-8gpu")["rollout"].notes
    assert notes[0].startswith("vllm takes 85% of each of its accelerators")
    # Three layers of two heads of 256 numbers, keys and values, in bf16.
    assert notes[0].endswith("for each token 6 KiB of keys and values")
    assert notes[1] == "what vllm takes of the host's memory is not counted"


def test_a_model_that_writes_no_text_has_no_forecast(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match="`clip` is not a causal language model"):
        config_of(f"actor.model.model_path={tmp_path}")


HEADS = ("num_attention_heads", "num_key_value_heads")
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", *HEADS, "vocab_size")
# Published sizes.
SIZES: dict[str, tuple[int, ...]] = {
    "7 B": (3584, 18944, 28, 28, 4, 152064),
    "14 B": (5120, 13824, 48, 40, 8, 152064),
    "32 B": (5120, 27648, 64, 40, 8, 152064),
    "70 B": (8192, 28672, 80, 64, 8, 128256),
}
OFFLOAD, HALF = "actor.fsdp_config.cpu_offload=true", "actor.optim.state_dtype=bf16"
SHORT = "actor.max_tokens_per_micro_batch=8192"


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

    sizes: Any = {**dict(zip(NAMES, SIZES[size], strict=True)), "max_position_embeddings": 32768}
    LlamaConfig(**sizes, tie_word_embeddings=False).save_pretrained(tmp_path)
    overrides = (f"actor.model.model_path={tmp_path}", "actor.fsdp_config.gradient_checkpointing=true", *keys)
    config = job_config(*overrides, file="math/grpo-8gpu")
    results = language_memory.forecast(config, {"actor": actors, "rollout": actors})
    _, device = next(result for result in results if result.component == "actor").held(accelerated=True)
    assert device < gib * 2**30
    # The model is what fills it: with twice as much memory the keys would not be asked for.
    assert device > gib * 2**30 / 2


# config.json of the models that shipped layouts are for, by their published sizes.
SHIPPED: dict[str, dict[str, Any]] = {
    "math/32b-64gpu": {"model_type": "qwen2", **dict(zip(NAMES, SIZES["32 B"], strict=True))},
    "math/moe-8gpu": {
        "model_type": "qwen3_moe",
        **dict(zip(NAMES, (2048, 6144, 48, 32, 4, 151936), strict=True)),
        "moe_intermediate_size": 768,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}


def shipped_forecast(file: str, folder: Path, **changes: Any) -> ProcessForecast:
    (folder / "config.json").write_text(json.dumps({**SHIPPED[file], "tie_word_embeddings": False, **changes}))
    job = load_job(file, [f"actor.model.model_path={folder}"], environ={})
    assert job.cluster is not None
    placed = HybridComponentPlacement(job.cluster, job.topology)
    sizes = {name: placed.get_world_size(name) for name in ("actor", "rollout", "reward")}
    (actor, *_) = language_memory.forecast(cast("Any", job.config), sizes)
    return actor


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "actors"), [("math/32b-64gpu", 32), ("math/moe-8gpu", 8)])
def test_shipped_layouts_fit_their_accelerators(tmp_path: Path, file: str, actors: int) -> None:
    actor = shipped_forecast(file, tmp_path)
    _, device = actor.held(accelerated=True)
    assert actor.processes == actors
    assert 40 * 2**30 < device < 80 * 2**30


def test_experts_are_gathered_with_their_layer(tmp_path: Path) -> None:
    parts = shipped_forecast("math/moe-8gpu", tmp_path, num_hidden_layers=4).parts
    layer, vocabulary = 128 * 3 * 2048 * 768, 2 * 151936 * 2048
    # Two layers at a time, and what is in no layer, in bf16.
    assert parts["gathered weights"] == pytest.approx(2 * (2 * layer + vocabulary), rel=0.1)
    assert parts["gathered gradients"] < parts["gathered weights"] * 3


GPU = "gpu"
MODELS = {GPU: "m"}


def job_of(*overrides: str) -> LanguageFlow:
    """Four prompts of two answers each."""
    sizes = ["data.rollout_batch_size=4", "algorithm.group_size=2", "algorithm.n_minibatches=1"]
    return flow_of(job_config(*sizes, *overrides))


JOB = job_of()
SOME: dict[str, list[tuple[float, int]]] = {ANSWER: [(10.0, 3), (40.0, 1)]}


def timed(
    step: tuple[float, float],
    update: tuple[float, float],
    score: float = 0.0,
    sizes: Any = None,
    lag: float = 0.0,
    job: LanguageFlow = JOB,
) -> Flow:
    phases = {STEP: {"m": Duration(*step)}, UPDATE: {"m": Duration(*update)}, SCORE: {"": Duration(score)}}
    phases |= {LAG: {"": Duration(lag)}}
    return job.flow(Durations(phases), MODELS, sizes or {ANSWER: [(10.0, 1)]})


def arranged(rollout: tuple[int, int], actor: tuple[int, int], ahead: int) -> Arrangement:
    return Arrangement((("rollout", DeviceSpan(GPU, *rollout)), ("actor", DeviceSpan(GPU, *actor))), 1, ahead)


@pytest.mark.parametrize(
    ("rollout", "actor", "ahead", "seconds"),
    [
        # Ten steps of eight answers, 0.1 + 8 x 0.01 each; then 80 tokens at 0.05.
        ((0, 1), (1, 1), 0, 1.8 + 4.0),
        # Two engines have four answers each; two actors 40 tokens.
        ((0, 2), (0, 2), 0, 1.4 + 2.0),
        # Behind the training, which is longer.
        ((0, 1), (1, 1), 1, 4.0),
    ],
)
def test_a_step_takes_what_arithmetic_says(rollout: Any, actor: Any, ahead: int, seconds: float) -> None:
    flow = timed((0.1, 0.01), (0.0, 0.05))
    assert flow.simulate(arranged(rollout, actor, ahead)).seconds == pytest.approx(seconds)


def test_new_weights_wait_for_answers_that_must_not_continue() -> None:
    drained = timed((0.1, 0.01), (0.0, 0.0), job=job_of("runner.partial_rollout=false"))
    mixed, where = timed((0.1, 0.01), (0.0, 0.0)), arranged((0, 1), (1, 1), 1)
    # Ten steps of eight answers; else of those of two steps at once.
    assert drained.simulate(where).seconds == pytest.approx(1.8)
    assert mixed.simulate(where).seconds == pytest.approx(1.3, rel=0.05)


def test_the_longest_answer_holds_a_step_up() -> None:
    even, uneven = (timed((0.1, 0.0), (0.0, 0.0), sizes={ANSWER: sizes}) for sizes in ([(16.0, 1)], SOME[ANSWER]))
    where = arranged((0, 1), (1, 1), 0)
    assert even.simulate(where).seconds == pytest.approx(1.6)
    assert uneven.simulate(where).seconds > 2.5


line = st.tuples(st.floats(0.01, 0.2), st.floats(0.0, 0.01))
spans = st.sampled_from([(first, size) for first in range(3) for size in range(1, 4 - first)])


@settings(max_examples=15, deadline=None)
@given(line, line, st.floats(0, 0.05), spans, spans, st.integers(0, 2), st.floats(0, 0.05))
def test_no_simulation_is_below_its_bound(
    step: Any, update: Any, score: float, r: Any, a: Any, ahead: int, lag: float
) -> None:
    flow, where = timed(step, update, score, SOME, lag), arranged(r, a, ahead)
    assert flow.bound(where) <= flow.simulate(where).seconds * (1 + 1e-9)


def test_without_lengths_of_answers_there_is_no_advice() -> None:
    with pytest.raises(RLinfError, match="no lengths of answers"):
        JOB.flow(Durations({}), MODELS, {})


def test_components_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(RLinfError, match="component `critic`"):
        job_of("cluster.component_placement.critic={node_group: node, placement: 0}", "algorithm.adv_type=gae")


@pytest.mark.parametrize("trained", [40, 400])
def test_tokens_of_an_update_are_counted_as_drawn_ones(trained: float) -> None:
    """Of 100 drawn tokens 40 are learned from; or those of tools are among 400."""
    rows = [CallRow("actor", UPDATE, trained, "m", 4, 2.0), CallRow("rollout", STEP, 8.0, "m", 9, 0.1)]
    run: Any = SimpleNamespace(rows=rows, sizes={ANSWER: [(10.0, 40)]})
    update, step = JOB.calls(run)
    assert update == rows[0]._replace(rows=pytest.approx(100.0))
    assert step == rows[1]
    # A run that recorded no lengths says nothing of it.
    assert JOB.calls(SimpleNamespace(rows=rows, sizes={})) == rows  # type: ignore[arg-type]


def test_a_conversation_waits_for_its_tools() -> None:
    constants = {TURNS: {"": Duration(2.0)}, PAUSE: {"": Duration(3.0)}}
    phases = {STEP: {"m": Duration(0.1)}, UPDATE: {"m": Duration(0.0)}, **constants}
    flow = JOB.flow(Durations(phases), MODELS, {ANSWER: [(10.0, 1)]})
    where = arranged((0, 1), (1, 1), 0)
    # Twice five tokens, and a tool in between.
    assert flow.simulate(where).seconds == pytest.approx(2 * 0.5 + 3.0, rel=0.05)
    assert flow.bound(where) <= 4.0 + 1e-9


@pytest.mark.parametrize("turns", [1, 2])
def test_a_run_is_predicted_as_long_as_it_took(turns: int) -> None:
    """Engines do more than their steps: what a rollout took longer is found again, and grows with the tokens."""
    where = arranged((0, 1), (1, 1), 0)
    phases = {"time/generate_rollouts": 6.0, "time/actor_training": 1.0, "time/step": 7.5, "time/sync_weights": 0.25}
    tools = {"agent/turns": 2.0, "agent/tool_seconds/search": 1.0} if turns > 1 else {}
    sizes = {ANSWER: [(10.0, 1)]}
    run: Any = SimpleNamespace(arrangement=where, models=MODELS, phases={**phases, **tools}, sizes=sizes, rows=[])
    calls = {STEP: {"m": Duration(0.1, 0.01)}, UPDATE: {"m": Duration(1.0)}, SCORE: {"": Duration(0.05)}}
    durations = Durations({**calls, **Durations.of(JOB.constants(run, Durations(calls))).phases})
    predicted, longer = (
        JOB.flow(durations, MODELS, {ANSWER: [(tokens, 1)]}).simulate(where).seconds for tokens in (10.0, 20.0)
    )
    assert predicted == pytest.approx(7.5, rel=0.01)
    assert longer > 7.5 + 0.8 * (6.0 - 1.0 * (turns - 1))
