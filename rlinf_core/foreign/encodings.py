"""Encodings of text that is not UTF-8, recognized by the first bytes."""

from __future__ import annotations

from typing import Final

# Byte order marks: that of UTF-16 begins one of UTF-32.
_MARKS: Final = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# Which of the first bytes of a character below U+0100, such as `{`, are zero.
_ZEROS: Final = (
    ((False, True, True, True), "UTF-32"),
    ((True, True, True, False), "UTF-32"),
    ((False, True), "UTF-16"),
    ((True, False), "UTF-16"),
)


def wide_encoding(start: bytes) -> str | None:
    """Return `UTF-16` or `UTF-32` for text that starts by such bytes, with or without a byte order mark; else None.

    Text in UTF-16 without a mark is valid UTF-8, with a NUL beside each letter.
    """
    marked = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    zeros = tuple(not byte for byte in start[:4])
    return marked or next((name for pattern, name in _ZEROS if zeros[: len(pattern)] == pattern), None)
