"""Pictures of demonstrations, held against those of an environment and against the list of episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError, Flip
from recipes.demonstrations.demonstrations import flipped
from recipes.demonstrations.first_comparison import (
    FLIPS,
    OrientationMatch,
    PicturesShown,
    compared_orientations,
    matched_orientation,
    thumbnails,
)
from recipes.demonstrations.lerobot import lerobot_set
from recipes.demonstrations.lerobot.episode_list import read_episodes
from recipes.demonstrations.lerobot.lerobot_set import check_videos, read_lerobot
from recipes.demonstrations.lerobot.set_info import Feature, read_info
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.demonstrations.pictures import write_video


def scenes(count: int, seed: int, *, size: int = 48, mirrored_alike: bool = False) -> NDArray[np.uint8]:
    """Return pictures [n, size, size, 3] of a dark wall, a bright table, an arm, and a block that lies anywhere.

    Args:
        count: n.
        seed: of the places of the block.
        size: of the pictures.
        mirrored_alike: the arm is in the middle and there is no block.
    """
    random = np.random.default_rng(seed)
    pictures = np.full((count, size, size, 3), 60, np.uint8)
    pictures[:, size // 3 :] = (200, 170, 120)
    left = (size - size // 6) // 2 if mirrored_alike else size // 8
    pictures[:, : size * 2 // 3, left : left + size // 6] = (230, 230, 240)
    block = size // 8
    for item in pictures if not mirrored_alike else ():
        row, column = random.integers(size // 3, size - block), random.integers(0, size - block)
        item[row : row + block, column : column + block] = (180, 20, 20)
    noise = random.normal(0, 4, pictures.shape)
    return np.clip(pictures + noise, 0, 255).astype(np.uint8)


SEEN = thumbnails(scenes(6, seed=1))


def matched(kept: NDArray[np.uint8], flip: Flip = "none", seen: NDArray[np.float32] = SEEN) -> OrientationMatch:
    """Return the match of pictures as a file keeps them, turned by `flip`."""
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


def test_a_symmetric_scene_is_undecided_but_for_up_and_down() -> None:
    kept, seen = scenes(8, seed=2, mirrored_alike=True), thumbnails(scenes(6, seed=3, mirrored_alike=True))
    assert matched(kept, "none", seen).verdict == matched(kept, "horizontal", seen).verdict == "undecided"
    turned = matched(kept[:, ::-1], "none", seen)
    assert turned.verdict == "differs"
    assert turned.best in ("vertical", "rotate180")


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
    results = {result.camera: result.verdict for result in compared_orientations(shown, seen)}
    assert results == {"main": "agrees", "wrist": "differs"}


pytest.importorskip("av")
FPS, EPISODES, LENGTH = 20.0, 12, 5
CAMERAS = ("front", "wrist")
Places = Callable[[int], float]


def grey(row: int) -> NDArray[np.uint8]:
    """Return a picture that tells its row."""
    return np.full((16, 16, 3), 10 + 4 * (row % 60), np.uint8)


def exact(number: int) -> float:
    return number * LENGTH / FPS


def make_set(folder: Path, begins: Places = exact, ends: Places | None = None, frames: int = EPISODES * LENGTH) -> Path:
    """Write a data set whose episodes share one video of each camera, which the list says begin and end elsewhere."""
    features = {"action": Feature("float32", (1,))}
    features |= {f"observation.images.{name}": Feature("video", (16, 16, 3)) for name in CAMERAS}
    with DatasetWriter(folder, FPS, features) as writer:
        for number in range(EPISODES):
            pictures = np.stack([grey(number * LENGTH + row) for row in range(LENGTH)])
            columns = {f"observation.images.{name}": pictures for name in CAMERAS}
            writer.add({"action": np.zeros((LENGTH, 1), np.float32), **columns}, "lift it")
    for name in CAMERAS:
        videos = folder / "videos" / f"observation.images.{name}" / "chunk-000"
        for video in videos.glob("*.mp4"):
            video.unlink()
        write_video(videos / "file-000.mp4", [grey(row) for row in range(frames)], FPS)

    def place(row: dict[str, Any]) -> None:
        number = row["episode_index"]
        for name in CAMERAS:
            moves = name == CAMERAS[-1]  # the first camera's list is right
            begin = begins(number) if moves else exact(number)
            end = ends(number) if moves and ends is not None else begin + LENGTH / FPS
            key = f"videos/observation.images.{name}"
            row |= {f"{key}/file_index": 0, f"{key}/from_timestamp": begin, f"{key}/to_timestamp": end}

    edit(folder, place)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each row of the list of episodes."""
    [file] = folder.glob("meta/episodes/*/*.parquet")
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        change(row)
    pq.write_table(pa.Table.from_pylist(rows), file)


def rows_shown(folder: Path) -> list[int]:
    """Return the row that each picture of the last camera tells."""
    camera = read_lerobot(folder).cameras[CAMERAS[-1]]
    order = np.random.default_rng(0).permutation(EPISODES * LENGTH)
    pictures = camera.read(order)
    shown = np.empty(len(order), np.int64)
    shown[order] = np.rint((pictures.reshape(len(order), -1).mean(axis=1) - 10) / 4)
    return shown.tolist()


