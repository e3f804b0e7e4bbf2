"""Validation rules for a language model's architecture, from config.json alone."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_core.suggest import excerpt

# Model types whose results in packed rows, or from a KV cache, differ from those of one sequence at a time. A nightly
# test compares this list with the installed transformers.
REFUSED: Final = frozenset(
    (
        *("bailing_hybrid", "bamba", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot"),
        *("blenderbot-small", "camembert", "cpmant", "data2vec-text", "electra", "ernie", "falcon_h1", "falcon_mamba"),
        *("git", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "mamba", "mamba2", "marian", "mbart"),
        *("megatron-bert", "mllama", "modernbert-decoder", "mvp", "nemotron_h", "olmo_hybrid", "openai-gpt", "pegasus"),
        *("plbart", "prophetnet", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"),
        *("recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "rwkv"),
        *("trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "zamba", "zamba2"),
    )
)
# Sizes that are at least 1 in every model family that has them.
_SIZES: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
)
# Suffixes of the names of classes that do not generate text.
_OTHER_HEADS: Final = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM"),
    *("ForMultipleChoice", "RewardModel"),
)
# Keys with positive numbers, and switches, which must not be text: `"false"` would be on.
_POSITIVE: Final = ("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_SWITCHES: Final = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
# The types of rotary angles; the second line has older names.
ROPES: Final = frozenset(
    (
        *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
        *("su", "mrope"),
    )
)
_LAYERS: Final = frozenset(("full_attention", "sliding_attention"))
_COPY: Final = "copy config.json again from its source"
_REMEDY: Final = "use a model family listed in docs/language-models.md"


class ArchitectureFault(NamedTuple):
    """A reason why a model cannot be trained.

    Attributes:
        message, help: the fault, and the advice.
        limits_length: whether the only fault is that `runner.seq_length` is too long for the model.
    """

    message: str
    help: str
    limits_length: bool = False


def fault_of_architecture(
    settings: Mapping[str, Any], seq_length: int, *, writes: bool = True
) -> ArchitectureFault | None:
    """Return why a model cannot be trained; None if no reason is known.

    Args:
        settings: the content of config.json.
        seq_length: the length of the longest sequence in tokens.
        writes: whether the model must generate text; a critic may come from a reward model.
    """
    kind = settings.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        return ArchitectureFault(f"models of type `{kind}` are not supported", _REMEDY)
    fault = _fault_of_type(settings, writes)
    if fault is not None:
        return fault
    fault = (_fault_of_head(settings) if writes else None) or _fault_of_weights(settings)
    if fault is not None:
        return fault
    text = text_settings(settings)
    fault = _fault_of_sizes(text) or _fault_of_rope(text)
    if fault is not None:
        return fault
    layers = text.get("layer_types")
    if isinstance(layers, list):
        unknown = sorted({str(layer) for layer in cast("list[object]", layers)} - _LAYERS)
        if unknown:
            return ArchitectureFault(f"the model has unsupported layers: {', '.join(unknown)}", _REMEDY)
    longest = _longest_exact(text)
    if longest is not None and seq_length > longest:
        return ArchitectureFault(
            f"the model's rotary angles change for sequences longer than {longest} tokens, and `runner.seq_length` is"
            f" {seq_length}",
            f"write {longest} or less",
            limits_length=True,
        )
    return None


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json about the language model, which may be one part of the model."""
    text = settings.get("text_config")
    return cast("Mapping[str, Any]", text) if isinstance(text, dict) else settings


def _fault_of_type(settings: Mapping[str, Any], writes: bool) -> ArchitectureFault | None:
    """Return the fault of a model type that transformers does not know, or that is no causal language model."""
    if not settings:
        return None  # an unreadable config.json is reported elsewhere
    kind = settings.get("model_type")
    if not isinstance(kind, str) or not kind:
        shown = "no `model_type`" if kind is None else f"`model_type: {excerpt(repr(kind), 40)}`"
        return ArchitectureFault(f"config.json has {shown}, so that the kind of model is unknown", _COPY)
    known = known_model_types()
    if known is None:
        return None
    if kind not in known.all:
        message = f"models of type `{excerpt(kind, 40)}` are unknown to the installed transformers"
        if "auto_map" in settings:
            return ArchitectureFault(f"{message}, and the folder's own code is not run", _REMEDY)
        return ArchitectureFault(message, f"update transformers, or {_REMEDY}")
    if writes and not {kind, str(text_settings(settings).get("model_type"))} & known.writing:
        return ArchitectureFault(f"a model of type `{kind}` is not a causal language model", "name a language model")
    return None


