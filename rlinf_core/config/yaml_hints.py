"""Explanations of the parser's errors, with a remedy.

The parser often stops after the mistake itself. Each row of `_RULES`, or function, covers one family of errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, cast

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.tree import Span
from rlinf_core.suggest import excerpt


class _Problem(NamedTuple):
    """An error of the parser: its words, the offset where it stopped, and the start of the enclosing construct."""

    words: str
    at: int
    context_at: int | None


class _Slip(NamedTuple):
    message: str
    start: int
    end: int
    help: str | None = None
    code: str = "yaml-syntax"
    opened_at: int | None = None


# Rows of: a pattern of the parser's message, "CONTEXT: PROBLEM"; the extent to underline, from where the parser stopped
# or, with `<`, from the start of the context; our message and its remedy, with `{first}`, `{piece}` and `{quoted}` of
# the underlined text.
_LEFT_OVER: Final = "(?s).*: expected <block end>, but found "
_RULES: Final[tuple[tuple[str, str, str, str | None], ...]] = (
    (
        ".*: found undefined tag handle",
        "word",
        "the tag `{piece}` is not known; only plain data is read",
        "remove the tag, or quote the value if the `!` belongs to it",
    ),
    (
        ".*: found character .+ that cannot start any token|while scanning an a(lias|nchor)|"
        "while scanning a block scalar: expected",
        "<value",
        "an unquoted value cannot start with `{first}`",
        "quote it: {quoted}",
    ),
    (".*quoted scalar: found unexpected", "<line", "the text that starts here with `{first}` is never closed", None),
    (
        "while scanning a double-quoted scalar",
        "char",
        "`{piece}` is not a YAML escape",
        "write `\\\\` for a backslash, or use single quotes, where a backslash is an ordinary character",
    ),
    (
        ".*: could not find expected ':'",
        "<line",
        "a line `key: value` is expected here",
        "add the `:`, or indent the line if it continues the value above",
    ),
    (
        ".*: mapping values are not allowed here",
        "char",
        "this `:` follows a complete value: a value cannot be `key: value` itself",
        "quote the value, or write the key on its own line, aligned with the keys it belongs to",
    ),
    (
        f"{_LEFT_OVER}'<block (mapping|sequence) start>'|.*: expected '<document start>'",
        "value",
        "the indentation of this line matches no line above it",
        "align it with the keys or items it belongs to",
    ),
    (
        f"{_LEFT_OVER}'([?:-]|<block)",
        "value",
        "list items and mapping keys are mixed at one level",
        "indent the items below the key they belong to, or start the key with `- `",
    ),
    (
        f"{_LEFT_OVER}'",
        "value",
        "text follows a complete value",
        "quote the whole value; within single quotes write `''` for one, within double quotes `\\\"`",
    ),
    (
        ".*: sequence entries are not allowed here",
        "value",
        "a list item cannot start on the line of its key",
        "write the items on the lines below, or `[a, b]`",
    ),
)


def explain(
    span: Callable[[int, int], Span], text: str, error: Exception, stopped: int, diagnostics: Diagnostics
) -> None:
    """Report why the parser rejected a text.

    Args:
        span: a function that maps a range of the text to its span in the source.
        text: the text.
        error: the parser's exception.
        stopped: the offset where the parser stopped, for an exception without a position.
        diagnostics: receives the finding.
    """
    marked = cast("Any", error)
    mark, context = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    words = (
        f"{marked.context or ''}: {marked.problem or ''}" if hasattr(error, "problem") else ": a number is too large"
    )
    problem = _Problem(words, stopped if mark is None else mark.index, None if context is None else context.index)
    slip = next(_slips(text, problem))
    help = slip.help
    if slip.code == "yaml-syntax" and "{{" in _line(text, problem.at):
        help = "quote the whole value if `{{ ... }}` is meant as text"
    size, at = len(text), slip.opened_at
    related = () if at is None else ((span(at, at + 1), "opened here"),)
    diagnostics.error(slip.code, slip.message, span(min(slip.start, size), min(slip.end, size)), (), help, related)


def _slips(text: str, problem: _Problem) -> Iterator[_Slip]:
    """Yield the matching explanations, best first, with a generic one at the end."""
    for rule in (_tab, _open_bracket, _missing_space):
        if slip := rule(text, problem):
            yield slip
    for complaint, extent, message, help in _RULES:
        start = problem.at if problem.context_at is None or not extent.startswith("<") else problem.context_at
        if re.match(complaint, problem.words):
            end = _end(text, start, extent.lstrip("<"))
            if complaint.endswith("double-quoted scalar"):
                start = max(text.rfind("\\", 0, start + 1), 0)
            piece = text[start:end]
            quoted = "`'" + excerpt(piece).replace("'", "''") + "'`"
            parts = {"first": piece[:1], "quoted": quoted, "piece": excerpt(piece)}
            code = "unknown-tag" if "tag handle" in complaint else "yaml-syntax"
            yield _Slip(message.format(**parts), start, end, help and help.format(**parts), code)
    words = problem.words.partition(": ")[2].replace("'\\x00'", "the end of the file") or problem.words
    yield _Slip(f"this is not YAML: {excerpt(words, 200)}", problem.at, _end(text, problem.at))


def _tab(text: str, problem: _Problem) -> _Slip | None:
    start = _line_start(text, problem.at)
    before = text[start : problem.at]
    if text[problem.at : problem.at + 1] == "\t" and not before.strip():
        end = problem.at + len(text[problem.at :]) - len(text[problem.at :].lstrip(" \t"))
        message = "this line is indented with a tab, which YAML does not allow"
        return _Slip(message, start, end, "indent with spaces only", "tab-indentation")
    if "not allowed here" in problem.words and (after := re.match(r" *(?:[-?] +)*[-?] *(\t)", before)):
        message = "a tab follows `-` or `?` before a nested value"
        return _Slip(message, start + after.start(1), start + after.end(1), "write a space")
    return None


_BRACKETS: Final = re.compile(r"""[\[\]{}]|"(?:\\.|[^"\\])*"|'[^']*'|#.*""")
_CLOSING: Final = {"[": "]", "{": "}"}


