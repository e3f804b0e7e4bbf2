"""The comparison of demonstrations and environments before the first episode: facts, and the orientation of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import Flip, camera_like
from recipes.demonstrations.demonstrations import Demonstrations, flipped


class DataFacts(NamedTuple):
    """The facts of demonstrations.

    Attributes:
        where: their files or folders.
        fps: rows per second; None: not recorded.
        instructions: the distinct instructions of the rows.
        reads_instructions: whether the policy that learns from the data is conditioned on instructions.
        cameras: the data's camera for each camera of the environment.
        guessed: the environment's cameras paired by a guess: either side has one camera, and their names differ.
        actions: min, max, mean and standard deviation of each action dimension; empty for discrete actions.
    """

    where: str
    fps: float | None
    instructions: tuple[str, ...]
    reads_instructions: bool
    cameras: Mapping[str, str]
    guessed: tuple[str, ...]
    actions: tuple[tuple[float, float, float, float], ...]


class StartFacts(NamedTuple):
    """The facts of the first starts of environments.

    Attributes:
        control_hz: actions per second; None: unknown.
        instructions: the instructions of the first starts; None: the environments observe none, or, like a real arm, do
            not start before their first episode.
    """

    control_hz: float | None
    instructions: tuple[str, ...] | None


def facts_of(
    data: Demonstrations, cameras: Mapping[str, str], named: Mapping[str, str], *, reads_instructions: bool = False
) -> DataFacts:
    """Return the facts of demonstrations.

    Args:
        data: the demonstrations.
        cameras: the data's camera for each camera of the environment.
        named: the pairs of cameras that `data.cameras` names.
        reads_instructions: whether the policy that learns from the data is conditioned on instructions.
    """
    numbers: list[int] = np.unique(data.task_of).tolist()
    chooses = data.actions.dtype.kind in "iu"
    values: NDArray[np.float64] = data.actions[:, : 0 if chooses else None].astype(np.float64)
    columns = zip(*(of(values, axis=0).tolist() for of in (np.min, np.max, np.mean, np.std)), strict=True)
    return DataFacts(
        data.where,
        data.fps,
        tuple(data.tasks[index] for index in numbers),
        reads_instructions,
        dict(cameras),
        tuple(name for name, theirs in cameras.items() if name not in named and camera_like(name, [theirs]) is None),
        tuple(columns),
    )


# Downscaled images [n, G, G, 3], with values from 0 to 255.
Thumbnails: TypeAlias = NDArray[np.float32]

FLIPS: Final[tuple[Flip, ...]] = get_args(Flip)
_GRID: Final = 24
# Thresholds for an orientation being clearly more alike than another: the ratio of their (1 - correlation), and the
# difference of their correlations.
_UNLIKE_SHARE: Final = 0.6
_GAP: Final = 0.05
# The share of images that must agree one by one, and the fewest distinct ones: the objects of a single image may lie in
# mirrored places by chance.
_AGREEING: Final = 0.9
_FEWEST: Final = 3


class PicturesShown(NamedTuple):
    """The first images of a data set's episodes.

    Attributes:
        where: its file or folder.
        flip: the flip that is applied to them.
        cameras: the cameras by the environment's name.
    """

    where: str
    flip: Flip
    cameras: Mapping[str, Thumbnails]


class OrientationMatch(NamedTuple):
    """The orientation in which the images of a camera are most like the environment's.

    Attributes:
        where: the data set's file or folder.
        camera: the environment's name of the camera.
        flip: the flip that is applied to the data set's images.
        likeness: mean correlation with the most similar image of the environment, by the value of `flip`.
        verdict: `undecided` if no orientation is clearly the most alike.
    """

    where: str
    camera: str
    flip: Flip
    likeness: Mapping[Flip, float]
    verdict: Literal["agrees", "undecided", "differs"]

    @property
    def best(self) -> Flip:
        """The value of `flip` under which the images are most alike."""
        return max(self.likeness, key=lambda flip: (self.likeness[flip], flip == self.flip))

    @property
    def figures(self) -> str:
        """The correlations as text."""
        return ", ".join(f"`{flip}` {value:.2f}" for flip, value in self.likeness.items())


def thumbnails(pictures: NDArray[np.uint8]) -> Thumbnails:
    """Return images uint8 [n, H, W, 3] scaled down; flipping them before or after gives the same."""
    rows, columns = (_means(size) for size in pictures.shape[1:3])
    return np.einsum("ih,nhwc,jw->nijc", rows, pictures, columns, optimize=True).astype(np.float32)


def _means(size: int) -> NDArray[np.float64]:
    """Return weights [G, size] that average a line of pixels over G equal parts."""
    edges, pixels = np.linspace(0, size, _GRID + 1), np.arange(size)
    overlaps = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.maximum(overlaps, 0) * _GRID / size


def matched_orientation(shown: PicturesShown, camera: str, seen: Thumbnails) -> OrientationMatch:
    """Compare the images of a camera in four orientations with those of the environment.

    Args:
        shown: the images of the data set.
        camera: the environment's name of the camera.
        seen: the images of the environment, at the first states of episodes.
    """
    here = shown.cameras[camera]
    environment = _standardized(seen)
    pairs: dict[Flip, NDArray[np.float64]] = {
        flip: _standardized(flipped(flipped(here, shown.flip), flip)) @ environment.T for flip in FLIPS
    }
    likeness: dict[Flip, float] = {flip: float(pairs[flip].max(axis=1).mean()) for flip in FLIPS}
    match = OrientationMatch(shown.where, camera, shown.flip, likeness, "undecided")
    if max(_different(here), _different(seen)) < _FEWEST:
        return match
    if match.best != shown.flip and _is_better(pairs[match.best], pairs[shown.flip]):
        return match._replace(verdict="differs")
    others: list[Flip] = [flip for flip in FLIPS if flip != shown.flip]
    agrees = match.best == shown.flip and all(_is_better(pairs[shown.flip], pairs[flip]) for flip in others)
    return match._replace(verdict="agrees" if agrees else "undecided")


def compared_orientations(
    shown: Sequence[PicturesShown], seen: Sequence[Mapping[str, Thumbnails]]
) -> list[OrientationMatch]:
    """Return a comparison for each camera of each data set.

    Args:
        shown: the first images of data sets.
        seen: the first images of environments, by worker.
    """
    names = dict.fromkeys(camera for worker in seen for camera in worker)
    pictures = {camera: np.concatenate([worker[camera] for worker in seen if camera in worker]) for camera in names}
    return [
        matched_orientation(data_set, camera, pictures[camera])
        for data_set in shown
        for camera in data_set.cameras
        if camera in pictures
    ]


def _is_better(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Return whether correlations [n, m] are clearly larger than others for nearly every image of both sides."""
    shares = [_is_clear(one.max(axis=axis), other.max(axis=axis)).mean() for axis in (0, 1)]
    return min(shares) >= _AGREEING


def _is_clear(larger: NDArray[np.float64], smaller: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (1 - larger <= _UNLIKE_SHARE * (1 - smaller)) & (larger - smaller >= _GAP)


def _standardized(pictures: Thumbnails) -> NDArray[np.float64]:
    """Return images as rows of mean 0 and length 1, whose products are correlations; an image of one color is all 0."""
    rows = pictures.reshape(len(pictures), -1).astype(np.float64)
    rows = rows - rows.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


def _different(pictures: Thumbnails) -> int:
    return len(np.unique(pictures.reshape(len(pictures), -1).round(), axis=0))
