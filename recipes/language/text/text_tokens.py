"""Tokenization of texts for fine-tuning, prompts, conversations, judges and warm starts, and decoding.

Also the marks of a model's thoughts, and the text outside of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The marks of several model families, some of which make them special tokens.
THOUGHT_MARKS: Final = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
ANSWER_MARKS: Final = ("<answer>", "</answer>")
_BEGIN: Final = re.compile("|".join(re.escape(begin) for begin, _ in THOUGHT_MARKS))
_END: Final = re.compile("|".join(re.escape(end) for _, end in THOUGHT_MARKS))
_THOUGHT: Final = re.compile(rf".*(?:{_END.pattern})(?=.*\S)", re.DOTALL)


def without_thought(text: str) -> str:
    """Return a text without the thought before its answer; a thought without an answer stays."""
    return _THOUGHT.sub("", text)


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends within a thought, which the model continues."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in THOUGHT_MARKS))


class Spoken:
    """The parts of a turn outside of thoughts; queries must follow the order of the text.

    A mark within an accepted call is a part of its arguments.

    Args:
        text: the text of the turn.
        thinking: whether the text begins within a thought.
    """

    def __init__(self, text: str, *, thinking: bool = False) -> None:
        self._text = text
        self._at = self._end_of_thought(0) if thinking else 0
        self._last = -1

    def has(self, start: int, end: int) -> bool:
        """Return whether the call from `start` to `end` is outside of thoughts; several calls may share one `start`."""
        if start == self._last:
            return True
        begin = _BEGIN.search(self._text, self._at)
        while begin is not None and begin.start() < start:
            self._at = self._end_of_thought(begin.end())
            begin = _BEGIN.search(self._text, self._at)
        if start < self._at:
            return False
        self._at, self._last = max(self._at, end), start
        return True

    def _end_of_thought(self, start: int) -> int:
        end = _END.search(self._text, start)
        return len(self._text) if end is None else end.end()


# Texts to put before another text, to get the tokens that it has when it does not begin a sequence.
_ANCHORS: Final = ("\n", ".", "a", "0")
_PROBES: Final = ("a", "0", "=", "4")


class TextTokens:
    """A tokenizer for sequences of parts: the tokens of the parts, concatenated, are those of the whole.

    Args:
        tokenizer: the tokenizer of the model.
        marks: further texts whose special tokens `text` keeps, such as those around calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: Iterable[str] = ()) -> None:
        self._tokenizer: Any = tokenizer
        self._marks = tuple(marks)

    # Tokens

    def opened(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a sequence, with the tokenizer's initial special tokens only; a text
        that has them already gets no others.
        """
        before, tokens = list(self.around[0]), self._encoded(text)
        return tokens if tokens[: len(before)] == before else before + tokens

    def plain(self, text: str) -> list[int]:
        """Return the tokens of a text that contains its special tokens, such as a rendered chat template."""
        return self._encoded(text)

    def behind(self, text: str) -> list[int]:
        """Return the tokens of a text that follows others, without the blank that some tokenizers put before a text."""
        return self._divided(self._anchor(text), [text])[0]

    def parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of consecutive texts, which together are those of the whole.

        If a token crosses the end of a prompt, the prompt gets the tokens that an engine gets, and the rest is
        tokenized after them. A token that crosses the end of an answer belongs to the text that follows.

        Args:
            texts: alternating prompts and answers, a prompt first.
        """
        return self._divided("", texts)

    @cached_property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that the tokenizer puts before and after a text."""
        for probe in _PROBES:
            bare, whole = self._encoded(probe), list(self._tokenizer.encode(probe))
            for start in range(len(whole) - len(bare) + 1 if bare else 0):
                if whole[start : start + len(bare)] == bare:
                    return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def _encoded(self, text: str) -> list[int]:
        _require_whole(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _begins_texts(self) -> bool:
        """Whether a text alone has other tokens than after another text."""
        before = self._encoded(_ANCHORS[0])
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        alone = ((probe, self._encoded(probe)) for probe in _PROBES)
        return any(
            self._encoded(_ANCHORS[0] + probe) != before + tokens for probe, tokens in alone if unknown not in tokens
        )

    @cached_property
    def _strips(self) -> bool:
        """Whether the tokenizer strips trailing whitespace."""
        return self._encoded("a\n") == self._encoded("a")

    def _anchor(self, text: str) -> str:
        """Return a text to put before `text` that does not change its tokens; "" if none is needed or known."""
        if not self._begins_texts:
            return ""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        for anchor in _ANCHORS:
            before = self._encoded(anchor)
            if unknown not in before and self._encoded(anchor + text)[: len(before)] == before:
                return anchor
        return ""

    def _divided(self, anchor: str, texts: Sequence[str], *, answers: bool = False) -> list[list[int]]:
        """Return the tokens of texts after an anchor, without the anchor's; `answers`: the first text is an answer."""
        whole = anchor + "".join(texts)
        _require_whole(whole)
        tokens, offsets = self._with_offsets(whole)
        pieces: list[list[int]] = []
        at = len(self._encoded(anchor)) if anchor else 0
        for number, end in enumerate(accumulate(map(len, texts[:-1]), initial=len(anchor))):
            if not number:
                continue
            is_prompt = bool(number % 2) != answers
            before = self._before(tokens, offsets, whole, end, is_prompt=is_prompt)
            if tokens[: len(before)] != before:
                # A token lies across the border.
                rest = texts[number:]
                return [*pieces, before[at:], *self._divided(self._anchor("".join(rest)), rest, answers=is_prompt)]
            pieces.append(before[at:])
            at = max(at, len(before))
        return [*pieces, tokens[at:]]

    def _before(
        self, tokens: list[int], offsets: Sequence[tuple[int, int]], text: str, end: int, *, is_prompt: bool
    ) -> list[int]:
        """Return the tokens of the text before position `end`."""
        count = bisect_left(offsets, end, key=lambda span: span[0])
        meet = 0 < count < len(offsets) and offsets[count - 1][1] == offsets[count][0] == end
        if meet and not (self._strips and text[end - 1].isspace()):
            return tokens[:count]
        if offsets and not is_prompt:
            return tokens[: count - (count > 0 and offsets[count - 1][1] > end)]
        # Offsets assign no token to blanks that a special token strips, so the text before `end` is encoded again.
        return self._encoded(text[:end])

    def _with_offsets(self, text: str) -> tuple[list[int], Sequence[tuple[int, int]]]:
        """Return the tokens of a text and the character range of each; no ranges from a slow tokenizer."""
        if not getattr(self._tokenizer, "is_fast", False):
            return self._encoded(text), ()
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), encoded["offset_mapping"]

    # Text

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without special tokens except the marks of thoughts, answers and calls."""
        if self._kept.isdisjoint(tokens):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        return self.raw([token for token in tokens if token in self._kept or token not in self._special])

    def raw(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with all special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def _special(self) -> dict[int, str]:
        """The special tokens, by token id."""
        added: Any = getattr(self._tokenizer, "added_tokens_decoder", {})
        named = {number: str(token) for number, token in added.items() if token.special}
        numbers: list[int] = getattr(self._tokenizer, "all_special_ids", [])
        texts: list[str] = getattr(self._tokenizer, "all_special_tokens", [])
        return {**dict(zip(numbers, texts, strict=False)), **named}

    @cached_property
    def _kept(self) -> frozenset[int]:
        """The ids of special tokens that `text` keeps."""
        known = {mark for pair in THOUGHT_MARKS for mark in pair} | set(ANSWER_MARKS)
        return frozenset(
            number
            for number, text in self._special.items()
            if text in known or (text and any(text in mark for mark in self._marks))
        )


def _require_whole(text: str) -> None:
    """Check that a text has no lone surrogate, which no tokenizer accepts.

    Raises:
        ConfigError: the text has one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end + 20]
        raise ConfigError(
            f"a text holds half of a character: {near!a}", help="correct the text, or leave the character out"
        ) from None


def mended(text: str) -> str:
    """Return a text with U+FFFD in place of each lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
