"""Shell scripts as trees: commands, conditions, branches and loops; words stay as written, with their quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

_OPERATORS: Final = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_REDIRECTION: Final = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|&>>|&>|>\||>|<)")
_ARRAY: Final = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_CLOSING: Final = {"(": ")", "{": "}"}


class ScriptError(Exception):
    """A script whose form is not understood; the message says where."""


@dataclass(frozen=True)
class Array:
    """`NAME=(...)`, or `NAME+=(...)`."""

    name: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """Words and array assignments of one command, with its line."""

    words: tuple[str | Array, ...]
    line: int


@dataclass(frozen=True)
class Chain:
    """Commands joined by `&&` and `||`; of a pipeline the first command."""

    first: Statement
    rest: tuple[tuple[str, Statement], ...]


@dataclass(frozen=True)
class Branches:
    """`if`: conditions with their bodies, and the body of `else`."""

    cases: tuple[tuple[Body, Body], ...]
    otherwise: Body


@dataclass(frozen=True)
class CaseChoice:
    """`case`: a word, and patterns with their bodies."""

    word: str
    cases: tuple[tuple[tuple[str, ...], Body], ...]


@dataclass(frozen=True)
class Loop:
    """`for`: a name, words and a body. The body of `while`, `until` or a function has no words."""

    name: str
    words: tuple[str, ...]
    body: Body


Body: TypeAlias = "tuple[Statement, ...]"
Statement: TypeAlias = "Command | Chain | Branches | CaseChoice | Loop | CommandBlock"


@dataclass(frozen=True)
class CommandBlock:
    """`{ ...; }` or `( ... )`."""

    body: Body


@dataclass
class _Lexer:
    text: str
    at: int = 0
    tokens: list[tuple[str | Array, int]] = field(default_factory=list[tuple[str | Array, int]])
    ends: list[str] = field(default_factory=list[str])
    # The line that `at` is in, counted up to a place before it.
    line: int = 1
    counted: int = 0

    def run(self) -> list[tuple[str | Array, int]]:
        while self.at < len(self.text):
            self._step()
        return self.tokens

    def _step(self) -> None:
        text, at = self.text, self.at
        self.line += text.count("\n", self.counted, at)
        self.counted, line = at, self.line
        if text.startswith("\\\n", at):
            self.at += 2
        elif text[at] in " \t\r":
            self.at += 1
        elif text[at] == "#":
            self.at = end_of_line(text, at)
        elif text.startswith("((", at) and (not self.tokens or self.tokens[-1][0] in _STARTS):
            end = text.find("))", at)
            if end < 0:
                raise ScriptError(f"line {line}: `((` is never closed")
            self.tokens += [("((", line), (text[at + 2 : end], line)]
            self.at = end + 2
        elif (match := _REDIRECTION.match(text, at)) is not None and not text.startswith(("<(", ">("), at):
            self._redirection(match)
        elif (operator := next((sign for sign in _OPERATORS if text.startswith(sign, at)), None)) is not None:
            self.tokens.append((operator, line))
            self.at += len(operator)
            if operator == "\n":
                self._skip_documents()
        else:
            self._word(line)

    def _redirection(self, match: re.Match[str]) -> None:
        self.at = match.end()
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        target = self._raw_word() if self.at < len(self.text) else ""
        if match[0].lstrip("0123456789") in ("<<", "<<-"):
            self.ends.append(target.strip("\"'"))

    def _skip_documents(self) -> None:
        """Skip the lines of here-documents."""
        for end in self.ends:
            while self.at < len(self.text):
                finish = end_of_line(self.text, self.at)
                line, self.at = self.text[self.at : finish], finish + 1
                if line.strip() == end:
                    break
        self.ends = []

    def _word(self, line: int) -> None:
        word = self._raw_word()
        if self.text.startswith("(", self.at) and _ARRAY.match(word):
            close = closing(self.text, self.at)
            inner = _Lexer(self.text[self.at + 1 : close]).run()
            items = tuple(item for item, _ in inner if isinstance(item, str) and item != "\n")
            self.tokens.append((Array(word, items), line))
            self.at = close + 1
        else:
            self.tokens.append((word, line))

    def _raw_word(self) -> str:
        start = self.at
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\r\n;|&()<>":
                break
            self.at = end_of_piece(self.text, self.at)
        if self.at == start:
            line = self.text.count("\n", 0, start) + 1
            raise ScriptError(f"line {line}: `{self.text[start]}` is not understood here")
        return self.text[start : self.at].replace("\\\n", "")


_STARTS: Final = ("\n", ";", "&&", "||", "if", "elif", "while", "then", "else", "do", "{", "!")


def end_of_line(text: str, at: int) -> int:
    """Return the position of the line's end."""
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def end_of_piece(text: str, at: int) -> int:
    """Return the end of the piece of a word at a position: an escape, a quoted text, an expansion or a character.

    Raises:
        ScriptError: it is never closed.
    """
    character = text[at]
    if character == "\\":
        return min(at + 2, len(text))
    if character == "'":
        end = text.find("'", at + 1)
        if end < 0:
            raise ScriptError(f"line {text.count(chr(10), 0, at) + 1}: a quote is never closed")
        return end + 1
    if character in '"`':
        position = at + 1
        while position < len(text) and text[position] != character:
            position = end_of_piece(text, position) if text[position] in "\\$" else position + 1
        if position >= len(text):
            raise ScriptError(f"line {text.count(chr(10), 0, at) + 1}: a quote is never closed")
        return position + 1
    if character == "$" and text[at + 1 : at + 2] in ("(", "{"):
        return closing(text, at + 1) + 1
    return at + 1


