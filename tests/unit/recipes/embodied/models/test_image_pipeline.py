"""Images are resized, padded and coloured as the libraries do whose policies see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from recipes.embodied.models.vla.image_pipeline import ImagePipeline
from rlinf_core.errors import ConfigError

SIZE = 28
SHAPES = [(28, 28), (48, 64), (64, 48), (20, 26), (14, 14), (37, 91)]


def pictures(height: int, width: int) -> NDArray[np.uint8]:
    """Return two pictures with smooth and sharp parts."""
    rows, columns = np.mgrid[:height, :width]
    smooth = np.stack((rows * 255 / height, columns * 255 / width, (rows + columns) % 40 * 6), axis=-1)
    noisy = np.random.default_rng(0).integers(0, 256, (height, width, 3))
    return np.stack((smooth, noisy)).astype(np.uint8)


def within(height: int, width: int) -> tuple[int, int]:
    ratio = max(width / SIZE, height / SIZE)
    return int(height / ratio), int(width / ratio)


def centred(resized: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return pictures in the middle of black ones, in colours from -1 to 1."""
    _, height, width, _ = resized.shape
    whole = np.zeros((len(resized), SIZE, SIZE, 3))
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    whole[:, top : top + height, left : left + width] = resized
    return whole / 127.5 - 1


def between_pixels(images: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float64]:
    """Return the bilinear mean of the four pixels around each point, written out."""
    _, height, width, _ = images.shape
    kept: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
    for wanted, edge in zip(size, (height, width), strict=True):
        at = np.clip((np.arange(wanted) + 0.5) * edge / wanted - 0.5, 0, None)
        low = np.minimum(at.astype(np.int64), edge - 1)
        kept.append((low, np.minimum(low + 1, edge - 1), at - low))
    (top, bottom, down), (left, right, along) = kept
    above = images[:, top][:, :, left] * (1 - along)[:, None] + images[:, top][:, :, right] * along[:, None]
    below = images[:, bottom][:, :, left] * (1 - along)[:, None] + images[:, bottom][:, :, right] * along[:, None]
    return above * (1 - down)[:, None, None] + below * down[:, None, None]


def pixels_of(images: NDArray[np.uint8], resizing: str) -> NDArray[np.float32]:
    return ImagePipeline((SIZE, SIZE), resizing).pixels(torch.from_numpy(images)).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_lerobot_equal_its_formula(shape: tuple[int, int]) -> None:
    images = pictures(*shape)
    wanted = centred(between_pixels(images, within(*shape)))
    np.testing.assert_allclose(pixels_of(images, "lerobot"), wanted, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_openpi_equal_those_of_pil(shape: tuple[int, int]) -> None:
    """PIL computes in whole numbers: a few colours may differ by one of 255."""
    images, (height, width) = pictures(*shape), within(*shape)
    resized = [
        np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)) for image in images
    ]
    difference = np.abs(pixels_of(images, "openpi") - centred(np.stack(resized).astype(np.float64)))
    assert difference.max() <= 1 / 127.5 + 1e-5
    assert (difference > 1e-3).mean() < 0.02


@pytest.mark.parametrize("shape", [(28, 28), (48, 64), (64, 48)], ids=str)
def test_images_of_transformers_are_padded_at_the_end(shape: tuple[int, int]) -> None:
    images, (height, width) = pictures(*shape), within(*shape)
    resized = [np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)) for image in images]
    output = pixels_of(images, "transformers")
    np.testing.assert_allclose(output[:, :height, :width], np.stack(resized) / 127.5 - 1, atol=0.02)
    assert not output[:, height:].any()
    assert not output[:, :, width:].any()


def test_colours_are_those_of_the_settings(tmp_path: Path) -> None:
    images = ImagePipeline((8, 8), "openpi", (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
    images.save(tmp_path)
    assert ImagePipeline.load(str(tmp_path), (8, 8), "transformers") == images
    output = images.pixels(torch.full((1, 8, 8, 3), 51, dtype=torch.uint8))
    torch.testing.assert_close(output[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.1]))


CLIP: dict[str, Any] = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
HALVES: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.parametrize(
    ("files", "scale"),
    [
        ({"preprocessor_config.json": CLIP}, CLIP),
        ({"processor_config.json": {"image_processor": CLIP, "patch_size": 14}}, CLIP),
        ({"processor_config.json": CLIP}, CLIP),
        ({"preprocessor_config.json": CLIP, "processor_config.json": {"image_processor": None}}, CLIP),
        ({"processor_config.json": {"patch_size": 14}}, HALVES),
        ({}, HALVES),
    ],
)
def test_colours_are_those_of_the_folders_processor(files: Any, scale: dict[str, Any], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    images = ImagePipeline.load(str(tmp_path), (8, 8), "transformers")
    assert (images.mean, images.deviation) == (tuple(scale["image_mean"]), tuple(scale["image_std"]))


def test_unknown_ways_to_resize_are_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "resizing": "folded"}')
    with pytest.raises(ConfigError, match="resizes images as `folded`"):
        ImagePipeline.load(str(tmp_path), (8, 8), "transformers")
