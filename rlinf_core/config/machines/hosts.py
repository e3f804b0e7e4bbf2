"""Host lists with ranges: `trainer[00-07],spare3` names nine hosts.

HOSTS  := HOST ("," HOST)*
HOST   := (text | "[" PIECE ("," PIECE)* "]")+
PIECE  := INT | INT "-" INT                    inclusive; leading zeros are kept
"""

from __future__ import annotations

import re

from rlinf_core.config.source import NotationError
from rlinf_core.scalars import impossible_address

MAX_HOSTS = 100_000
# A destination is one argument of ssh: it must not look like an option, nor contain characters invalid in host and user
# names.
_DESTINATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%+\-]*\Z", re.ASCII)
# Text that can only be an address: numbers with dots, or several colons.
_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+)+\Z|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Za-z:.%_\-]*\Z", re.ASCII)
# `[2001:db8::7]`, as in a URL; other brackets hold a range.
_BRACKETED = re.compile(r"(?P<user>[^\[\]@]*@)?\[(?P<address>[^\[\],:]*:[^\[\],]*)\](?P<port>:[0-9]+)?\Z")
_TEXT_OR_RANGE = re.compile(r"(?P<text>[^\[\]]+)|\[[^\]]*\]")
_PIECE = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?\Z", re.ASCII)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts that `text` names, in the order written.

    Raises:
        NotationError: the text is not a list of hosts.
    """
    hosts: list[str] = []
    for start, end in _split(text):
        bare = without_brackets(text[start:end], start)
        names = [bare] if bare != text[start:end] else _expand_one(text, start, end, MAX_HOSTS - len(hosts))
        for name in names:
            check_destination(name, start, end)
        hosts.extend(names)
    return tuple(hosts)


def without_brackets(name: str, start: int = 0) -> str:
    """Return a destination without brackets around an IPv6 address; any other as it is.

    Raises:
        NotationError: a port follows the brackets.
    """
    match = _BRACKETED.match(name)
    if match is None:
        return name
    bare = f"{match['user'] or ''}{match['address']}"
    if match["port"]:
        help = f"remove it: `{bare}`; set the port of sshd with `port` of `ssh`"
        raise NotationError(f"`{name}` has a port, which a host cannot have", start, start + len(name), help)
    return bare


def check_destination(name: str, start: int = 0, end: int | None = None) -> None:
    """Check that a text can be a host or `user@host`, without a port and with a possible address.

    Raises:
        NotationError: with the given offsets.
    """
    stop = len(name) if end is None else end
    host = name.rpartition("@")[2]
    if not _DESTINATION.match(name) and not (host.startswith("::") and _ADDRESS.match(host)):
        message = f"`{name}` is not a host" if name else "a host is missing here"
        raise NotationError(message, start, stop, "write `trainer3`, `me@10.0.0.3` or `trainer[00-07]`")
    if host.count(":") == 1:
        bare, _, port = name.rpartition(":")
        help = f"remove it: `{bare}`; set the port of sshd with `port` of `ssh`" if port.isdecimal() else None
        raise NotationError(f"`{name}` has a port, which a host cannot have", start, stop, help)
    wrong = impossible_address(host) if _ADDRESS.match(host) else None
    if wrong is not None:
        raise NotationError(wrong, start, stop, "write it as in `10.0.0.3`, or a host name")


def _split(text: str) -> list[tuple[int, int]]:
    """Return the pieces between the commas outside brackets, without surrounding blanks."""
    pieces: list[tuple[int, int]] = []
    start, depth = 0, 0
    for at, char in enumerate(text + ","):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and (depth <= 0 or at == len(text)):
            piece = text[start:at]
            left = start + len(piece) - len(piece.lstrip())
            pieces.append((left, max(left, start + len(piece.rstrip()))))
            start = at + 1
    return pieces


def _expand_one(text: str, start: int, end: int, room: int) -> list[str]:
    names = [""]
    at = start
    while at < end:
        match = _TEXT_OR_RANGE.match(text, at, end)
        if match is None and text[at] == "]":
            raise NotationError("`]` without `[`", at, at + 1)
        if match is None:
            raise NotationError("`[` is never closed", at, end, "write `trainer[00-07]`")
        choices = [match["text"]] if match["text"] else _numbers(text, at + 1, match.end() - 1, room)
        if len(names) * len(choices) > room:
            raise NotationError(f"more than {MAX_HOSTS} hosts", start, end)
        names = [name + choice for name in names for choice in choices]
        at = match.end()
    return names


def _numbers(text: str, start: int, end: int, room: int) -> list[str]:
    numbers: list[str] = []
    at = start
    for piece in text[start:end].split(","):
        match = _PIECE.match(piece)
        if match is None:
            raise NotationError(
                f"`{piece.strip()}` is not a number or a range", at, at + max(1, len(piece)), "write `[00-07]`"
            )
        first, last = match[1], match[2] or match[1]
        if len(first) > 10 or len(last) > 10 or int(last) - int(first) >= room:
            raise NotationError(f"more than {MAX_HOSTS} hosts", at, at + len(piece))
        if int(last) < int(first):
            raise NotationError(
                f"`{piece.strip()}` runs backwards", at, at + len(piece), f"did you mean `{last}-{first}`?"
            )
        # `[08-11]` and `[00-7]` pad to the width of the first number, as in other tools with this notation.
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        at += len(piece) + 1
    return numbers