def closing(text: str, at: int) -> int:
    """Return the position of the bracket that closes the one at a position.

    Raises:
        ScriptError: it does not exist.
    """
    opening, close = text[at], _CLOSING[text[at]]
    depth, position = 1, at + 1
    while position < len(text):
        character = text[position]
        if character == "#" and opening == "(" and text[position - 1] in " \t\n":
            position = end_of_line(text, position)
            continue
        depth += {opening: 1, close: -1}.get(character, 0)
        if depth == 0:
            return position
        position = end_of_piece(text, position) if character in "\\'\"`$" else position + 1
    raise ScriptError(f"line {text.count(chr(10), 0, at) + 1}: `{opening}` is never closed")


class _Parser:
    """Statements from tokens."""

    def __init__(self, tokens: Sequence[tuple[str | Array, int]]) -> None:
        self.tokens = tokens
        self.at = 0

    @property
    def here(self) -> str | Array | None:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    @property
    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)][1] if self.tokens else 1

    def take(self, *wanted: str) -> str:
        if self.here not in wanted:
            raise ScriptError(f"line {self.line}: expected `{wanted[0]}`")
        self.at += 1
        return str(self.tokens[self.at - 1][0])

    def skip(self, *signs: str) -> None:
        while self.here in signs:
            self.at += 1

    def body(self, *ends: str) -> Body:
        statements: list[Statement] = []
        self.skip("\n", ";", "&")
        while self.here is not None and self.here not in ends:
            statements.append(self.chain())
            self.skip("\n", ";", "&")
        return tuple(statements)

    def chain(self) -> Statement:
        first, rest = self.pipeline(), list[tuple[str, Statement]]()
        while self.here in ("&&", "||"):
            sign = self.take("&&", "||")
            self.skip("\n")
            rest.append((sign, self.pipeline()))
        return Chain(first, tuple(rest)) if rest else first

    def pipeline(self) -> Statement:
        first = self.statement()
        while self.here == "|":
            self.at += 1
            self.skip("\n")
            self.statement()
        return first

    def statement(self) -> Statement:
        word = self.here
        if word == "if":
            return self.branches()
        if word == "case":
            return self.choice()
        if word in ("for", "while", "until"):
            return self.loop()
        if word in ("{", "("):
            self.at += 1
            close = "}" if word == "{" else ")"
            body = self.body(close)
            self.take(close)
            return CommandBlock(body)
        if word == "function" or (self.at + 1 < len(self.tokens) and self.tokens[self.at + 1][0] == "("):
            raise ScriptError(f"line {self.line}: functions of a script are not followed")
        return self.command()

    def command(self) -> Command:
        line, words = self.line, list[str | Array]()
        while (word := self.here) is not None and word not in _OPERATORS:
            words.append(word)
            self.at += 1
        if not words:
            raise ScriptError(f"line {line}: `{self.here}` is not understood here")
        return Command(tuple(words), line)

    def branches(self) -> Branches:
        cases: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        sign = self.take("if")
        while sign in ("if", "elif"):
            condition = self.body("then")
            self.take("then")
            cases.append((condition, self.body("elif", "else", "fi")))
            sign = self.take("elif", "else", "fi")
        if sign == "else":
            otherwise = self.body("fi")
            self.take("fi")
        return Branches(tuple(cases), otherwise)

    def choice(self) -> CaseChoice:
        self.take("case")
        word = self.here
        self.at += 1
        self.take("in")
        self.skip("\n")
        cases: list[tuple[tuple[str, ...], Body]] = []
        while self.here not in ("esac", None):
            self.skip("(")
            patterns: list[str] = []
            while self.here not in (")", None):
                patterns += [str(self.here)] if self.here != "|" else []
                self.at += 1
            self.take(")")
            cases.append((tuple(patterns), self.body(";;", "esac")))
            self.skip(";;", "\n")
        self.take("esac")
        return CaseChoice(str(word), tuple(cases))

    def loop(self) -> Loop:
        kind = self.take("for", "while", "until")
        name, words = "", list[str]()
        if kind == "for":
            name = str(self.here)
            self.at += 1
            self.skip("in")
            while self.here not in (";", "\n", None):
                words.append(str(self.here))
                self.at += 1
            self.skip(";", "\n")
        else:
            self.body("do")
        self.take("do")
        body = self.body("done")
        self.take("done")
        return Loop(name, tuple(words), body)


def parse(text: str) -> Body:
    """Return the statements of a script.

    Raises:
        ScriptError: its form is not understood.
    """
    parser = _Parser(_Lexer(text).run())
    body = parser.body()
    if parser.here is not None:
        raise ScriptError(f"line {parser.line}: `{parser.here}` is not understood here")
    return body
