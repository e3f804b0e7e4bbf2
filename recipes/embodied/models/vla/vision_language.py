"""Tokenizers, prompts, sizes, adapters and weights of policies on vision-language models."""

# transformers and safetensors are largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.training.arrays import Array
from recipes.training.huggingface import first_line, load_tokenizer, require_transformers, with_lora
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.sections.actor import LoraSettings

# The width of a head in a newly built model.
HEAD: Final = 32

_SPECIAL: Final = ("<pad>", "<s>", "<unk>", "<image>")
_PAD, _BEGIN, _UNKNOWN, _IMAGE = _SPECIAL
# Words of a newly built tokenizer; others are spelled out.
_TEXT: Final = """
    the a to of and on in into from with it what action should robot take do task touch reach move pick up place put
    push pull open close lift bring grasp hold turn press slide stack hand arm gripper block cube puck point mark box
    drawer door button handle bowl plate cup peg lever window table red blue green yellow black white orange purple
    left right front back top bottom near far first second small large
"""
_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,:;?!'\"()-_/"
_LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def built_heads(width: int) -> int:
    """Return the number of heads of a newly built model with layers of some width.

    Raises:
        ConfigError: the width does not divide evenly.
    """
    if width % HEAD:
        raise ConfigError(
            "the sizes of the vision-language model do not divide evenly",
            why=f"hidden_dim {width} / {HEAD} = {width / HEAD:g}",
            help=f"write a `hidden_dim` that is a multiple of {HEAD}",
        )
    return width // HEAD


def built_image_size(spec: EnvSpec, patch: int) -> int:
    """Return height and width of the images of a newly built model: whole patches of `patch` pixels."""
    largest = max(max(height, width) for height, width, _ in spec.cameras.values())
    return -(-largest // patch) * patch


def initialize_narrow(model: nn.Module) -> None:
    """Initialize weights so that outputs have the scale of inputs.

    transformers draws weights for wide models, with a std of 0.02; in a narrow one signals would fade from layer to
    layer, and the model would not find the instruction's object in the image for thousands of batches.
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

    # Of two tokenizations, the one with the larger sum of scores wins: words before characters.
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
    """Return the tokenizer in a folder, or a newly built one.

    Raises:
        ConfigError: the tokenizer is missing, or has no padding token.
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
    """Return tokens int64 [n, longest] of texts, and a mask of those that are not padding, bool [n, longest].

    Args:
        tokenizer: the tokenizer of transformers.
        prompts: n texts, including their start tokens.
        longest: `max_prompt_tokens`.
        side: the side of the padding, `left` or `right`.
        vocabulary: the number of tokens that the model knows.

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


def adapted(network: nn.Module, lora: LoraSettings | None) -> Any:
    """Return a network that is not a transformers model, with adapters if configured."""
    if lora is None:
        return network
    # peft would take the attribute `config` for a transformers model's; a module list hides it.
    targets = lora if lora.target_modules else lora.model_copy(update={"target_modules": _LORA_TARGETS})
    return with_lora(cast("Any", nn.ModuleList([network])), targets, None)


@contextmanager
def judging_folder(folder: str, model: str, example: str) -> Generator[None]:
    """Report anything missing or wrong in a model's description as a folder without such a model.

    Args:
        folder: the folder.
        model: the kind of the model.
        example: a valid folder, in words.

    Raises:
        ConfigError: something is missing or wrong.
    """
    try:
        yield
    except KeyError as error:
        raise ConfigError(
            f"`{folder}` has no {model}", why=f"it lacks {error}", help=f"name a folder of {example}"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"`{folder}` has no {model}", why=first_line(error), help="copy the folder again") from None


@torch.no_grad()
def load_renamed(
    network: nn.Module,
    folder: str,
    files: Iterable[Path],
    renamed: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]],
    unread: Callable[[str], bool],
    *,
    kind: str,
) -> None:
    """Load the weights in a folder of another library into a network; every weight must be used.

    Args:
        network: takes the weights.
        folder: the folder, for errors.
        files: the files of weights.
        renamed: returns the network's weights, by name, that a weight of the folder contains; none if it has no effect.
        unread: whether the folder may lack a weight of the network.
        kind: the kind of the model, for errors.

    Raises:
        ConfigError: the weights are of another model, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    own: dict[str, Tensor] = network.state_dict()
    missing = {name: None for name in own if not unread(name)}
    strange: str | None = None
    try:
        for file in files:
            for theirs, weight in load_file(file).items():
                for name, part in renamed(theirs, weight):
                    if name not in own:
                        strange = strange or f"they also have `{name}`"
                    elif own[name].shape != part.shape:
                        strange = strange or f"`{theirs}` has the shape {list(weight.shape)}"
                    else:
                        own[name].copy_(part)
                    missing.pop(name, None)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the weights in `{folder}` cannot be read", why=first_line(error), help="copy the folder again"
        ) from None
    if missing or strange is not None:
        raise ConfigError(
            f"the weights in `{folder}` do not belong to {kind}",
            why=f"they lack `{next(iter(missing))}`" if missing else strange,
            help="copy the complete folder again, or name a folder of such a model",
        )
