"""Explanations of the parser's errors, with what to change.

Where the parser gave up is, for well-known slips, not where the mistake is. Each rule knows one family of complaints
and returns None for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.yaml_events import YamlSyntaxError
from rlinf_core.config.yaml_layout import Indentation


class _Explanation(NamedTuple):
    message: str
    start: int
    end: int
    help: str | None = None
    code: str = "yaml-syntax"
    # Another place that matters, and why.
    also: tuple[int, str] | None = None


def explain(layout: Indentation, problem: YamlSyntaxError) -> Diagnostic:
    """Return the finding for a text that the parser refused."""
    text = layout.text
    found = next(filter(None, (rule(text, problem) for rule in _RULES)), None) or _unfamiliar(text, problem)
    help = found.help
    if found.code == "yaml-syntax" and "{{" in _line(text, problem.at):
        help = "quote the whole value if `{{ ... }}` is meant as text"
    size = len(text)
    span = layout.span(min(found.start, size), min(found.end, size))
    related = ()
    if found.also is not None:
        at, why = found.also
        related = ((layout.span(at, at + 1), why),)
    return Diagnostic(found.code, Severity.ERROR, found.message, span, (), help, related)


def shown(text: str, limit: int = 60) -> str:
    """Return a piece of a file as a message quotes it: on one line, and not too long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


# Rules


