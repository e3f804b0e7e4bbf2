"""The preprocessing of camera images for a policy's vision tower, as in the library that trained the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from recipes.sections.model_folders import read_settings
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

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
