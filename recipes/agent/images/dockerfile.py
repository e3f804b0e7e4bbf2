"""Dockerfiles: what of them can be built in a box, which has no network, and what is refused by its line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, cast

from rlinf_core import ConfigError

BUILT: Final = ("FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER", "SHELL")
# They say how a container is started, which a box is not by its image.
WITHOUT_EFFECT: Final = (
    *("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"),
)
_FLAG: Final = re.compile(r"--([a-z-]+)=(\S+)\s*")
_VARIABLE: Final = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_ELSEWHERE: Final = (
    "build it where there is docker or podman, save it by `docker save` or `podman save`, load it by"
    ' `rlinf tasks load ARCHIVE NAME`, and write `docker_image = "NAME"` into the section `[environment]` of task.toml'
)


class Instruction(NamedTuple):
    """An instruction of a Dockerfile.

    Attributes:
        word: its first word, in capitals.
        text: what follows, without flags.
        flags: its flags.
        line: the line on which it begins.
    """

    word: str
    text: str
    flags: Mapping[str, str]
    line: int

    @property
    def words(self) -> list[str]:
        """The words of a command in the form of JSON, or those between blanks."""
        listed = self.listed
        return shlex.split(self.text) if listed is None else listed

    @property
    def listed(self) -> list[str] | None:
        """The words where they are written as JSON."""
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
        ConfigError: it cannot be read, or has an instruction that is not built here.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read", why=str(error)) from None
    steps: list[Instruction] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first, words = number + 1, lines[number].strip()
        number += 1
        if first == 1 and re.match(r"#\s*escape\s*=", words):
            refuse(path, first, "another escape character")
        if not words or words.startswith("#"):
            continue
        while words.endswith("\\") and number < len(lines):
            following = lines[number].strip()
            number += 1
            if not following.startswith("#"):
                words = f"{words[:-1]}{following}" if following else words
        steps.append(_step(path, first, words))
    froms = [step for step in steps if step.word == "FROM"]
    if not froms or next(step.word for step in steps if step.word != "ARG") != "FROM":
        raise ConfigError(f"`{path}` does not begin with FROM")
    if len(froms) > 1:
        refuse(path, froms[1].line, "several stages")
    return steps


def _step(path: Path, line: int, words: str) -> Instruction:
    word, _, rest = words.partition(" ")
    word, rest = word.upper(), rest.strip()
    if word not in (*BUILT, *WITHOUT_EFFECT):
        refuse(path, line, f"`{word}`")
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
    return Instruction(word, rest, flags, line)


def refuse(path: Path, line: int, what: str) -> NoReturn:
    """Raise the error of a Dockerfile that is not built here."""
    raise ConfigError(f"{path}:{line}: {what} is not built here", help=_ELSEWHERE)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+value}` in place."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        known = variables.get(match[1] or match[2], "")
        if match[3] == "-":
            return known or match[4]
        return match[4] if match[3] == "+" and known else "" if match[3] == "+" else known

    return _VARIABLE.sub(value, text)


def assignments(step: Instruction) -> dict[str, str]:
    """Return the variables that an `ENV` or `ARG` sets; those of an `ARG` without a value are empty."""
    words = shlex.split(step.text)
    if step.word == "ENV" and words and "=" not in words[0]:
        name, _, value = step.text.partition(" ")
        return {name: value.strip()}
    return {name: value for name, _, value in (word.partition("=") for word in words)}
