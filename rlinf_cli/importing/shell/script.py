"""The job that a shell script starts: its variables, branches and arrays are followed up to the command.

Nothing is run: a command that is not the job counts as failed and prints nothing. `date` becomes `${now:...}`, and a
variable that the script never sets becomes `${oc.env:NAME}`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlinf_cli.importing.shell.arithmetic import computed
from rlinf_cli.importing.shell.grammar import (
    Array,
    Body,
    Branches,
    CaseChoice,
    Chain,
    Command,
    CommandBlock,
    Loop,
    ScriptError,
    Statement,
    closing,
    end_of_piece,
    parse,
)

# What stands for the output of a command that is not run; OmegaConf's mark of a missing value.
UNKNOWN: Final = "???"
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_EXPANSION: Final = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?])(\[(?:[@*]|\d+)\])?(?:(:?[-=?+])(.*))?\Z", re.DOTALL)
_DECLARING: Final = ("export", "local", "declare", "readonly", "typeset")
# Far above real scripts.
_MOST_STEPS: Final = 20_000
_MOST_TEXT: Final = 1_000_000


class ScriptLaunch(NamedTuple):
    """The command that starts a job.

    Attributes:
        module: the Python module that it runs.
        words: its arguments behind the module.
        before: the words before the module, as of `torchrun`.
        line: its line in the script.
    """

    module: str
    words: tuple[str, ...]
    before: tuple[str, ...]
    line: int


class _LaunchReached(Exception):  # noqa: N818 - no error: it ends the reading
    def __init__(self, launch: ScriptLaunch) -> None:
        self.launch = launch


class _Ended(Exception):  # noqa: N818 - no error: the script says `exit`
    def __init__(self, line: int) -> None:
        self.line = line


def find_launch(text: str, environ: Mapping[str, str], is_job: Callable[[str], bool]) -> ScriptLaunch | None:
    """Return the first command of a script that runs a module for which `is_job` is true; None if there is none.

    Raises:
        ScriptError: its form is not understood, or it ends before.
    """
    reader = _Reader(environ, is_job)
    try:
        reader.run(parse(text.replace("\r\n", "\n")))
    except _LaunchReached as reached:
        return reached.launch
    except _Ended as ended:
        raise ScriptError(f"line {ended.line}: the script exits before it starts a job") from None
    except RecursionError as error:
        raise ScriptError("it nests too deeply") from error
    return None


@dataclass
class _Reader:
    environ: Mapping[str, str]
    is_job: Callable[[str], bool]
    values: dict[str, str | list[str]] = field(default_factory=dict[str, str | list[str]])
    output: list[str] | None = None
    steps: int = 0

    def run(self, body: Body) -> bool:
        """Follow statements; return whether the last one succeeds."""
        status = True
        for statement in body:
            status = self.statement(statement)
        return status

    def statement(self, statement: Statement) -> bool:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ScriptError("it has more steps than any real script")
        match statement:
            case Command():
                return self.command(statement)
            case CommandBlock(body):
                return self.run(body)
            case Chain(first, rest):
                status = self.statement(first)
                for sign, below in rest:
                    if (sign == "&&") == status:
                        status = self.statement(below)
                return status
            case Branches(cases, otherwise):
                for condition, body in cases:
                    if self.run(condition):
                        return self.run(body)
                return self.run(otherwise)
            case CaseChoice(word, cases):
                text = self.text(word)
                for patterns, body in cases:
                    if any(fnmatch.fnmatchcase(text, self.text(pattern)) for pattern in patterns):
                        return self.run(body)
                return True
            case Loop(name, words, body):
                for item in [piece for word in words for piece in self.fields(word)]:
                    self.values[name] = item
                    self.run(body)
                return True

    def command(self, command: Command) -> bool:
        words = list(command.words)
        if words[0] == "((":
            return computed(str(words[1]), self.variable) != 0
        declares = words[0] in _DECLARING
        words = words[1:] if declares else words
        while words and self._assigned(words[0]):
            words = words[1:]
        if declares or not words:
            return True
        fields = [piece for word in words if isinstance(word, str) for piece in self.fields(word)]
        if not fields:
            return True
        if fields[0] == "!":
            return not self.simple(fields[1:], command.line)
        return self.simple(fields, command.line)

    def _assigned(self, word: str | Array) -> bool:
        """Follow an assignment; return False for any other word."""
        if isinstance(word, Array):
            name = word.name.rstrip("+=")
            items = [piece for item in word.items for piece in self.fields(item)]
            old = self.values.get(name, []) if word.name.endswith("+=") else []
            self.values[name] = [*(old if isinstance(old, list) else [old]), *items]
            return True
        match = _ASSIGNMENT.match(word)
        if match is None:
            return False
        value = self.text(word[match.end() :])
        self.values[match[1]] = self.variable(match[1]) + value if match[2] else value
        return True

    def simple(self, fields: list[str], line: int) -> bool:
        """Follow a command of words only."""
        name = fields[0] if fields else "true"
        if name in ("[", "[[", "test"):
            return _test([word for word in fields[1:] if word not in ("]", "]]")])
        if name in ("exit", "return"):
            raise _Ended(line)
        if name == "unset":
            for other in fields[1:]:
                self.values.pop(other, None)
            return True
        if name in ("echo", "printf") and self.output is not None:
            self.output.append(" ".join(fields[1:]))
            return True
        if name == "date" and self.output is not None:
            form = next((word[1:] for word in fields[1:] if word.startswith("+")), "%Y-%m-%d")
            self.output.append(f"${{now:{form}}}")
            return True
        for index, word in enumerate(fields):
            if self.is_job(word):
                raise _LaunchReached(ScriptLaunch(word, tuple(fields[index + 1 :]), tuple(fields[:index]), line))
        return name in ("true", ":", "set", "shift", "echo", "printf", "cd", "mkdir")

    def variable(self, name: str) -> str:
        value = self.values.get(name, "")
        return value if isinstance(value, str) else " ".join(value)

    def text(self, word: str) -> str:
        """Return a word's text, its expansions put in and quotes taken off."""
        return " ".join(self._expanded(word, split=False))

    def fields(self, word: str) -> list[str]:
        """Return the words that a word becomes: an unquoted expansion may give several, or none."""
        return self._expanded(word, split=True)

    def _expanded(self, word: str, *, split: bool) -> list[str]:
        pieces, is_open = [""], False
        at = 0
        while at < len(word):
            end = end_of_piece(word, at) if word[at] in "\\'\"`" else self._end(word, at)
            piece, character = word[at:end], word[at]
            at = end
            if character == "'":
                values, is_open = [piece[1:-1]], True
            elif character == "\\":
                values, is_open = [piece[1:]], True
            elif character == '"':
                values = self._quoted(piece[1:-1])
                is_open = is_open or values != []
            elif character in "$`":
                values = self._expansion(piece)
                values = [part for value in values for part in value.split()] if split else [" ".join(values)]
            else:
                values, is_open = [piece], True
            if values:
                pieces[-1] += values[0]
                pieces += values[1:]
        if sum(map(len, pieces)) > _MOST_TEXT:
            raise ScriptError(f"a word is longer than {_MOST_TEXT} characters")
        return pieces if is_open or any(pieces) else []

    def _quoted(self, text: str) -> list[str]:
        """Return what a text in double quotes becomes: one word, or those of `"${A[@]}"`."""
        pieces, at, is_empty = [""], 0, bool(text)
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\"):
                values, at = [text[at + 1]], at + 2
            elif text[at] in "$`":
                end = self._end(text, at) if text[at] == "$" else end_of_piece(text, at)
                values, at = self._expansion(text[at:end]), end
            else:
                values, at = [text[at]], at + 1
            is_empty = is_empty and not values
            if values:
                pieces[-1] += values[0]
                pieces += values[1:]
        return [] if is_empty else pieces

    def _end(self, text: str, at: int) -> int:
        if text[at] != "$":
            return at + 1
        if text[at + 1 : at + 2] in ("(", "{"):
            return closing(text, at + 1) + 1
        match = _NAME.match(text, at + 1)
        return match.end() if match else at + 2 if text[at + 1 : at + 2] in tuple("0123456789@*#?") else at + 1

    def _expansion(self, text: str) -> list[str]:
        """Return the values of `$NAME`, `${...}`, `$(...)` or `$((...))`."""
        if text.startswith("$((") and text.endswith("))"):
            return [str(computed(self.text(f'"{text[3:-2]}"'), self.variable))]
        if text.startswith(("$(", "`")):
            return [self._output(text[2:-1] if text[0] == "$" else text[1:-1])]
        if text == "$":
            return ["$"]
        body = text[2:-1] if text.startswith("${") else text[1:]
        match = _EXPANSION.match(body)
        if match is None:
            raise ScriptError(f"`{text}` is an expansion that is not followed")
        counts, name, listed, sign, word = match.groups()
        value = self.values.get(name)
        if name in ("@", "*"):
            return []
        if name == "#":
            # Arguments of the script are not known here; those that it asks for are named where they are used.
            return ["9"]
        if listed and listed[1:-1].isdigit():
            items = value if isinstance(value, list) else []
            return items[int(listed[1:-1]) :][:1] or [UNKNOWN]
        if listed or isinstance(value, list):
            items = value if isinstance(value, list) else [] if value is None else [value]
            return [str(len(items))] if counts else items if listed else items[:1]
        if sign is not None:
            return self._with_default(name, value, sign, word)
        if counts:
            return [str(len(value or ""))]
        if value is None:
            return [f"${{oc.env:{name if _NAME.fullmatch(name) else f'ARGUMENT_{name}'}}}"]
        return [value]

    def _with_default(self, name: str, value: str | None, sign: str, word: str) -> list[str]:
        value = self.environ.get(name) if value is None else value
        is_set = value is not None and (value != "" or ":" not in sign)
        if sign[-1] == "+":
            return [self.text(word)] if is_set else [""]
        if is_set and value is not None:
            return [value]
        if sign[-1] == "?":
            return [f"${{oc.env:{name}}}"]
        value = self.text(word)
        if sign[-1] == "=":
            self.values[name] = value
        return [value]

    def _output(self, script: str) -> str:
        """Return the output of a command substitution; `???` where it depends on a command."""
        inner = _Reader(self.environ, lambda module: False, dict(self.values), [], self.steps)
        try:
            succeeded = inner.run(parse(script))
        except _Ended:
            succeeded = False
        self.steps = inner.steps
        text = "\n".join(inner.output or ()).strip()
        return text if text or succeeded else UNKNOWN


def _test(words: list[str]) -> bool:
    """Return the result of `[ ... ]`; files are not looked at, and count as missing."""
    if not words:
        return False
    for sign in ("-o", "-a"):
        if sign in words:
            at = words.index(sign)
            one, other = _test(words[:at]), _test(words[at + 1 :])
            return one or other if sign == "-o" else one and other
    if words[0] == "!":
        return not _test(words[1:])
    match words:
        case [text]:
            return bool(text)
        case ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [one, "=" | "==", other]:
            return fnmatch.fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatch.fnmatchcase(one, other)
        case [one, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as sign, other]:
            try:
                return bool(_NUMERIC[sign](int(one), int(other)))
            except ValueError:
                return False
        case _:
            return False


_NUMERIC: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
}
