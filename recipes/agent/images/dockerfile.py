"""Reading of Dockerfiles; what a box without a network cannot build is rejected with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, cast

from rlinf_core import ConfigError

BUILT: Final = ("FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER", "SHELL")
# Variables are replaced in these; in RUN, the shell does it.
EXPANDED: Final = ("FROM", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER")
# These set how a container starts, which boxes ignore.
WITHOUT_EFFECT: Final = (
    *("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"),
)
_FLAG: Final = re.compile(r"--([a-z-]+)=(\S+)\s*")
_PIECE: Final = re.compile(
    r"""(?P<blank>\s+)|'(?P<literal>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)"""
    r"""|(?P<variable>\$\w+|\$\{[^}]*\})|(?P<plain>[^\s'"\\$]+|\$(?!\{))""",
    re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?)([-+])(.*))?\})", re.DOTALL)
# Escapes and variables between quotes.
_QUOTED: Final = re.compile(r"""\\(["\\$])|(\$\w+|\$\{[^}]*\})""")
_MODE: Final = re.compile(r"[0-7]{3,4}")
_ELSEWHERE: Final = (
    "build it where there is docker or podman, save it by `docker save` or `podman save`, load it by"
    ' `rlinf tasks load ARCHIVE NAME`, and write `docker_image = "NAME"` into the section `[environment]` of task.toml'
)


class Instruction(NamedTuple):
    """An instruction of a Dockerfile.

    Attributes:
        word: the first word, in capitals.
        text: the rest, without flags.
        flags: the values of the flags.
        line: the number of its first line.
    """

    word: str
    text: str
    flags: Mapping[str, str]
    line: int

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """Return the words of the JSON form, or those separated by blanks, with variables replaced.

        Raises:
            ValueError: a quotation has no end, or a variable is in an unknown form.
        """
        listed = self.listed
        return _split(self.text, variables) if listed is None else [expand(word, variables) for word in listed]

    @property
    def listed(self) -> list[str] | None:
        """The words of the JSON form; None: another form."""
        if not self.text.startswith("["):
            return None
        try:
            words: object = json.loads(self.text)
        except ValueError:
            return None
        if isinstance(words, list) and all(isinstance(word, str) for word in cast("list[object]", words)):
            return cast("list[str]", words)
        return None


def read_dockerfile(path: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile that can be built here.

    Raises:
        ConfigError: the file cannot be read, or has an unsupported instruction.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read", why=str(error)) from None
    steps: list[Instruction] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, words = number + 1, lines[number].strip()
        number += 1
        if first == 1 and re.match(r"#\s*escape\s*=", words):
            refuse(path, first, "another escape character")
        if not words or words.startswith("#"):
            continue
        while words.endswith("\\") and number < len(lines):
            following = lines[number].rstrip()
            number += 1
            # The blanks before a line's words part them from the line before.
            if following and not following.lstrip().startswith("#"):
                words = f"{words[:-1]}{following}"
        steps.append(_step(path, first, words))
    froms = [step for step in steps if step.word == "FROM"]
    if not froms or next(step.word for step in steps if step.word != "ARG") != "FROM":
        raise ConfigError(f"`{path}` does not begin with FROM")
    if len(froms) > 1:
        refuse(path, froms[1].line, "several stages")
    return steps


def _step(path: Path, line: int, words: str) -> Instruction:
    word, rest = (*words.split(None, 1), "")[:2]
    word = word.upper()
    if word not in (*BUILT, *WITHOUT_EFFECT):
        refuse(path, line, f"`{word}`")
    if word in BUILT and not rest:
        refuse(path, line, f"`{word}` without arguments")
    flags: dict[str, str] = {}
    if word in ("RUN", "COPY", "ADD", "FROM"):
        while match := _FLAG.match(rest):
            flags[match[1]] = match[2]
            rest = rest[match.end() :]
        known = ("chown", "chmod") if word in ("COPY", "ADD") else ()
        for flag in flags:
            if flag not in known:
                refuse(path, line, f"`{word} --{flag}`")
        if re.search(r"<<-?['\"]?\w", rest) and word != "FROM":
            refuse(path, line, "a text within the Dockerfile (`<<`)")
        if word == "ADD" and re.match(r"(https?://|git@)", rest):
            refuse(path, line, "`ADD` of an address: a box has no network")
    if not _MODE.fullmatch(flags.get("chmod", "644")):
        refuse(path, line, f"`{word} --chmod={flags['chmod']}`")
    step = Instruction(word, rest, flags, line)
    if word in EXPANDED:
        try:
            step.words({})
        except ValueError as error:
            refuse(path, line, str(error))
    return step


def refuse(path: Path, line: int, what: str) -> NoReturn:
    """Raise the error for an unsupported part of a Dockerfile."""
    raise ConfigError(f"{path}:{line}: {what} is not built here", help=_ELSEWHERE)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text without quotes, with `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+value}` replaced.

    Raises:
        ValueError: a quotation has no end, or a variable is in another form.
    """
    return "".join(_value(match, variables) for match in _pieces(text))


def _split(text: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words of a text; a variable's value is not split at blanks."""
    words: list[str] = []
    begun = False
    for match in _pieces(text):
        if match.lastgroup == "blank":
            begun = False
        else:
            words += [] if begun else [""]
            words[-1] += _value(match, variables)
            begun = True
    return words


def _pieces(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(text):
        match = _PIECE.match(text, place)
        if match is None:
            raise ValueError(f"`{text[place:]}`, which has no end,")
        place = match.end()
        yield match


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match.lastgroup == "quoted":
        return _QUOTED.sub(lambda inner: inner[1] or _variable(inner[2], variables), match["quoted"])
    if match.lastgroup == "variable":
        return _variable(match["variable"], variables)
    return match[match.lastgroup or 0]


def _variable(text: str, variables: Mapping[str, str]) -> str:
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise ValueError(f"the variable `{text}`")
    value, other = variables.get(match[1] or match[2]), expand(match[5] or "", variables)
    is_there = bool(value) if match[3] else value is not None
    if match[4] == "+":
        return other if is_there else ""
    return value if is_there and value is not None else other


def assignments(step: Instruction, variables: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that an `ENV` or `ARG` sets; None: an `ARG` without a value.

    Raises:
        ValueError: see `expand`.
    """
    name, rest = (*step.text.split(None, 1), "")[:2]
    if step.word == "ENV" and "=" not in name:
        return {name: expand(rest, variables)}
    pairs = (word.partition("=") for word in step.words(variables))
    return {name: value if sign else None for name, sign, value in pairs}
