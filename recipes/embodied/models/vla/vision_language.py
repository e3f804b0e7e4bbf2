"""Tokenizers, prompts, images, sizes, adapters and weights of policies on vision-language models.

Images are prepared for a vision tower as in the library that trained the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.sections.model_folders import read_settings
from recipes.training.arrays import Array
from recipes.training.huggingface import first_line, load_tokenizer, require_transformers, with_lora
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.sections.actor import LoraSettings


_IMAGE_SETTINGS: Final = "preprocessor_config.json"
_PROCESSOR_SETTINGS: Final = "processor_config.json"
_HALF: Final = (0.5, 0.5, 0.5)
Resampling = Literal["bilinear", "bicubic", "triangle"]


@dataclass(frozen=True, slots=True)
class Resizing:
    """A way to resize an image for a vision tower.

    Attributes:
        resampling: bilinear: from the four pixels around a point, as torch by default; triangle: bilinear over all
            pixels that merge into one, as PIL; bicubic: the same with cubic polynomials.
        pads: stretch: the aspect ratio changes; end: it is kept, and the mean color is padded below and at the right;
            centre: black is padded on both sides.
        rounds: whether colors are rounded to integers after each of the two directions is resized, as PIL does.
    """

    resampling: Resampling
    pads: Literal["stretch", "end", "centre"]
    rounds: bool = False


# By the library that wrote a folder.
RESIZINGS: Final[Mapping[str, Resizing]] = {
    "transformers": Resizing("bicubic", "end"),
    "lerobot": Resizing("bilinear", "centre"),
    "openpi": Resizing("triangle", "centre", rounds=True),
    "openvla": Resizing("bicubic", "stretch", rounds=True),
}


def centre_crop(pixels: Tensor, share: float) -> Tensor:
    """Crop the center of images float32 [n, 3, H, W] from 0 to 255, scale it to their size, and round colors to
    integers.

    As in TensorFlow's `crop_and_resize`, corners map to corners, with bilinear interpolation.

    Args:
        pixels: the images.
        share: the share of the area that remains.
    """
    edge = share**0.5
    rows, columns = (torch.linspace(-edge, edge, size, device=pixels.device) for size in pixels.shape[2:])
    places = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1).expand(len(pixels), -1, -1, -1)
    middle = functional.grid_sample(pixels, places, mode="bilinear", align_corners=True)
    return (middle / 255 * 255.5).floor().clamp(0, 255)


@dataclass(frozen=True, slots=True)
class ImagePipeline:
    """The conversion of an image to a vision tower's input.

    Attributes:
        size: height and width, in pixels.
        resizing: a name of `RESIZINGS`.
        mean: the mean of the colors, [3], as fractions of 255.
        deviation: the standard deviation by which the colors are divided.
    """

    size: tuple[int, int]
    resizing: str = "transformers"
    mean: tuple[float, ...] = _HALF
    deviation: tuple[float, ...] = _HALF

    def pixels(self, images: Tensor) -> Tensor:
        """Return float32 images [n, 3, H, W] of images uint8 [n, h, w, 3]."""
        return self.normalized(self.resized(images))

    def resized(self, images: Tensor) -> Tensor:
        """Return images float32 [n, 3, h, w] from 0 to 255, without padding of the mean color."""
        how = RESIZINGS[self.resizing]
        pixels = images.permute(0, 3, 1, 2).float()
        height, width = self._resized(pixels.shape[2], pixels.shape[3], how)
        if pixels.shape[-2:] != (height, width):
            mode = "bicubic" if how.resampling == "bicubic" else "bilinear"
            smooths = how.resampling != "bilinear"
            for size in ((pixels.shape[2], width), (height, width)) if how.rounds else ((height, width),):
                pixels = functional.interpolate(pixels, size, mode=mode, antialias=smooths).clamp(0, 255)
                pixels = (pixels + 0.5).floor() if how.rounds else pixels
        if how.pads != "centre":
            return pixels
        below, right = self.size[0] - height, self.size[1] - width
        return functional.pad(pixels, (right // 2, right - right // 2, below // 2, below - below // 2))

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return images of `resized` with normalized colors, and the mean color as padding."""
        below, right = self.size[0] - pixels.shape[2], self.size[1] - pixels.shape[3]
        shift, scale = (pixels.new_tensor(values)[:, None, None] for values in (self.mean, self.deviation))
        normalized = (pixels / 255 - shift) / scale
        return functional.pad(normalized, (0, right, 0, below)) if below or right else normalized

    def _resized(self, height: int, width: int, how: Resizing) -> tuple[int, int]:
        """Return the size of an image within the padding."""
        if how.pads == "stretch":
            return self.size
        ratio = max(width / self.size[1], height / self.size[0])
        return int(height / ratio), int(width / ratio)

    def describe(self) -> dict[str, Any]:
        """Return the pipeline as plain data, for those who use an export."""
        how = RESIZINGS[self.resizing]
        resampling = {"triangle": "bilinear, antialiased", "bicubic": "bicubic, antialiased", "bilinear": "bilinear"}
        padding = {"stretch": "none", "end": "the mean colour, below and right", "centre": "black, on both sides"}
        return {
            "resized": list(self.size),
            "resampling": resampling[how.resampling],
            "padding": padding[how.pads],
            "mean": list(self.mean),
            "std": list(self.deviation),
            "scale": 1 / 255,
        }

    def save(self, folder: Path) -> None:
        """Write the settings that `load` reads, in the format of transformers' image processors."""
        about = {"image_mean": self.mean, "image_std": self.deviation, "resizing": self.resizing}
        (folder / _IMAGE_SETTINGS).write_text(json.dumps(about) + "\n")

    @classmethod
    def load(cls, folder: str | None, size: tuple[int, int], resizing: str) -> ImagePipeline:
        """Return the pipeline with the color statistics of a folder's image processor.

        Args:
            folder: the folder of the model; None: a newly built model.
            size: the input size of its vision tower.
            resizing: a name of `RESIZINGS`, unless `save` wrote another name there.

        Raises:
            ConfigError: the settings name an unknown way to resize.
        """
        about: dict[str, Any] = {}
        none: dict[str, Any] = {}
        if folder is not None:
            files = [Path(folder) / name for name in (_IMAGE_SETTINGS, _PROCESSOR_SETTINGS)]
            known = [read_settings(file) for file in files if file.is_file()]
            # A processor of transformers 5 nests the image processor's settings in its own.
            inner = [said["image_processor"] for said in known if isinstance(said.get("image_processor"), dict)]
            about = next((said for said in (*known, *inner) if "image_mean" in said), none)
        resizing = str(about.get("resizing", resizing))
        if resizing not in RESIZINGS:
            raise ConfigError(
                f"`{folder}` has been written by another version: it resizes images as `{resizing}`",
                help=f"known ways: {', '.join(RESIZINGS)}",
            )
        mean, deviation = (_colours(about.get(name, _HALF), name, folder) for name in ("image_mean", "image_std"))
        return cls(size, resizing, mean, deviation)


def _colours(values: Any, name: str, folder: str | None) -> tuple[float, ...]:
    """Return a mean or standard deviation of colors: three numbers, as fractions of 255.

    Raises:
        ConfigError: the value is something else.
    """
    numbers = cast("Sequence[Any]", values) if type(values) in (list, tuple) else ()
    is_known = all(type(number) in (float, int) and 0 <= number <= 1 for number in numbers)
    if len(numbers) == 3 and is_known and (name == "image_mean" or all(numbers)):
        return tuple(numbers)
    raise ConfigError(
        f"`{name}` in the image processor's settings of `{folder}` is `{excerpt(repr(values), 40)}`",
        why="colours are normalized by three numbers from 0 to 1" + (", none of them 0" if name == "image_std" else ""),
        help="copy the folder again from its source",
    )


# transformers and safetensors are largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


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
