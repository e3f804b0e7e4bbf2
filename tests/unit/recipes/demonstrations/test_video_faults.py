"""Faults of videos that are seen without decoding, `recipes.demonstrations.lerobot.video_faults`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.lerobot import video_faults
from recipes.demonstrations.lerobot.set_info import DatasetInfo, Feature
from recipes.demonstrations.lerobot.video_faults import check_videos
from recipes.demonstrations.pictures import write_video

av: Any = pytest.importorskip("av")
NAME, COUNT, FPS = "observation.images.main", 12, 10


def info(rows: int = COUNT, fps: int = FPS) -> DatasetInfo:
    return DatasetInfo(fps, {NAME: Feature("video", (32, 32, 3))}, total_frames=rows)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    file = tmp_path / "file-000.mp4"
    pictures = np.random.default_rng(0).integers(0, 255, (COUNT, 32, 32, 3), np.uint8)
    write_video(file, pictures, FPS)
    return file


def places(file: Path) -> list[tuple[int, int]]:
    """Return where the frames of a video are, and how long they are."""
    with av.open(str(file)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]


def spoil(file: Path, at: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)


def test_what_was_written_has_no_fault(video: Path) -> None:
    check_videos([video], NAME, info())


@pytest.mark.parametrize("data", [bytes(300), b"\xff" * 300], ids=["zeros", "ones"])
def test_damage_in_the_middle_is_told_with_its_time(video: Path, data: bytes) -> None:
    spoil(video, places(video)[COUNT // 2][0], data)
    with pytest.raises(DatasetError, match="a video is damaged") as caught:
        check_videos([video], NAME, info())
    assert caught.value.where == str(video)
    assert "its frame at 0.600 s is not what a `h264` holds" in str(caught.value.why)


def test_rows_without_a_frame_are_told(video: Path) -> None:
    with pytest.raises(DatasetError, match="`main` have 12 frames, but the data set has 13 rows"):
        check_videos([video], NAME, info(rows=13))
    check_videos([video, video], NAME, info(rows=24))


def test_another_number_of_frames_in_a_second_is_told(video: Path) -> None:
    with pytest.raises(DatasetError, match=r"a frame at 0.000 s, and the next one only at 0.100 s") as caught:
        check_videos([video], NAME, info(fps=25))
    assert "25 frames per second" in str(caught.value.why)


def test_of_a_large_data_set_the_first_files_are_looked_into(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path(video.parent / "whole.mp4")
    whole.write_bytes(video.read_bytes())
    spoil(video, places(video)[3][0], bytes(300))
    monkeypatch.setattr(video_faults, "LOOKED_INTO_BYTES", whole.stat().st_size)
    check_videos([whole, video], NAME, info())
    with pytest.raises(DatasetError, match="a video is damaged"):
        check_videos([video, whole], NAME, info())


@pytest.mark.parametrize("codec", ["libsvtav1", "libaom-av1", "libx265"])
def test_other_codecs_are_understood(codec: str, tmp_path: Path) -> None:
    file = tmp_path / "file-000.mp4"
    # As root SVT-AV1 gives real-time priority to the thread that begins it: the tests' own would keep it.
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            thread.submit(_encode, file, codec).result()
        except av.codec.codec.UnknownCodecError:
            pytest.skip(f"av has no {codec}")
    check_videos([file], NAME, info())
    spoil(file, places(file)[5][0], b"\xff" * 40)
    with pytest.raises(DatasetError, match="a video is damaged"):
        check_videos([file], NAME, info())


def _encode(file: Path, codec: str) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for picture in np.random.default_rng(0).integers(0, 255, (COUNT, 64, 64, 3), np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
