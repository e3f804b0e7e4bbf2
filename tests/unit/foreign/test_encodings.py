"""Encodings that are told by the first bytes of a text."""

from __future__ import annotations

import pytest

from rlinf_core.foreign.encodings import wide_encoding


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_wide_text_is_told_with_and_without_a_mark(encoding: str, mark: str) -> None:
    assert wide_encoding(f'{mark}{{"a": 1}}'.encode(encoding)) == encoding[:6].upper()


@pytest.mark.parametrize("start", [b"", b"{", b'{"a"', "é".encode(), b"\xef\xbb\xbf{", b"\0\0\0\0", b"\xff\xff"])
def test_other_bytes_are_no_wide_text(start: bytes) -> None:
    assert wide_encoding(start) is None
