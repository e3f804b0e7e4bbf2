"""Images in Parquet files (PNG), and mp4 videos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError, needed
from rlinf_core.foreign.budget import Budget
from rlinf_core.foreign.files import write_fault

Picture = NDArray[np.uint8]

# The most bytes of one image as RGB: 44 million pixels.
_LARGEST: Final = 128 << 20

# Pillow's modes that convert to RGB without loss.
_LOSSLESS: Final = ("RGB", "RGBA", "L", "LA", "P", "1")
# The distance between key frames: any frame is then decoded from at most one other.
_KEY_INTERVAL: Final = 2
# The constant rate factor of x264; 18 is visually almost lossless.
_QUALITY: Final = 18


def encoded(picture: Picture) -> bytes:
    """Encode an image, uint8 [H, W, 3], as PNG."""
    image = needed("PIL.Image", "a data set with images")
    out = BytesIO()
    image.fromarray(picture).save(out, "PNG", compress_level=1)
    return out.getvalue()


def decoded(data: bytes) -> Picture:
    """Decode an image file to uint8 [H, W, 3]; grey images are converted to RGB, and turned as their EXIF data say.

    Raises:
        DatasetError: the data hold no image, or one that 8-bit RGB cannot express, such as depth or transparency.
    """
    image = needed("PIL.Image", "a data set with images")
    try:
        opened = image.open(BytesIO(data))
        Budget(_LARGEST, "a picture").take_array(opened.size, 3)
        opened = needed("PIL.ImageOps", "a data set with images").exif_transpose(opened)
        shows_through = opened.mode in ("RGBA", "LA") or "transparency" in opened.info
        if shows_through and opened.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            raise DatasetError(
                "a picture is transparent in places", help="convert the data set again, with pictures in RGB"
            )
        if opened.mode not in _LOSSLESS:
            raise DatasetError(
                f"the image mode `{opened.mode}` is not supported: use 8-bit RGB or grey",
                help="depth cannot be trained on; remove the feature from the data set",
            )
        return np.asarray(opened.convert("RGB"))
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError("an image cannot be decoded", why=f"{type(error).__name__}: {error}") from error


def write_video(file: Path, pictures: Iterable[Picture], fps: float) -> dict[str, Any]:
    """Write an mp4 (H.264) with one frame per image, uint8 [H, W, 3], all of one size.

    Returns:
        The video settings that LeRobot stores, by its names.

    Raises:
        DatasetError: the package `av` is missing, or the video cannot be written.
    """
    av = needed("av", "a video")
    rate = Fraction(fps).limit_denominator(1001)
    first: Picture | None = None
    try:
        with av.open(str(file), "w", format="mp4") as container:
            stream: Any = None
            for number, picture in enumerate(pictures):
                if stream is None:
                    first = picture
                    stream = _stream(container, picture, rate)
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame.pts, frame.time_base = number, 1 / rate
                container.mux(stream.encode(frame))
            if stream is not None:
                container.mux(stream.encode(None))
    except (OSError, ValueError) as error:
        raise DatasetError("the video cannot be written", where=str(file), why=write_fault(file, error)) from error
    if first is None:
        raise DatasetError("a video needs at least one image", where=str(file))
    return {
        "video.height": first.shape[0],
        "video.width": first.shape[1],
        "video.codec": "h264",
        "video.pix_fmt": _pixels(first),
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def _stream(container: Any, picture: Picture, rate: Fraction) -> Any:
    stream = container.add_stream("libx264", rate=rate)
    stream.height, stream.width = picture.shape[:2]
    stream.pix_fmt = _pixels(picture)
    stream.gop_size = _KEY_INTERVAL
    stream.time_base = 1 / rate
    stream.thread_count = 1
    # Frames that depend on later ones would shift the first time stamp.
    stream.options = {"crf": str(_QUALITY), "preset": "veryfast", "bf": "0"}
    return stream


def _pixels(picture: Picture) -> str:
    """Return the pixel format: chroma subsampling needs even sizes."""
    return "yuv420p" if picture.shape[0] % 2 == 0 and picture.shape[1] % 2 == 0 else "yuv444p"


def frames_of(file: Path) -> int | None:
    """Return the number of frames that a video declares; None if it declares none.

    Raises:
        DatasetError: the video is missing or damaged, or the package `av` is missing.
    """
    av = needed("av", "a data set with videos")
    try:
        with av.open(str(file)) as container:
            return int(container.streams.video[0].frames) or None
    except (OSError, ValueError, IndexError) as error:
        raise _undecoded(file, error) from error


def read_video(file: Path, begin: float = 0.0, count: int | None = None) -> Iterator[tuple[float, Picture]]:
    """Yield frames of a video in order, with their times in seconds.

    Args:
        file: the video.
        begin: seconds; the first frame is the one at that time or up to half a frame before.
        count: the number of frames; None: to the end.

    Raises:
        DatasetError: the video is missing or damaged, or the package `av` is missing.
    """
    av = needed("av", "a data set with videos")
    if not file.is_file():
        raise DatasetError("a video is missing", where=str(file), help="copy the complete data set again")
    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            size = (stream.codec_context.width, stream.codec_context.height)
            Budget(_LARGEST, "a picture").take_array(size, 3)
            stream.thread_type = "AUTO"
            if begin > 0:
                container.seek(max(0, round(begin / stream.time_base) - 1), stream=stream)
            half = 0.5 / float(stream.average_rate or 30)
            yielded = 0
            for frame in container.decode(stream):
                time = float(frame.pts * stream.time_base)
                if time < begin - half:
                    continue
                if frame.is_corrupt:  # the decoder makes up what it cannot read
                    raise ValueError(f"the frame at {time:.3f} s is damaged")
                yield time, frame.to_ndarray(format="rgb24")
                yielded += 1
                if yielded == count:
                    return
    except (OSError, ValueError, IndexError) as error:
        # av's errors for damaged files are subclasses of these.
        raise _undecoded(file, error) from error


def _undecoded(file: Path, error: Exception) -> DatasetError:
    return DatasetError(
        "a video cannot be decoded",
        where=str(file),
        why=f"{type(error).__name__}: {error}",
        help="copy the file again, or name the other episodes: `train_data_paths: {path: ..., episodes: [...]}`",
    )