def _fault_of_head(settings: Mapping[str, Any]) -> ArchitectureFault | None:
    """Return the fault of a model without a language head, such as a reward model."""
    written = settings.get("architectures")
    names = [str(name) for name in cast("list[object]", written)] if isinstance(written, list) else []
    if names and all(name.endswith(_OTHER_HEADS) for name in names):
        return ArchitectureFault(
            f"the model in the folder is a `{names[0]}`, which writes no text", "name a language model"
        )
    return None


def _fault_of_weights(settings: Mapping[str, Any]) -> ArchitectureFault | None:
    about = settings.get("quantization_config")
    if not isinstance(about, dict):
        return None
    method = str(cast("dict[str, Any]", about).get("quant_method", "unknown"))
    return ArchitectureFault(
        f"the model's weights are quantized (`{method}`), and quantized weights are not trained",
        "use the folder of the model before it was quantized",
    )


def _fault_of_sizes(text: Mapping[str, Any]) -> ArchitectureFault | None:
    sizes = {name: text[name] for name in _SIZES if text.get(name) is not None}
    if text.get("use_sliding_window") is False and sizes.get("sliding_window") == 0:
        del sizes["sliding_window"]  # Qwen's value for none
    for name, size in sizes.items():
        # Some model families have a size for each layer.
        listed = cast("list[object]", size) if isinstance(size, list) else [size]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in listed):
            return _wrong_value(name, text[name], "a whole number from 1")
    for name in _POSITIVE:
        value = text.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            return _wrong_value(name, value, "a number above 0")
    for name in _SWITCHES:
        if not isinstance(text.get(name, False), bool | None):
            return _wrong_value(name, text[name], "true or false")
    heads, shared = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        message = f"`num_attention_heads` of config.json is {heads}, no multiple of `num_key_value_heads`, {shared}"
        return ArchitectureFault(message, _COPY)
    return None


def _wrong_value(name: str, value: object, wanted: str) -> ArchitectureFault:
    return ArchitectureFault(f"`{name}` of config.json is `{excerpt(repr(value), 40)}`; it should be {wanted}", _COPY)


def _fault_of_rope(text: Mapping[str, Any]) -> ArchitectureFault | None:
    unknown = sorted(_kinds_of_rope(text) - ROPES)
    if not unknown:
        return None
    return ArchitectureFault(
        f"`rope_type` of config.json is `{excerpt(unknown[0], 40)}`, which transformers does not compute",
        f"known are {', '.join(sorted(ROPES))}; {_COPY}",
    )


def _kinds_of_rope(text: Mapping[str, Any]) -> set[str]:
    """Return the types of rotary angles that a model names, for all layers or for kinds of layers."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    whole = cast("dict[str, Any]", rope) if isinstance(rope, dict) else {}
    parts = [whole, *(cast("dict[str, Any]", part) for part in whole.values() if isinstance(part, dict))]
    named = [part.get("rope_type", part.get("type")) for part in parts]
    return {str(kind) for kind in named if kind is not None}


def _longest_exact(text: Mapping[str, Any]) -> int | None:
    """Return the maximum sequence length for which rotary angles depend only on positions; None: unlimited."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, dict):
        return None
    whole, kinds = cast("dict[str, Any]", rope), _kinds_of_rope(text)
    limits: list[object] = []
    # Early Phi-3 folders call `longrope` `su` or `yarn`.
    earlier = {"su", "yarn"} if text.get("model_type") == "phi3" else {"su"}
    if kinds & {"longrope", *earlier}:
        limits.append(whole.get("original_max_position_embeddings") or text.get("original_max_position_embeddings"))
    if "dynamic" in kinds:
        limits.append(text.get("max_position_embeddings"))
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=None)


# Names of tables in transformers, and their files.
_ALL: Final = ("CONFIG_MAPPING_NAMES", "models/auto/auto_mappings.py")
_WRITING: Final = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "models/auto/modeling_auto.py")


class KnownModels(NamedTuple):
    """The values of `model_type` that transformers knows.

    Attributes:
        all: the types that have a configuration.
        writing: the types that have a causal language model.
    """

    all: frozenset[str]
    writing: frozenset[str]


@cache
def known_model_types() -> KnownModels | None:
    """Return the known types; None if transformers is not installed, or has no such tables."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        every, writing = (_keys(folder / file, name) for name, file in (_ALL, _WRITING))
    except (OSError, ValueError, SyntaxError):
        return None
    # The second table may have types that a statement adds to the first.
    return KnownModels(every | writing, writing) if every and writing else None


def _keys(file: Path, name: str) -> frozenset[str]:
    """Return the keys of `NAME = OrderedDict([(key, value), ...])` in a Python file, without running it."""
    for statement in ast.parse(file.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and [*map(ast.unparse, statement.targets)] == [name]:
            (pairs,) = cast("ast.Call", statement.value).args
            return frozenset(key for key, _ in cast("list[tuple[str, Any]]", ast.literal_eval(pairs)))
    return frozenset()
