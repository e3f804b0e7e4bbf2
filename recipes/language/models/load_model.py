"""Language models and tokenizers, loaded from a folder or built from scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from recipes.language.config.language_config import SYMBOLS
from recipes.sections.model_folders import named_stops
from recipes.training.huggingface import first_line, load_pretrained, load_tokenizer, require_transformers
from recipes.training.typed_tensors import cast_weights
from recipes.training.weight_sources import hollow_pretrained
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from recipes.language.config.described_models import DescribedModel

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"


def load_model(folder: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the causal language model of a folder, on the CPU; no code of the folder is run.

    Raises:
        ConfigError: the folder does not exist, or its weights are missing.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM

    return load_pretrained(AutoModelForCausalLM, folder, dtype)


def hollow_causal(folder: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the causal language model of a folder without its weights; see `hollow_pretrained`.

    Raises:
        ConfigError: the folder does not exist, or has no causal language model.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM

    try:
        return hollow_pretrained(AutoModelForCausalLM, folder, dtype)
    except ValueError as error:
        raise ConfigError(f"`{folder}` has no causal language model", why=first_line(error)) from None


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Difference:
    """Check that a model's embedding has a row for each token of a tokenizer, and return both numbers as a note.

    Raises:
        ConfigError: the embedding has fewer rows.
    """
    known: int = cast("Any", model.get_input_embeddings()).weight.shape[0]
    needed = len(cast("Any", tokenizer))
    if needed > known:
        raise ConfigError(
            f"the tokenizer has {needed} tokens, but the model only {known}",
            help="use the tokenizer that the model was trained with",
        )
    return Difference(note=f"{needed} tokens, {known} rows")


def built_tokenizer(
    symbols: str = SYMBOLS, words: Sequence[str] = (), template: str | None = None
) -> PreTrainedTokenizerBase:
    """Return a tokenizer of single characters, and of some words that are one token each, with a chat template."""
    require_transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((PAD, END, UNKNOWN, *dict.fromkeys((*symbols, *words))))}
    core: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    pattern = "|".join([*map(re.escape, words), "."])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    cast("Any", made).chat_template = template
    return made


def built_model(
    tokenizer: PreTrainedTokenizerBase, *, hidden_dim: int = 128, layers: int = 2, positions: int = 32768, seed: int = 0
) -> PreTrainedModel:
    """Return a Qwen2 with fresh weights that fits a tokenizer, in float32 on the CPU.

    Args:
        tokenizer: the tokenizer, which defines the vocabulary.
        hidden_dim: the width, even; heads have 32 numbers, or more if it is no multiple of 32.
        layers: the number of layers.
        positions: the maximum sequence length.
        seed: the seed of the weights.
    """
    require_transformers()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    made: Any = tokenizer
    heads = next(count for count in range(max(1, hidden_dim // 32), 0, -1) if hidden_dim % (2 * count) == 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(made),
            hidden_size=hidden_dim,
            intermediate_size=2 * hidden_dim,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=made.eos_token_id,
            pad_token_id=made.pad_token_id,
        )
        return Qwen2ForCausalLM(config)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: str | None) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's, and those named in the model's folder.

    Raises:
        ConfigError: the folder names invalid tokens.
    """
    made: Any = tokenizer
    ids: list[int] = [made.eos_token_id] if made.eos_token_id is not None else []
    ids += named_stops(Path(folder)) if folder else ()
    return tuple(dict.fromkeys(ids))


def make_tokenizer(config: DescribedModel) -> PreTrainedTokenizerBase:
    """Return the actor's tokenizer, from its folder or the model's, or built from scratch.

    Raises:
        ConfigError: the folder has no tokenizer.
    """
    folder = config.tokenizer.tokenizer_model or config.model.model_path
    return (
        load_tokenizer(folder)
        if folder
        else built_tokenizer(config.built_symbols, config.built_words, config.built_template)
    )


def make_model(
    config: DescribedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return the model that `actor.model` describes, loaded from a folder or built from scratch.

    Raises:
        ConfigError: the model cannot be loaded, or lacks tokens of the tokenizer.
    """
    model = config.model
    if model.model_path is None:
        built = built_model(tokenizer, hidden_dim=model.hidden_dim, layers=model.num_layers, seed=config.seed)
        cast_weights(built, dtype)
        return built
    loaded = load_model(model.model_path, dtype)
    check_vocabulary(loaded, tokenizer)
    return loaded
