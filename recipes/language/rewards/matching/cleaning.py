r"""Normalization of LaTeX and Unicode spellings in answers, without a change of meaning.

\dfrac12, \tfrac{1}{2}, ½    \frac{1}{2}
1{,}000, 1\,000, 1'000       1,000        (blanks of LaTeX and Unicode; a plain blank is left as it is)
−5, –5                       -5           (a dash between two numbers is a range, and stays)
90^\circ, 90°                90°
\left( \right), \bigl(       ( )
\textcolor{red}{5}           5            (marks without width, colours and underlines go)
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

# A stand-in for special blanks, until it is known whether they separate thousands.
_THIN: Final = "\u202f"
_BLANKS: Final = re.compile(
    r"(?<!\\)\\[,;:> ]|\\(?:thinspace|enspace|q?quad|hspace\{[^{}]*\}|space)(?![A-Za-z])"
    r"|[\u00a0\u2000-\u200a\u202f\u205f\u3000]|(?<!\\)~"
)
_THOUSANDS: Final = re.compile(rf"(?<![0-9.,{_THIN}])[1-9][0-9]{{0,2}}(?:{_THIN}[0-9]{{3}})+(?![0-9{_THIN}])")
_APOSTROPHES: Final = re.compile("(?<![0-9.,'\u2019])[1-9][0-9]{0,2}(?:['\u2019][0-9]{3})+(?![0-9'\u2019])")
_DASHES: Final = re.compile("[\u2010-\u2012\u2212\ufe58\ufe63\uff0d]")
_LONG_DASH: Final = re.compile(
    "(^|[^0-9A-Za-z})% ]) *[\u2013\u2014](?= *[0-9.\\\\])|^[\u2013\u2014]|(?<= )[\u2013\u2014](?=[0-9.\\\\])"
)
_MINUS_SIGN: Final = re.compile("(^|[^0-9A-Za-z)}\\]% ]) *\u2212 +(?=[0-9.\\\\])|(?<=[a-z:] )\u2212 +(?=[0-9.])")
_SIZES: Final = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|ensuremath)(?![A-Za-z])\s?\.?"
)
_FRACTION: Final = re.compile(r"\\[dtc]?frac(?![A-Za-z])\s*")
_DEGREES: Final = re.compile(r"\s*(?:\{\})?(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?(?![A-Za-z])|\u00ba)")
_WORDS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\varnothing(?![A-Za-z])|\u2205|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])\s*|\u27e8", "("),
        (r"\s*\\rangle(?![A-Za-z])|\u27e9", ")"),
        (r"\u221e", r"\\infty "),
        (r"\u03c0", r"\\pi "),
        (r"\u2264|\\leqslant(?![A-Za-z])|\\leq(?![A-Za-z])", r"\\le "),
        (r"\u2265|\\geqslant(?![A-Za-z])|\\geq(?![A-Za-z])", r"\\ge "),
        (r"\u222a", r"\\cup "),
        (r"\u2229", r"\\cap "),
        (r"\u2208", r"\\in "),
        (r"\u2260|\\neq(?![A-Za-z])", r"\\ne "),
        (r"\u2248", r"\\approx "),
        (r"\u00b1", r"\\pm "),
        (r"\u00d7", r"\\times "),
        (r"\u22c5|\u00b7", r"\\cdot "),
        (r"\u221a\s*([0-9]+|\{[^{}]*\}|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\underline(?![A-Za-z])", " "),
        # Euler's number and the imaginary unit, sometimes set upright.
        (r"\\(?:mathrm|operatorname|rm)\s*\{([eij])\}", r"\1"),
    )
)
_SUPERSCRIPTS: Final = {ord(raised): str(digit) for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {ord("⁻"): "-"}
_RAISED: Final = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
# Full-width letters, digits and punctuation.
_WIDE: Final = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_TEXT: Final = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)\s*\{"
TEXT_COMMAND: Final = re.compile(_TEXT)
_PAIRS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("`", "`"))


def cleaned(text: str) -> str:
    """Return a text in one spelling; see the module."""
    if not text.isascii():
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = unicodedata.normalize("NFC", text).translate(_WIDE)
    text = _RAISED.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(_vulgar_fraction(character) for character in text)
    text = text.replace("\u2044", "/").replace("\u2215", "/")
    text = _MINUS_SIGN.sub(r"\1-", text)
    text = _LONG_DASH.sub(r"\1-", _DASHES.sub("-", text))
    text = re.sub(r"(?<!\\)\\! *", "", text.replace("{,}", ","))
    text = _APOSTROPHES.sub(lambda match: re.sub("['\u2019]", ",", match.group()), text)
    text = _BLANKS.sub(_THIN, text)
    text = _THOUSANDS.sub(lambda match: match.group().replace(_THIN, ","), text).replace(_THIN, " ")
    text = _DEGREES.sub("°", _SIZES.sub("", text))
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    text = _fractions(text).replace(r"\%", "%")
    return " ".join(text.split())


def boxed_content(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or None; boxes joined by `and`, `or` or a comma form one list."""
    boxes = _boxes(text)
    if not boxes:
        return None
    contents = [boxes[-1][2]]
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = re.sub(r"\$|\\[()]|\\text", " ", text[before[1] : after[0]]).strip(" \t{}")
        if between not in ("", ",", ";", "and", "or", ", and", ", or", r"\quad", r",\quad"):
            break
        # Count repeated answers once.
        if before[2].strip() != contents[0].strip():
            contents.insert(0, before[2])
    return ", ".join(contents)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and content of each outermost box with matching braces."""
    boxes: list[tuple[int, int, str]] = []
    for match in re.finditer(r"\\f?boxed?(?![A-Za-z])\s*", text):
        if boxes and match.start() < boxes[-1][1]:
            continue
        at = match.end()
        if text[at : at + 1] == "{":
            end = closing_brace(text, at)
            if end is not None:
                boxes.append((match.start(), end + 1, text[at + 1 : end]))
        elif (bare := re.match(r"[-+]?[0-9][0-9.,]*|[A-Za-z](?![A-Za-z])", text[at:])) and match.group()[-1:].isspace():
            boxes.append((match.start(), at + bare.end(), bare.group().rstrip(".,")))
    return boxes


def closing_brace(text: str, at: int) -> int | None:
    """Return the place of the brace that closes the brace at `at`; None if there is none."""
    depth = 0
    for position in range(at, len(text)):
        if text[position] in "{}" and text[position - 1 : position] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
    return None


def unwrapped(text: str) -> tuple[str, bool]:
    r"""Return a cleaned text without its outer markup (`$ $`, `\( \)`, `\text{ }`, `**`, `\boxed{ }`), and whether that
    was `\text`.
    """
    words = False
    # Unwrap `$5$ miles`.
    text = re.sub(r"^\$([^$]+)(?<!\\)\$(?=\s*[A-Za-z°%][A-Za-z .°%]*$)", r"\1", text)
    while True:
        before = text
        text = text.strip().rstrip(".;,").strip() if not text.endswith("...") else text.strip()
        for begin, end in _PAIRS:
            inner = text[len(begin) : len(text) - len(end)]
            encloses = len(text) > len(begin) + len(end) and text.startswith(begin) and text.endswith(end)
            # A `\$` closes no formula: it belongs to an amount such as `\$5`.
            if encloses and begin not in inner and not (end == "$" and inner.endswith("\\")):
                text = inner
        if match := re.match(rf"{_TEXT}|\\boxed\s*\{{|\\fbox\s*\{{|\{{", text):
            end = closing_brace(text, match.end() - 1)
            if end == len(text) - 1:
                words = words or TEXT_COMMAND.match(text) is not None
                text = text[match.end() : end]
        if text == before:
            return text, words


def without_blanks(text: str) -> str:
    """Return a text without insignificant blanks; those between digits stay, since `2 1/2` is not `21/2`."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def _vulgar_fraction(character: str) -> str:
    """Return `\\frac{1}{2}` for ½; any other character unchanged."""
    if character < "\u00bc" or unicodedata.category(character) != "No":
        return character
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}" if slash and below else character


def _fractions(text: str) -> str:
    r"""Return a text with each fraction as `\frac{..}{..}`, also `\frac12` and `\frac 1{2}`."""
    pieces: list[str] = []
    at = 0
    for match in _FRACTION.finditer(text):
        if match.start() < at:
            continue
        parts: list[str] = []
        position = match.end()
        for _ in range(2):
            while text[position : position + 1] == " ":
                position += 1
            if text[position : position + 1] == "{":
                end = closing_brace(text, position)
                if end is None:
                    break
                parts.append(_fractions(text[position + 1 : end].strip()))
                position = end + 1
            elif bare := re.match(r"[0-9A-Za-z]|\\[A-Za-z]+(?![A-Za-z{])", text[position:]):
                parts.append(bare.group())
                position += bare.end()
        if len(parts) == 2:
            pieces += [text[at : match.start()], f"\\frac{{{parts[0]}}}{{{parts[1]}}}"]
            at = position
    return "".join(pieces) + text[at:]
