"""Answers that end at a text, whatever tokens it falls into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What a decoder writes for bytes that are only a part of a character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopTexts:
    """Finds out whether the newest token of an answer completes a text.

    Args:
        decode: text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._single: dict[int, str] = {}

    def may_end(self, token: int, stop: Sequence[str]) -> bool:
        """Return whether a token may end a text; a cheap check with false positives."""
        text = self._single.get(token)
        if text is None:
            text = self._single[token] = self._decode([token])
        # A tokenizer may leave out a space in front of a token that stands alone.
        return _INCOMPLETE in text or any(ending[-1] in text or ending[-1] == " " for ending in stop)

    def ended(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Return whether the last token of an answer completes a stop text."""
        if not self.may_end(tokens[-1], stop):
            return False
        # The text ends with the newest token: that many of the last tokens hold it, a byte or more each.
        reach = 4 * max(len(text) for text in stop) + 4
        tail = list(tokens[-reach:])
        now, before = self._decode(tail), self._decode(tail[:-1])
        return any(now.count(text) > before.count(text) for text in stop)
