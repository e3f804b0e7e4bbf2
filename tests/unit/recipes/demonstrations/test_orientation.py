"""Orientation of pictures, held against those of an environment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.demonstrations.demonstrations import flipped
from recipes.demonstrations.names import Flip
from recipes.demonstrations.orientation import (
    FLIPS,
    OrientationMatch,
    PicturesShown,
    compared_orientations,
    matched_orientation,
    thumbnails,
)
from tests.unit.recipes.demonstrations.scenes import scenes

SEEN = thumbnails(scenes(6, seed=1))


def matched(kept: NDArray[np.uint8], flip: Flip = "none", seen: NDArray[np.float32] = SEEN) -> OrientationMatch:
    """Return the match of pictures as a file keeps them, turned by `data.flip`."""
    shown = PicturesShown("set", flip, {"main": thumbnails(flipped(kept, flip))})
    return matched_orientation(shown, "main", seen)


@pytest.mark.parametrize("configured", FLIPS)
@pytest.mark.parametrize("right", FLIPS)
def test_the_right_flip_is_named(right: Flip, configured: Flip) -> None:
    result = matched(flipped(scenes(8, seed=2), right), configured)
    assert result.best == right
    assert result.verdict == ("agrees" if right == configured else "differs")
    assert result.likeness[right] > 0.9
    assert max(result.likeness[flip] for flip in FLIPS if flip != right) < 0.8


def test_an_upside_down_symmetric_scene_is_refused() -> None:
    kept, seen = scenes(8, seed=2, mirrored_alike=True), thumbnails(scenes(6, seed=3, mirrored_alike=True))
    assert matched(kept[:, ::-1], "none", seen).verdict == "differs"
    assert matched(kept[:, ::-1], "none", seen).best in ("vertical", "rotate180")


def test_a_symmetric_scene_is_undecided() -> None:
    kept, seen = scenes(8, seed=2, mirrored_alike=True), thumbnails(scenes(6, seed=3, mirrored_alike=True))
    assert matched(kept, "none", seen).verdict == "undecided"
    assert matched(kept, "horizontal", seen).verdict == "undecided"


def noise(count: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 48, 48, 3), np.uint8)


def one_colour(count: int, seed: int) -> NDArray[np.uint8]:
    return np.full((count, 48, 48, 3), seed, np.uint8)


def lone_block(count: int, seed: int) -> NDArray[np.uint8]:
    """Return a block anywhere on a plain ground: mirrored places are as likely as others."""
    pictures, random = np.full((count, 48, 48, 3), 200, np.uint8), np.random.default_rng(seed)
    for picture in pictures:
        row, column = random.integers(0, 40, 2)
        picture[row : row + 8, column : column + 8] = (255, 0, 0)
    return pictures


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("draw", [noise, one_colour, lone_block])
def test_pictures_without_orientation_are_undecided(draw: Callable[[int, int], NDArray[np.uint8]], seed: int) -> None:
    assert matched(draw(8, seed), "none", thumbnails(draw(6, seed + 100))).verdict == "undecided"


def test_too_few_different_pictures_are_undecided() -> None:
    same = np.repeat(lone_block(1, seed=0), 8, axis=0)
    mirrored = thumbnails(same[:, :, ::-1])
    assert matched(same, "none", mirrored).likeness["horizontal"] > 0.99
    assert matched(same, "none", mirrored).verdict == "undecided"


def test_light_and_contrast_do_not_matter() -> None:
    darker = (scenes(8, seed=2) * 0.5 + 10).astype(np.uint8)
    assert matched(darker).verdict == "agrees"
    assert matched(darker[:, ::-1]).best == "vertical"


@pytest.mark.parametrize("size", [(8, 8), (37, 50), (24, 23), (128, 128)])
def test_thumbnails_turn_as_their_pictures(size: tuple[int, int]) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, *size, 3), np.uint8)
    for flip in FLIPS:
        assert np.allclose(thumbnails(flipped(pictures, flip)), flipped(thumbnails(pictures), flip), atol=1e-2)
    assert thumbnails(pictures).mean() == pytest.approx(pictures.mean(), rel=1e-4)


def test_cameras_are_compared_by_their_names() -> None:
    upright = thumbnails(scenes(8, seed=2))
    shown = [PicturesShown("a", "none", {"main": upright, "wrist": upright[:, ::-1]})]
    seen = [{"main": SEEN[:3]}, {"main": SEEN[3:], "wrist": SEEN, "other": SEEN}]
    results = {
        compared_orientation.camera: compared_orientation.verdict
        for compared_orientation in compared_orientations(shown, seen)
    }
    assert results == {"main": "agrees", "wrist": "differs"}
