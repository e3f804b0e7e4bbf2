"""Sizes of a language model, computed from its config.json: weights, transfers, and memory of a pass."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch

from recipes.language.config.language_config import LanguageActorConfig, LanguageModelConfig
from recipes.language.models.load_model import built_model, make_tokenizer
from recipes.language.models.policy import CHUNK_NUMBERS
from recipes.sections.actor import FsdpConfig
from recipes.training.huggingface import check_folder, config_of, first_line, require_transformers, with_lora
from recipes.training.tied_weights import settle_ties
from recipes.training.typed_tensors import DTYPES
from recipes.training.weights.weight_sync import PIECE_BYTES
from recipes.training.without_memory import (
    BLOCK_ON_ACCELERATOR,
    FORWARD,
    block_parameters,
    computing_layers,
    held_in_blocks,
    parameter_bytes,
)
from rlinf_core import ConfigError

# The number of float32 tensors with the size of the logits, in training and sampling.
_LOGITS: Final = 5
# The numbers of pieces of weights in transfer, and of gathered layers, at a time.
_PIECES: Final = 3
_LAYERS: Final = 2
# The dimensions of a tensor of all experts' matrices: expert, and two of the matrix.
_EXPERTS_NDIM: Final = 3


class LanguageModelSizes(NamedTuple):
    """Sizes of a language model, in bytes.

    Attributes:
        weights, trained: all weights as stored for training, and the trained ones.
        sent, pieces: the weights sent to an engine, in the type of the transfer, and the part in transfer at a time.
        engine, adapted: an engine's weights without an adapter, and those that an adapter changes.
        gathered: unsharded weights that FSDP2 holds while computing, in the type of the computation.
        apart, layer: the weights outside of layers, and of the largest layer, in that type.
        token, vocabulary: keys and values of a token, and float32 logits of a token.
        learning, predicting: memory of a pass per token, with gradients and without.
        learning_on_accelerator: memory of a pass per token with gradients, on an accelerator.
    """

    weights: int
    trained: int
    sent: int
    pieces: int
    engine: int
    adapted: int
    gathered: int
    apart: int
    layer: int
    token: int
    vocabulary: int
    learning: int
    predicting: int
    learning_on_accelerator: int

    def logits(self, rows: int) -> int:
        """Return the bytes of the logits of `rows` tokens, which are computed in chunks."""
        return _LOGITS * min(rows * self.vocabulary, max(4 * CHUNK_NUMBERS, self.vocabulary))


def model_sizes(
    actor: LanguageActorConfig, section: LanguageModelConfig | None = None, fsdp: FsdpConfig | None = None
) -> LanguageModelSizes:
    """Return the sizes of a model, by default the actor's, from config.json alone.

    Raises:
        ConfigError: the folder of the model does not exist, or has no configuration.
    """
    section, fsdp = section or actor.model, fsdp or actor.fsdp_config
    lora, width = section.adapter(), DTYPES[section.precision].itemsize
    with torch.device("meta"):
        plain = _plain(section, actor)
        text = plain.config.get_text_config()
        engine = parameter_bytes(plain.parameters(), width=width)
        # A model without adapters is trained in float32.
        plain = plain.to(torch.float32 if lora is None else DTYPES[section.precision])
        model: Any = plain if lora is None else with_lora(plain, lora)
    outputs, inputs, weights = Counter[str](), Counter[str](), Counter[str]()
    for _, block, layer in computing_layers(model):
        if block is not None:
            inputs.setdefault(block, layer.weight.shape[1])
            outputs[block] += layer.weight.shape[0]
    routed = getattr(text, "num_experts_per_tok", None) or 1
    for block, parameter in block_parameters(model):
        weights[block] += parameter.numel()
        # A tensor of all experts' matrices, of which a token uses some; the longer side bounds the output.
        outputs[block] += routed * max(parameter.shape[1:]) if parameter.ndim == _EXPERTS_NDIM else 0
    at_once = sorted(weights.values())[-_LAYERS:] if fsdp.sharding_strategy == "full_shard" else weights.values()
    sent = [weight for name, weight in model.named_parameters() if lora is None or ".lora_" in name]
    size, largest = parameter_bytes(sent, width=width), width * max(weight.numel() for weight in sent)
    changed = (layer.base_layer.weight for layer in model.modules() if hasattr(layer, "lora_A"))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    numbers = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    held = partial(held_in_blocks, outputs, inputs, checkpointing=fsdp.gradient_checkpointing)
    return LanguageModelSizes(
        weights=parameter_bytes(model.parameters()),
        trained=parameter_bytes(weight for weight in model.parameters() if weight.requires_grad),
        sent=size,
        pieces=min(size, _PIECES * max(PIECE_BYTES, largest)),
        engine=engine,
        adapted=parameter_bytes(changed, width=width),
        gathered=engine - width * (weights.total() - sum(at_once)),
        apart=engine - width * weights.total(),
        layer=width * max(weights.values(), default=0),
        token=2 * text.num_hidden_layers * heads * numbers * width,
        vocabulary=4 * plain.get_input_embeddings().weight.shape[0],
        learning=int(width * held()),
        predicting=width * FORWARD * max(outputs.values(), default=0),
        learning_on_accelerator=int(width * held(per_output=BLOCK_ON_ACCELERATOR)),
    )


def _plain(section: LanguageModelConfig, actor: LanguageActorConfig) -> Any:
    """Return the model that a section names, without adapters."""
    if section.model_path is None:
        return built_model(make_tokenizer(actor), hidden_dim=section.hidden_dim, layers=section.num_layers)
    require_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        check_folder(section.model_path)
        config = config_of(AutoConfig, section.model_path)
        model = cast("Any", AutoModelForCausalLM).from_config(config, trust_remote_code=False)
        settle_ties(model, section.model_path)
        return model
    except (ConfigError, ValueError) as error:
        why, help = first_line(error), "its config.json, of a causal language model, is enough: copy it there"
        raise ConfigError("the sizes of the model are not known", why=why, help=help) from None