def _open_bracket(text: str, problem: _Problem) -> _Slip | None:
    if not re.search(": expected (',' or|the node content)", problem.words):
        return None
    at = problem.context_at
    if "<stream end>" in problem.words:
        open_brackets: list[int] = []
        for match in _BRACKETS.finditer(text):
            if match[0] in _CLOSING:
                open_brackets.append(match.start())
            elif match[0] in ("]", "}") and open_brackets:
                open_brackets.pop()
        at = open_brackets[-1] if open_brackets else at
        if at is not None and text[at : at + 1] in _CLOSING:
            return _Slip(f"the `{text[at]}` here is never closed with `{_CLOSING[text[at]]}`", at, at + 1)
    if at is None or text[at : at + 1] not in _CLOSING or not problem.words.startswith("while parsing a flow "):
        return None
    closing = _CLOSING[text[at]]
    message = f"`,` or `{closing}` is expected here, inside the open `{text[at]}`"
    help = f"close it with `{closing}`, or quote the value if the bracket belongs to it"
    return _Slip(message, problem.at, _end(text, problem.at), help, opened_at=at)


def _missing_space(text: str, problem: _Problem) -> _Slip | None:
    """Return the explanation for `key:value` without a space: before a bracket here, else on the unfinished line."""
    at = problem.at
    if text[at : at + 2] in (":[", ":{") and (key := re.search(r"[A-Za-z_][\w.-]*\Z", text[:at])):
        return _no_space(text, at, key[0])
    line: int | None = None
    if "could not find expected ':'" in problem.words and problem.context_at is not None:
        line = _line_start(text, problem.context_at)
    elif re.search(": (mapping values are not allowed|expected '<document start>')", problem.words):
        start = _line_start(text, at)
        line = None if re.search(r":\s+\S", text[start:at]) else _line_above(text, start)
    match = None if line is None else _GLUED.match(text, line)
    if match and not re.search(r":(\s|$)", _line(text, match.start())):
        return _no_space(text, match.end() - 1, match[1])
    return None


_GLUED: Final = re.compile(r"[ \t]*(?:- +)?([A-Za-z_][\w.-]*)(?::(?=[^\s/:])|：)")


def _no_space(text: str, colon: int, key: str) -> _Slip:
    sign = text[colon]
    message = "a space is missing after this `:`" if sign == ":" else f"this `{sign}` is not the `:` of YAML"
    return _Slip(message, colon, colon + 1, f"write `{key}: ...`")


# The underlined extents, matched from their start: a character, a word, a line with or without its comment.
_EXTENTS: Final = {
    "char": re.compile("."),
    "word": re.compile(r"[^\s,\[\]{}]*"),
    "line": re.compile(r"[^\n]*?(?=\s*(?:\n|\Z))"),
    "value": re.compile(r"[^\n]*?(?=\s*(?:\n|\Z)|\s+#)"),
}


def _end(text: str, at: int, extent: str = "word") -> int:
    match = _EXTENTS[extent].match(text, at)
    return max(match.end() if match else at, at + 1)


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line(text: str, at: int) -> str:
    return text[_line_start(text, at) : _end(text, at, "line")]


def _line_above(text: str, start: int) -> int | None:
    """Return the start of the nearest line above that is neither blank nor a comment."""
    while start > 0:
        start = _line_start(text, start - 1)
        line = _line(text, start).strip()
        if line and not line.startswith("#"):
            return start
    return None
