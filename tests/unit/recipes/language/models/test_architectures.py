"""Architectures: each computed as transformers does, by trainer and engine, or refused by name."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import textwrap
from collections.abc import Generator
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import pytest
import torch

from recipes.language.engines.torch_engine import check_engine
from recipes.language.models.architecture import longest_exact
from recipes.language.models.packing import PackedRows, RowLayout
from recipes.language.models.policy import LanguagePolicy, check_policy, plain_attention
from recipes.language.rules.architecture_rules import REFUSED, ROPES, fault_of_architecture, known_model_types
from rlinf_core.errors import ConfigError
from tests.unit.recipes.language.models.architectures import VOCABULARY, architectures, tiny

# One of each kind: windows by keyword, mask and layer; caps; sinks; scaled logits; latent keys; learned positions.
COMPUTED = (
    *("cohere2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "granite", "mistral"),
    *("mixtral", "olmo3", "phi3", "phimoe", "qwen2_moe", "starcoder2"),
)
PAGE = Path(__file__).parents[5] / "docs" / "language-models.md"
REWRITE = bool(os.environ.get("REWRITE_PAGES"))


def model(name: str, **changes: Any) -> Any:
    return tiny(architectures()[name], **changes)


@pytest.mark.parametrize("name", COMPUTED)
def test_trainer_and_engine_equal_transformers(name: str) -> None:
    made = model(name)
    trainer, engine = check_policy(LanguagePolicy(made)), check_engine(made)
    assert trainer is not None
    assert max(trainer.largest, engine.largest) < 1e-4


@pytest.mark.parametrize("name", ["mistral", "phimoe", "qwen2_moe"])
def test_windows_hold_in_rows_of_unlike_sequences(name: str) -> None:
    made = model(name)
    rows = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(3)).split([3, 12, 5, 20])
    policy = LanguagePolicy(made)
    with torch.no_grad():
        plain = [made(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1) for row in rows]
        wanted = torch.cat([known.gather(1, row[1:, None]) for known, row in zip(plain, rows, strict=True)])
        ours = policy(laid([row[:-1] for row in rows], [row[1:] for row in rows], policy.takes_masks(20))).logprobs
    torch.testing.assert_close(ours, wanted[:, 0], atol=1e-5, rtol=0)


def laid(sequences: SequenceABC[Any], targets: SequenceABC[Any], masks: bool) -> PackedRows:
    """Return sequences whose last tokens predict targets."""
    layout = RowLayout([sequence.tolist() for sequence in sequences], masks=masks)
    predictors = [layout.places(number)[-len(wanted) :] for number, wanted in enumerate(targets)]
    return layout.rows(torch.cat(predictors), torch.cat(list(targets)))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral"])
def test_gradients_equal_transformers(name: str) -> None:
    ours = model(name)
    check_policy(LanguagePolicy(ours))
    assert_gradients_equal(ours, model(name))


def assert_gradients_equal(ours: Any, theirs: Any) -> None:
    """Assert that two answers to a prompt, with it once and each for itself, have the gradients of eager attention."""
    row = torch.randint(VOCABULARY, (88,), generator=torch.Generator().manual_seed(2))
    prompt, first, second = row[:40], row[40:64], row[64:]
    answers = torch.cat((first, second))
    logprobs = [
        theirs(input_ids=torch.cat((prompt, answer))[None], use_cache=False).logits[0, 39:-1].log_softmax(-1)
        for answer in (first, second)
    ]
    (-torch.cat(logprobs).gather(1, answers[:, None]).mean()).backward()
    wanted = [weight.grad for weight in theirs.parameters()]
    largest = max(float(gradient.abs().max()) for gradient in wanted if gradient is not None)
    policy = LanguagePolicy(ours)
    sequences = [torch.cat((prompt, answer[:-1])) for answer in (first, second)]
    for masks in {policy.takes_masks(63), False}:
        ours.zero_grad()
        (-policy(laid(sequences, (first, second), masks)).logprobs.mean()).backward()
        for mine, other in zip([weight.grad for weight in ours.parameters()], wanted, strict=True):
            if other is not None:
                torch.testing.assert_close(mine, other, atol=1e-5 * largest, rtol=0)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot sample from `OpenAIGPTLMHeadModel`"):
        check_engine(model("openai-gpt"))


def test_a_wrong_pass_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = LanguagePolicy(model("qwen2"))
    rows = RowLayout.rows

    def all_seen(*args: Any) -> PackedRows:
        packed = rows(*args)
        return packed if packed.mask is None else replace(packed, mask=torch.ones_like(packed.mask))

    monkeypatch.setattr(RowLayout, "rows", all_seen)
    with pytest.raises(ConfigError, match=r"differs by 0\.\d+ from transformers' eager attention") as error:
        check_policy(policy)
    assert error.value.why == "rounding explains up to 0.001"


def test_a_model_of_a_sliding_window_takes_no_mask() -> None:
    policy = LanguagePolicy(model("mistral"))
    assert policy.takes_masks(8)
    assert not policy.takes_masks(9)
    tokens = torch.arange(2, 22)
    rows = laid([torch.cat((tokens, tokens[:number])) for number in (1, 2)], [tokens[:1]] * 2, masks=True)
    with pytest.raises(ValueError, match="cannot compute rows with a mask"):
        policy(rows)


def test_plain_attention_is_taken_back() -> None:
    made = model("qwen2")
    with plain_attention(made):
        assert made.config._attn_implementation == "eager"
    assert made.config._attn_implementation == "sdpa"


class TestLongRope:
    ROPE: ClassVar[dict[str, Any]] = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8}
    ROPE.update({"long_factor": [2.0] * 8, "original_max_position_embeddings": 64})

    def test_beyond_its_original_length_a_row_is_refused(self) -> None:
        made = model("phi3", rope_parameters=self.ROPE, original_max_position_embeddings=64, sliding_window=None)
        assert longest_exact(made.config) == 64
        policy = LanguagePolicy(made)
        tokens = torch.ones(65, dtype=torch.int64)
        with pytest.raises(ConfigError, match="a sequence has 65 tokens"):
            policy(laid([tokens], [tokens[1:]], masks=False))

    @pytest.mark.parametrize(("length", "is_fine"), [(64, True), (65, False)])
    @pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
    @pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
    def test_validate_holds_the_length_against_it(self, key: str, kind: str, length: int, is_fine: bool) -> None:
        fault = fault_of_architecture({"model_type": "phi3", key: {**self.ROPE, "rope_type": kind}}, length)
        assert (fault is None) is is_fine
        assert fault is None or fault.limits_length


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "mamba"}, "models of type `mamba`"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "llama4", "text_config": {"layer_types": ["chunked_attention"]}}, "chunked_attention"),
        ({"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}, "quantized (`awq`)"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}, "writes no text"),
        ({"model_type": "qwen2", "num_hidden_layers": -1}, "`num_hidden_layers` of config.json is `-1`"),
        ({"model_type": "qwen2", "vocab_size": "300"}, "`vocab_size` of config.json is `'300'`"),
        ({"model_type": "mistral", "sliding_window": "8"}, "`sliding_window` of config.json is `'8'`"),
        ({"model_type": "mistral", "sliding_window": 0}, "`sliding_window` of config.json is `0`"),
        ({"model_type": "llama", "rms_norm_eps": "1e-6"}, "`rms_norm_eps` of config.json is `'1e-6'`"),
        ({"model_type": "llama", "rope_theta": -1}, "`rope_theta` of config.json is `-1`"),
        ({"model_type": "llama", "tie_word_embeddings": "false"}, "`tie_word_embeddings` of config.json is `'false'`"),
        ({"model_type": "llama", "rope_scaling": {"type": "spiral"}}, "`rope_type` of config.json is `spiral`"),
        ({"model_type": "llama", "rope_parameters": {"full_attention": {"rope_type": "x"}}}, "is `x`"),
        ({"model_type": "qwen2x"}, "`qwen2x` are unknown to the installed transformers"),
        ({"model_type": "qwen2x", "auto_map": {}}, "the folder's own code is not run"),
        ({"model_type": "vit"}, "a model of type `vit` is not a causal language model"),
        ({"model_type": 2}, "config.json has `model_type: 2`"),
        ({"hidden_size": 8}, "config.json has no `model_type`"),
        ({"model_type": "qwen2", "hidden_size": True}, "`hidden_size` of config.json is `True`"),
        (
            {"model_type": "gemma3", "text_config": {"num_attention_heads": 0}},
            "`num_attention_heads` of config.json is",
        ),
        ({"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 4}, "no multiple of"),
    ],
)
def test_validate_names_what_is_not_computed(settings: dict[str, Any], words: str) -> None:
    fault = fault_of_architecture(settings, 100)
    assert fault is not None
    assert words in fault.message


def test_known_types_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = known_model_types()
    assert known is not None
    assert known.writing == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert known.all > known.writing


def test_known_rope_types_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_INIT_FUNCTIONS) | {"default", "su", "mrope"} == ROPES


@pytest.mark.parametrize("name", COMPUTED)
def test_validate_lets_what_is_computed_pass(name: str) -> None:
    assert fault_of_architecture(model(name).config.to_dict(), 100) is None


class Sweep(NamedTuple):
    """The model types that a sweep has tried, and those of them that are computed right."""

    tried: set[str]
    right: set[str]


@pytest.fixture(scope="module")
def sweep() -> Generator[Sweep]:
    """Collect the verdicts of the sweep; with `REWRITE_PAGES` write those of a whole one into the page."""
    verdicts = Sweep(set(), set())
    yield verdicts
    if REWRITE and verdicts.tried == set(architectures()):
        names = ", ".join(f"`{name}`" for name in sorted(verdicts.right))
        before, _, _ = PAGE.read_text(encoding="utf-8").rpartition("\n\n")
        lines = textwrap.fill(names, 160, break_on_hyphens=False)
        PAGE.write_text(f"{before}\n\n{lines}.\n", encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(architectures()))
def test_every_architecture_is_computed_or_refused(name: str, sweep: Sweep) -> None:
    sweep.tried.add(name)
    try:
        made = model(name)
    except Exception as error:
        pytest.skip(f"no tiny model: {type(error).__name__}")
    settings = {**made.config.to_dict(), "model_type": name}
    fault = fault_of_architecture(settings, 100)
    listed = f"`{name}`" in PAGE.read_text(encoding="utf-8").partition("## Model types")[2]
    try:
        trainer = check_policy(LanguagePolicy(made))
        engine = check_engine(made)
    except ConfigError:
        assert fault is not None
        assert REWRITE or not listed
    else:
        assert fault is None
        assert trainer is not None
        assert max(cast("float", trainer.largest), cast("float", engine.largest)) < 1e-4
        assert_gradients_equal(made, model(name))
        assert name not in REFUSED
        sweep.right.add(name)
        assert REWRITE or listed
