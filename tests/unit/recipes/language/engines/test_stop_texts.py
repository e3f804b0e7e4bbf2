from __future__ import annotations

from collections.abc import Sequence

import pytest

from recipes.language.engines.request_queue import StopTexts

# Tokens of several characters, a half of a character, and one that loses its space when it stands alone.
PIECES = [b"ab", b"c", b"\n", b" end", b"\xc3", b"\xa9", b"x\ny"]


def decode(tokens: Sequence[int]) -> str:
    text = b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")
    return text.removeprefix(" ") if len(tokens) == 1 else text


@pytest.mark.parametrize(
    ("tokens", "stop", "ends"),
    [
        ([0, 2], ["\n"], True),
        ([2, 0], ["\n"], False),
        ([2, 0, 2], ["\n"], True),
        ([0, 1], ["bc"], True),
        ([0, 1], ["cb"], False),
        ([0, 3], [" end"], True),
        ([0, 3], ["b e"], True),
        ([0, 4, 5], ["é"], True),
        ([0, 4], ["é"], False),
        ([0, 6], ["\n"], True),
        ([1, 1], ["never", "cc"], True),
        ([1], ["c"], True),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_text(tokens: list[int], stop: list[str], ends: bool) -> None:
    assert StopTexts(decode).ended(tokens, stop) is ends
