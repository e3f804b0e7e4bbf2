"""Pictures, videos and sounds beside the text of a row, which models of text do not see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from rlinf_core import ConfigError

_COLUMNS: Final = ("images", "image", "videos", "video", "audios", "audio")
# Marks in a text where a picture, a video or a sound is meant.
_MARKS: Final = ("<image>", "<video>", "<audio>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>")


def refuse_media(place: str, row: Mapping[str, Any]) -> None:
    """Refuse a row whose text speaks of pictures, videos or sounds that come with it.

    Args:
        place: the place of the row, as in `FILE:12`.
        row: the row; its messages may have media, too.

    Raises:
        ConfigError: it has some.
    """
    for part in _parts(row):
        for column in _COLUMNS:
            if column in part and _is_media(part[column], part):
                raise ConfigError(
                    f"{place}: there are media in `{column}`, and models of text alone are trained",
                    help=f"remove the row, or `{column}` where the text is complete without it",
                )


def _parts(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a row, and the messages in it."""
    yield row
    for value in row.values():
        if isinstance(value, list):
            for item in cast("list[object]", value):
                if isinstance(item, Mapping) and "role" in item:
                    yield cast("Mapping[str, Any]", item)


def _is_media(value: object, part: Mapping[str, Any]) -> bool:
    """Return whether a column holds media; a text, such as the name of a file, does where a mark calls for it."""
    if isinstance(value, list):
        return any(item is not None for item in cast("list[object]", value))
    if isinstance(value, Mapping):
        return any(cast("Mapping[str, Any]", value).get(name) is not None for name in ("bytes", "path", "url"))
    if isinstance(value, str):
        return any(mark in text for text in _texts(part) for mark in _MARKS)
    return isinstance(value, bytes)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, object]", value).values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _texts(item)
