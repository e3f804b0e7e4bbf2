"""Tokenizers, prompts, fresh weights and sizes of images of policies on vision-language models."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import nn

from recipes.training.arrays import Array
from recipes.training.huggingface import load_tokenizer, require_transformers
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL: Final = ("<pad>", "<s>", "<unk>", "<image>")
_PAD, _BEGIN, _UNKNOWN, _IMAGE = _SPECIAL
# Words of a tokenizer that is built; others are spelled.
_TEXT: Final = """
    the a to of and on in into from with it what action should robot take do task touch reach move pick up place put
    push pull open close lift bring grasp hold turn press slide stack hand arm gripper block cube puck point mark box
    drawer door button handle bowl plate cup peg lever window table red blue green yellow black white orange purple
    left right front back top bottom near far first second small large
"""
_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,:;?!'\"()-_/"


def initialize_narrow(model: nn.Module) -> None:
    """Initialize weights so that outputs have the scale of inputs.

    transformers draws them for wide models, a deviation of 0.02; in a narrow one little would pass from layer to layer,
    and it would not find the instruction's object in the image for thousands of batches.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, 0, module.weight[0].numel() ** -0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0, 0.3 if "position" in name else 1.0)


def built_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of common manipulation words; other words are spelled out."""
    require_transformers()
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Of two ways to write a text the one with the higher sum of scores is taken: words before characters.
    special = [(token, 0.0) for token in _SPECIAL]
    pieces = [
        *special,
        *((word, -1.0) for word in dict.fromkeys(_TEXT.split())),
        *((character, -9.0) for character in _CHARACTERS),
    ]
    known = dict(pieces)
    core: Any = Tokenizer(models.Unigram(list(known.items()), unk_id=2))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=_PAD, bos_token=_BEGIN, unk_token=_UNKNOWN, additional_special_tokens=[_IMAGE]
    )


def load_policy_tokenizer(folder: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, or one that is built.

    Raises:
        ConfigError: there is none, or it has no token for padding.
    """
    if folder is None:
        return built_tokenizer()
    tokenizer = load_tokenizer(folder)
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"the tokenizer in `{folder}` cannot pad prompts to one length",
            why="no token of its vocabulary is its `pad_token`",
            help="copy its `tokenizer_config.json` again from its source",
        )
    return tokenizer


def encoded_prompts(
    tokenizer: Any, prompts: list[str], longest: int, side: str, vocabulary: int
) -> tuple[Array, Array]:
    """Return tokens int64 [n, longest] of texts, and which are not padding, bool [n, longest].

    Args:
        tokenizer: the tokenizer of transformers.
        prompts: n texts, with whatever marks their beginning.
        longest: `max_prompt_tokens`.
        side: the side of the padding, `left` or `right`.
        vocabulary: tokens that the model knows.

    Raises:
        ConfigError: a text is longer, or has a token that the model does not know.
    """
    tokenizer.padding_side = side
    encoded = tokenizer(prompts, padding="max_length", max_length=longest, truncation=False, add_special_tokens=False)
    length = max(map(len, encoded["input_ids"]))
    if length > longest:
        raise ConfigError(
            f"a prompt of {length} tokens exceeds `max_prompt_tokens: {longest}`",
            help=f"write `actor.model.options.max_prompt_tokens: {length}`",
        )
    tokens = np.array(encoded["input_ids"])
    if tokens.max() >= vocabulary:
        word = tokenizer.convert_ids_to_tokens(int(tokens.max()))
        raise ConfigError(
            "the tokenizer is of another model",
            where=str(tokenizer.name_or_path) or None,
            why=f"`{excerpt(str(word), 40)}` is its token {tokens.max()}, and the model knows {vocabulary}",
            help="put the tokenizer of the model in its folder, with its `tokenizer_config.json`",
        )
    return tokens, np.array(encoded["attention_mask"], np.bool_)


def image_size(config: Any) -> tuple[int, int]:
    """Return the height and width of the images that a vision model takes, in pixels."""
    size = config.vision_config.image_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