def _undefined_handle(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if not problem.problem.startswith("found undefined tag handle"):
        return None
    end = _word_end(text, problem.at)
    return _Explanation(
        f"the tag `{shown(text[problem.at : end])}` is not known; only plain data is read",
        problem.at,
        end,
        "remove the tag, or quote the value if the `!` belongs to it",
        code="unknown-tag",
    )


def _tab(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if text[problem.at : problem.at + 1] != "\t" or "cannot start any token" not in problem.problem:
        return None
    start = _line_start(text, problem.at)
    if text[start : problem.at].strip():
        return _Explanation("a tab follows `-` or `?`", problem.at, problem.at + 1, "write a space")
    end = problem.at + len(text[problem.at :]) - len(text[problem.at :].lstrip(" \t"))
    others = sum(1 for line in text[end:].split("\n")[1:] if "\t" in line[: len(line) - len(line.lstrip())])
    more = (
        f"; {others} more line{'s' if others > 1 else ''} below {'have' if others > 1 else 'has'} one" if others else ""
    )
    return _Explanation(
        f"this line is indented with a tab, which YAML does not allow{more}",
        start,
        end,
        "indent with spaces only",
        code="tab-indentation",
    )


def _cannot_start(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if "cannot start any token" not in problem.problem:
        return None
    character = text[problem.at : problem.at + 1]
    if character in "|>":
        message = f"a text block (`{character}`) cannot stand within brackets"
        return _Explanation(message, problem.at, problem.at + 1, "write the text in quotes")
    end = _value_end(text, problem.at)
    message = f"an unquoted value cannot start with `{character}`"
    return _Explanation(message, problem.at, end, f"quote it: {_quoted(text[problem.at : end])}")


def _alias_name(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.context_at is None or problem.context not in ("while scanning an alias", "while scanning an anchor"):
        return None
    start = problem.context_at
    end = _value_end(text, start)
    what = "an alias, the name of a value above" if text[start] == "*" else "an anchor, a name for the value"
    message = f"an unquoted `{text[start]}` starts {what}, and this is no name"
    return _Explanation(message, start, end, f"quote it: {_quoted(text[start:end])}")


def _open_quote(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.context_at is None or "quoted scalar" not in problem.context:
        return None
    start = problem.context_at
    if problem.problem.startswith("found unexpected"):
        return _Explanation(
            f"the text that starts here with `{text[start]}` is never closed", start, _line_end(text, start)
        )
    return None


def _escape(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if "double-quoted scalar" not in problem.context:
        return None
    start = max(text.rfind("\\", 0, problem.at + 1), 0)
    return _Explanation(
        f"`{shown(text[start : problem.at + 1])}` is not an escape that YAML knows",
        start,
        problem.at + 1,
        "write `\\\\` for a backslash, or use single quotes, where a backslash is an ordinary character",
    )


_BRACKETS = re.compile(r"""[\[\]{}]|"(?:\\.|[^"\\])*"|'[^']*'|#.*""")


def _ends_within_brackets(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    """Return the slip of a text that ends within an open list or mapping."""
    if problem.problem != "expected the node content, but found '<stream end>'":
        return None
    open_brackets: list[int] = []
    for match in _BRACKETS.finditer(text):
        if match[0] in ("[", "{"):
            open_brackets.append(match.start())
        elif match[0] in ("]", "}") and open_brackets:
            open_brackets.pop()
    if not open_brackets:
        return None
    at = open_brackets[-1]
    return _Explanation(f"the `{text[at]}` here is never closed with `{_CLOSING[text[at]]}`", at, at + 1)


_CLOSING = {"[": "]", "{": "}"}


def _open_bracket(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.context_at is None or not problem.context.startswith("while parsing a flow "):
        return None
    bracket = text[problem.context_at : problem.context_at + 1]
    closing = _CLOSING.get(bracket)
    if closing is None:
        return None
    if "<stream end>" in problem.problem:
        message = f"the `{bracket}` here is never closed with `{closing}`"
        return _Explanation(message, problem.context_at, problem.context_at + 1)
    glued = re.search(r"([A-Za-z_][\w.-]*):\Z", text[problem.context_at : problem.at])
    if glued and text[problem.at : problem.at + 1] in _CLOSING:
        return _no_space(problem.at - 1, glued[1])
    end = max(_word_end(text, problem.at), problem.at + 1)
    return _Explanation(
        f"`,` or `{closing}` is expected here, within the `{bracket}` that is still open",
        problem.at,
        end,
        f"close it with `{closing}`, or quote the value if the bracket belongs to it",
        also=(problem.context_at, "opened here"),
    )


def _second_colon(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.problem != "mapping values are not allowed here":
        return None
    start = _line_start(text, problem.at)
    before = text[start : problem.at]
    value = re.search(r":\s+(?=\S)", before)
    if value:
        value_start = start + value.end()
        end = _value_end(text, value_start)
        return _Explanation(
            "a second `:` on one line: a value cannot be `key: value` itself",
            problem.at,
            problem.at + 1,
            f"quote the value, {_quoted(text[value_start:end])}, or write the inner key on a line of its own",
        )
    above = _line_above(text, start)
    if above is None:
        return None
    if (slip := _missing_space(text, above)) is not None:
        return slip
    return _Explanation(
        "this `key:` is indented below a line that already has a value",
        start + len(before) - len(before.lstrip()),
        problem.at + 1,
        "align it with the keys it belongs to, or take the value off the line above",
        also=(_line_end(text, above) - 1, "the value ends here"),
    )


def _no_colon(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.problem != "could not find expected ':'" or problem.context_at is None:
        return None
    start = problem.context_at
    if (slip := _missing_space(text, _line_start(text, start))) is not None:
        return slip
    message = "a line `key: value` is expected here"
    help = "add the `:`, or indent the line if it continues the value above"
    return _Explanation(message, start, _line_end(text, start), help)


def _after_the_end(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    """Return the slip of a token that cannot follow the open list or mapping."""
    match = re.fullmatch(r"expected <block end>, but found '(.+)'", problem.problem, re.DOTALL)
    if match is None:
        return None
    found, at, end = match[1], problem.at, _value_end(text, problem.at)
    if found in ("<block mapping start>", "<block sequence start>"):
        return _Explanation(
            "the indentation of this line fits no line above it",
            at,
            end,
            "align it with the keys or items it belongs to",
        )
    if found in ("]", "}", ","):
        return _Explanation(
            f"`{found}` closes or separates nothing here", at, at + 1, "quote the value if it holds one"
        )
    if found == "-":
        message = "a list item stands among the keys of a mapping"
        return _Explanation(message, at, end, "indent the items below the key they belong to")
    if found in ("?", ":") and "block collection" in problem.context:
        message = "a key stands among the items of a list"
        return _Explanation(message, at, end, "align it with the key above the list, or start it with `- `")
    if text[at - 1] == "\t":
        message = "an unquoted text ends at a tab, but more follows"
        return _Explanation(message, at, end, "write a space instead of the tab, or quote the text")
    before = text[_line_start(text, at) : at].rstrip()
    if before.endswith(("'", '"')):
        quote = before[-1]
        help = (
            "double a single quote within single quotes: `'it''s'`"
            if quote == "'"
            else 'escape it within quotes: `\\"`'
        )
        return _Explanation(f"text follows the closing `{quote}`", at, end, help)
    if before.endswith(("]", "}")):
        message = f"text follows the closing `{before[-1]}`"
        return _Explanation(message, at, end, "quote the whole value if the bracket belongs to it")
    return _Explanation("nothing more is expected on this line", at, end, "quote the whole value if this belongs to it")


def _item_in_value(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.problem != "sequence entries are not allowed here":
        return None
    message = "a list item cannot start on the line of its key"
    return _Explanation(
        message, problem.at, _value_end(text, problem.at), "write the items on the lines below, or `[a, b]`"
    )


def _block_header(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if problem.context != "while scanning a block scalar" or problem.context_at is None:
        return None
    start = problem.context_at
    end = _value_end(text, start)
    message = f"an unquoted `{text[start]}` starts a block of text, which begins on the next line"
    return _Explanation(message, start, end, f"quote it: {_quoted(text[start:end])}")


def _no_document(text: str, problem: YamlSyntaxError) -> _Explanation | None:
    if not problem.problem.startswith("expected '<document start>'"):
        return None
    end = _value_end(text, problem.at)
    if re.search(r"^%", text[: problem.at], re.MULTILINE):
        message = "a line `---` is expected between `%` directives and the content"
        return _Explanation(message, problem.at, end, "remove the directives, they are not needed")
    if (slip := _missing_space(text, _line_above(text, _line_start(text, problem.at)))) is not None:
        return slip
    message = "this line does not belong to the content above it"
    return _Explanation(message, problem.at, end, "align it with the first key of the file")


_RULES: tuple[Callable[[str, YamlSyntaxError], _Explanation | None], ...] = (
    _undefined_handle,
    _tab,
    _cannot_start,
    _alias_name,
    _open_quote,
    _escape,
    _ends_within_brackets,
    _open_bracket,
    _second_colon,
    _no_colon,
    _after_the_end,
    _item_in_value,
    _block_header,
    _no_document,
)


def _unfamiliar(text: str, problem: YamlSyntaxError) -> _Explanation:
    words = problem.problem.replace("'\\x00'", "the end of the file") or problem.context
    return _Explanation(
        f"this is not YAML: {shown(words, 200)}", problem.at, max(_word_end(text, problem.at), problem.at + 1)
    )


# Places


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return max(at + 1, at + len(text[at:end].rstrip()))


def _line(text: str, at: int) -> str:
    return text[_line_start(text, at) : _line_end(text, at)]


def _line_above(text: str, start: int) -> int | None:
    """Return the start of the nearest line above that is neither blank nor a comment."""
    while start > 0:
        start = _line_start(text, start - 1)
        line = _line(text, start).strip()
        if line and not line.startswith("#"):
            return start
    return None


def _word_end(text: str, at: int) -> int:
    match = re.compile(r"[^\s,\[\]{}]*").match(text, at)
    return match.end() if match else at


def _value_end(text: str, at: int) -> int:
    """Return the end of the line, or of what precedes a comment in it."""
    end = _line_end(text, at)
    comment = re.compile(r"\s+#").search(text, at, end)
    return max(comment.start() if comment else end, at + 1)


def _missing_space(text: str, line_start: int | None) -> _Explanation | None:
    if line_start is None:
        return None
    match = re.compile(r"[ \t]*(?:- +)?([A-Za-z_][\w.-]*):(?=[^\s/:])").match(text, line_start)
    if match is None or re.search(r":(\s|$)", _line(text, line_start)):
        return None
    return _no_space(match.end() - 1, match[1])


def _no_space(colon: int, key: str) -> _Explanation:
    return _Explanation("a space is missing after this `:`", colon, colon + 1, f"write `{key}: ...`")


def _quoted(value: str) -> str:
    return "`'" + shown(value).replace("'", "''") + "'`"
