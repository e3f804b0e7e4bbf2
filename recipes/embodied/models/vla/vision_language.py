"""Vision-language models of transformers as backbones of policies, loaded from a folder or built from scratch."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.models.folder_facts import ARCHITECTURES
from recipes.embodied.models.vla.image_pipeline import ImagePipeline
from recipes.training.arrays import Array
from recipes.training.huggingface import (
    config_of,
    judging_model,
    load_pretrained,
    load_tokenizer,
    require_transformers,
)
from recipes.training.reading.tied_weights import settle_ties
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


class VisionLanguageModel(nn.Module):
    """A causal language model that takes embeddings of images and words.

    Args:
        model: the model of transformers, possibly within a LoRA wrapper of peft.
        folder: the folder that it came from, with the settings of its image processor; None: it was built.
    """

    def __init__(self, model: Any, folder: str | None) -> None:
        super().__init__()
        self.model = model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._base = [base]  # in a list: it is part of `model` already
        self.images = ImagePipeline.load(folder, image_size(base.config), "stretched")

    @property
    def base(self) -> Any:
        """The model of transformers, without a LoRA wrapper around it."""
        return self._base[0]

    @property
    def width(self) -> int:
        """Size of an embedding of the language model."""
        return int(self.base.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that have an output."""
        return int(self.base.get_output_embeddings().weight.shape[0])

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the language model."""
        return list(self.base.model.language_model.layers)

    def embed_images(self, images: Tensor) -> Tensor:
        """Return embeddings [n, T, W] of images uint8 [n, H, W, 3]."""
        pixels = self.images.pixels(images)
        weight = next(self.base.model.vision_tower.parameters())
        features = self.base.get_image_features(pixel_values=pixels.to(weight.dtype))
        rows = features if isinstance(features, Tensor) else getattr(features, "pooler_output", features)
        return rows if isinstance(rows, Tensor) else torch.stack([row.flatten(end_dim=-2) for row in rows])

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return embeddings [n, T, W] of tokens int64 [n, T]."""
        return self.base.get_input_embeddings()(tokens)

    def states(self, embedded: Tensor, mask: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        """Return last hidden states [n, T, W], and the key-value cache of the layers if `memory` is passed.

        Args:
            embedded: [n, T, W].
            mask: bool [n, M + T], what is not padding, with the M that are remembered.
            memory: the memory of an earlier call, or an empty cache of transformers; None: nothing is remembered.
        """
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -embedded.shape[1] :]
        output = self.base.model.language_model(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=memory,
            use_cache=memory is not None,
        )
        return output.last_hidden_state, output.past_key_values

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Return float32 logits [.., count] of the last `count` tokens of the vocabulary."""
        head = self.base.get_output_embeddings()
        bias = None if head.bias is None else head.bias[-count:]
        return functional.linear(hidden, head.weight[-count:], bias).float()


def shaped_backbone(folder: str) -> PreTrainedModel:
    """Return the model that a folder has the configuration of, with fresh weights.

    Raises:
        ConfigError: there is none.
    """
    require_transformers()
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = config_of(AutoConfig, folder)
    with judging_model(folder):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    settle_ties(model, folder)
    return model


def load_backbone(folder: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the vision-language model in a folder of HuggingFace.

    Raises:
        ConfigError: there is none, or it is of a kind that takes images in another way.
    """
    require_transformers()
    from transformers import AutoModelForImageTextToText

    if are_shapes_only():
        model = shaped_backbone(folder)
    else:
        model = load_pretrained(AutoModelForImageTextToText, folder, trust_remote_code=trust_remote_code)
    kind = cast("Any", model.config).model_type
    known = ARCHITECTURES["vlm_policy"]
    if kind not in known:
        raise ConfigError(
            f"`vlm_policy` cannot use the `{kind}` in `{folder}`",
            why="its image preprocessing is not supported",
            help=f"supported models: {', '.join(known)}; docs/models.md shows how to add your own policy",
        )
    return model


def built_backbone(vocabulary: int, *, width: int, layers: int, image_size: int, patch_size: int) -> PreTrainedModel:
    """Return a LLaVA with fresh weights: a SigLIP, a projection and a Llama.

    Args:
        vocabulary: tokens of the language model.
        width: the width of both; a multiple of 32, which is the width of a head.
        layers: the number of layers of each.
        image_size: height and width, in pixels.
        patch_size: height and width of a patch, in pixels.

    Raises:
        ConfigError: the sizes do not divide.
    """
    require_transformers()
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

    if width % 32 or image_size % patch_size:
        raise ConfigError(
            "the sizes of the vision-language model do not divide evenly",
            why=f"hidden_dim {width} / 32 = {width / 32:g}, image {image_size} / patch_size {patch_size} ="
            f" {image_size / patch_size:g}",
            help="write a `hidden_dim` that is a multiple of 32, and a `patch_size` that divides the image size",
        )
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
    }
    vision = SiglipVisionConfig(**shape, image_size=image_size, patch_size=patch_size)
    cast("Any", vision).vision_use_head = False
    text = LlamaConfig(
        **shape,
        vocab_size=vocabulary,
        num_key_value_heads=width // 32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=_SPECIAL.index(_IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config)
    initialize_narrow(model)
    return model


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
