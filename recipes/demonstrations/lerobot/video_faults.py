"""Video faults detected without decoding: missing frames, wrong times, invalid packets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.demonstrations.lerobot.set_info import DatasetInfo
from recipes.demonstrations.names import IMAGES

# Of larger data sets the first files alone are looked into: it reads them as a whole.
LOOKED_INTO_BYTES: Final = 2 << 30
# Where the configuration of a codec has how many bytes the length of a unit takes, less 1, in its two lowest bits.
_LENGTH_SIZE_AT: Final = {"h264": 4, "hevc": 21}
# Checks that the bytes of a frame are units of its codec, back to back.
_Whole: TypeAlias = Callable[[bytes], bool]


def check_videos(files: Sequence[Path], name: str, info: DatasetInfo, rows: Mapping[Path, int] | None = None) -> None:
    """Check that a camera's videos have one frame per row, at the right times.

    Damage that leaves the outer form of a frame as it was is found when the frame is decoded.

    Args:
        files: all videos of the camera.
        name: the name of the feature.
        info: the description of the data set.
        rows: the rows of the episodes in each video, as the list of episodes says; None: it was not read.

    Raises:
        DatasetError: frames are missing, damaged, or at other times; or the package `av` is missing.
    """
    frames, left = 0, LOOKED_INTO_BYTES
    for file in files:
        left -= file.stat().st_size
        if left < 0:
            return
        count = _check_video(file, info.fps)
        if rows is not None and rows.get(file, 0) != count:
            raise wrong_count(file, count, rows.get(file, 0))
        frames += count
    if frames != info.total_frames:
        raise DatasetError(
            f"the videos of the camera `{name.removeprefix(IMAGES)}` have {frames} frames, but the data set has"
            f" {info.total_frames} rows",
            where=str(files[0].parent),
            help="copy the complete data set again",
        )


def wrong_count(file: Path, frames: int, rows: int) -> DatasetError:
    """Return the error about a video that has another number of frames than the episodes in it have rows."""
    return DatasetError(
        f"the video has {frames} frames, but the episodes in it have {rows} rows",
        where=str(file),
        why="the pictures of episodes would be those of others",
        help="copy the complete data set again, or correct the list of episodes in `meta/episodes`",
    )


def _check_video(file: Path, fps: float) -> int:
    """Return how many frames a video has."""
    av = needed("av", "a data set with videos")
    times: list[float] = []
    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            whole = _form(stream.codec_context)
            for packet in container.demux(stream):
                if not packet.size:  # the end
                    continue
                time = float(packet.pts * stream.time_base)
                if not whole(bytes(packet)):
                    raise _damaged(file, f"its frame at {time:.3f} s is not what a `{stream.codec_context.name}` holds")
                times.append(time)
    except (OSError, ValueError, IndexError, TypeError) as error:
        # What av raises of damaged files are subclasses of the first two; a frame without a time is of the last.
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    for begin, end in pairwise(sorted(times)):
        if abs(end - begin - 1 / fps) > 0.5 / fps:
            raise DatasetError(
                f"a video has a frame at {begin:.3f} s, and the next one only at {end:.3f} s",
                where=str(file),
                why=f"the data set states {fps:g} frames per second",
                help="correct `fps` in `meta/info.json`, or convert the data set again",
            )
    return len(times)


def _damaged(file: Path, why: str) -> DatasetError:
    return DatasetError(
        "a video is damaged",
        where=str(file),
        why=why,
        help="copy the file again, or name the other episodes: `train_data_paths: {path: ..., episodes: [...]}`",
    )


def _form(codec: Any) -> _Whole:
    """Return the packet check of a codec; one that accepts everything for unknown codecs."""
    settings: bytes = codec.extradata or b""
    at = _LENGTH_SIZE_AT.get(codec.name)
    if at is not None and len(settings) > at:
        size = (settings[at] & 3) + 1
        return lambda data: _is_units(data, size)
    return _is_open_units if codec.codec.canonical_name == "av1" else lambda _: True


def _is_units(data: bytes, size: int) -> bool:
    """Return whether data are H.264 or HEVC units, each prefixed with its length in `size` bytes."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + size], "big")
        if not length:
            return False
        at += size + length
    return at == len(data)


def _is_open_units(data: bytes) -> bool:
    """Return whether data are AV1 open bitstream units; the last one may lack its length."""
    at = 0
    while at < len(data):
        header = data[at]
        if header & 0x81:  # bits that are 0
            return False
        at += 2 if header & 4 else 1
        if not header & 2:
            return at <= len(data)
        length, shift = 0, 0
        while at < len(data):
            byte = data[at]
            at, length, shift = at + 1, length | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        at += length
    return at == len(data)