@pytest.mark.parametrize("begins", [exact, lambda number: float(np.float32(exact(number)))], ids=["exact", "float32"])
def test_each_row_has_its_own_picture(tmp_path: Path, begins: Places) -> None:
    assert rows_shown(make_set(tmp_path / "set", begins)) == list(range(EPISODES * LENGTH))


@pytest.mark.parametrize(
    ("begins", "ends", "message"),
    [
        (lambda n: exact(max(0, n - 1)), None, "episode 1 of camera `wrist` begins at 0 s of its video, which still"),
        (lambda n: exact(n if n < 7 else n - 1), None, "episode 7 .* begins at 1.5 s .* belongs to episode 6"),
        (lambda _: 0.0, None, "episode 1 .* begins at 0 s .* belongs to episode 0"),
        (lambda n: exact(n ^ 1 if n < 2 else n) - (n == 0) * 1 / FPS, None, "episode 0 .* belongs to episode 1"),
        (lambda n: exact(n) - 0.003 * n, None, "episode 5 .* begins at 1.235 s of its video, where there is no frame"),
        (lambda n: exact(n) + 0.003 * n, None, "episode 5 .* begins at 1.265 s of its video, where there is no frame"),
        (lambda n: exact(n) - exact(1), None, "episode 0 .* begins at -0.25 s of its video, where there is no frame"),
        (lambda _: float("nan"), None, "episode 0 .* begins at nan s|episode 0 .* lasts from nan"),
        (exact, lambda n: exact(n) + 3 / FPS, "episode 0 .* lasts from 0 to 0.15 s .* its 5 rows last 0.25 s"),
        (exact, lambda n: exact(n + 2), "episode 0 .* lasts from 0 to 0.5 s .* its 5 rows last 0.25 s"),
        (exact, lambda n: exact(n - 1), "episode 0 .* lasts from 0 to -0.25 s"),
    ],
)
def test_episodes_in_the_place_of_others_are_refused(
    tmp_path: Path, begins: Places, ends: Places | None, message: str
) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        read_lerobot(make_set(tmp_path / "set", begins, ends))
    assert "`from_timestamp`" in str(caught.value.help)
    assert str(caught.value.where).endswith("videos/observation.images.wrist/chunk-000/file-000.mp4")


def zeroed(video: Path) -> None:
    """Overwrite the first frame of a video."""
    content = bytearray(video.read_bytes())
    begin = content.index(b"mdat") + 4
    content[begin : begin + 40] = bytes(40)
    video.write_bytes(content)


def of_frames(count: int, fps: float = FPS) -> Callable[[Path], None]:
    return lambda video: write_video(video, [grey(row) for row in range(count)], fps) and None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        # Those of a deleted episode shift the pictures of all that follow.
        (of_frames(65), "the video has 65 frames, but the episodes in it have 60 rows"),
        (of_frames(59), "the video has 59 frames, but the episodes in it have 60 rows"),
        (of_frames(60, FPS / 2), r"frame \d of episode \d should be at .* s of its video"),
        (zeroed, "a video cannot be decoded"),
    ],
)
def test_a_video_of_other_frames_is_refused_before_its_use(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    """By the check before a run, and else when the first of its pictures is read, whichever that is."""
    folder = make_set(tmp_path / "set")
    info = read_info(folder)
    check_videos(folder, info, read_episodes(folder, info))
    video = folder / "videos/observation.images.wrist/chunk-000/file-000.mp4"
    spoil(video)
    with pytest.raises(DatasetError, match=message) as caught:
        check_videos(folder, info, read_episodes(folder, info))
    assert caught.value.where == str(video)
    with pytest.raises(DatasetError, match=message):
        read_lerobot(folder).cameras["wrist"].read(np.array([30]))


def test_of_many_videos_the_first_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_set(tmp_path / "set")
    info = read_info(folder)
    video = folder / "videos/observation.images.wrist/chunk-000/file-000.mp4"
    other = video.with_name("file-001.mp4")
    other.write_bytes(video.read_bytes())
    with pytest.raises(DatasetError, match="has 60 frames, but the episodes in it have 0 rows"):
        check_videos(folder, info, read_episodes(folder, info))
    monkeypatch.setattr(lerobot_set, "LOOKED_INTO", 1)
    check_videos(folder, info, read_episodes(folder, info))


def test_rows_in_another_file_than_listed_are_refused(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    [data] = folder.glob("data/*/*.parquet")
    table = pq.read_table(data)
    cut = 3 * LENGTH + 2
    pq.write_table(table.slice(0, cut), data)
    pq.write_table(table.slice(cut), data.with_name("file-001.parquet"))

    def second(numbers: Sequence[int]) -> None:
        edit(folder, lambda row: row.update({"data/file_index": int(row["episode_index"] in numbers)}))

    second(range(4, EPISODES))
    with pytest.raises(DatasetError, match=r"episode 3 is listed with its rows in `.*file-000.parquet`") as caught:
        read_lerobot(folder)
    assert str(caught.value.where).endswith("file-001.parquet, row 0")
    pq.write_table(table.slice(0, cut + 3), data)
    pq.write_table(table.slice(cut + 3), data.with_name("file-001.parquet"))
    assert len(read_lerobot(folder)) == EPISODES * LENGTH
    second(range(5, EPISODES))
    with pytest.raises(DatasetError, match="episode 4 is listed with its rows"):
        read_lerobot(folder)
