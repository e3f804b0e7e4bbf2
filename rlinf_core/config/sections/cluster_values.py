"""Values of the `cluster` section with their own syntax: names, paths, variables, ports, and lists of hosts.

A list of hosts may hold ranges, so that `trainer[00-07],spare3` names nine hosts:

HOSTS  := HOST ("," HOST)*
HOST   := (text | "[" PIECE ("," PIECE)* "]")+
PIECE  := INT | INT "-" INT                    inclusive; leading zeros are kept
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, cast

from pydantic import AfterValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from rlinf_core.config.model import listed, read_each, refused
from rlinf_core.config.ranks import parse_ranks
from rlinf_core.config.tree import NotationError, Path, name_pieces
from rlinf_core.scalars import Text, expected, impossible_address, plain, problem, text_of

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


# Ray starts one worker process per core, and needs a port for each besides its own.
FEWEST_PORTS = 100
# Punctuation of Chinese text is refused with the ASCII signs that it is meant for.
_NAME_BREAKS = re.compile(r"[:,：，\s]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*", re.ASCII)
_SCALAR = {"type": ["string", "number", "boolean"]}
_TEXT_OR_LIST: dict[str, Any] = {"type": ["string", "number", "array"], "items": _SCALAR, "minItems": 1, "minLength": 1}


def _name(text: str) -> str:
    invalid = _NAME_BREAKS.search(text)
    if not text:
        raise problem("name-syntax", "a name is missing here")
    if not invalid and not text.isprintable():
        raise problem("name-syntax", "a name cannot contain an invisible character", help="type it again")
    if invalid:
        shown = {" ": "a blank"}.get(invalid[0], "white space" if invalid[0].isspace() else f"`{invalid[0]}`")
        message = f"a name cannot contain {shown}"
        help = "use letters, digits, `_`, `-` and `.`"
        raise problem("name-syntax", message, help=help, start=invalid.start(), end=invalid.end())
    return text


def split_names(text: str) -> tuple[str, ...]:
    """Return the names that `a, b` lists.

    Raises:
        PydanticCustomError: one of them is invalid; `start` and `end` give its position.
    """
    names: list[str] = []
    for name, start, end in name_pieces(text):
        try:
            names.append(_name(name))
        except PydanticCustomError as error:
            context = error.context or {}
            begin = start + int(context.get("start", 0))
            finish = start + int(context["end"]) if "end" in context else end
            help = context.get("help")
            raise problem("name-syntax", error.message(), help=help, start=begin, end=finish) from None
    return tuple(names)


def _labels(value: Any) -> tuple[str, ...]:
    what = "a label, several joined by commas, or a list of labels"
    if not isinstance(value, list):
        return split_names(text_of(value, what))
    items = cast("list[Any]", value)
    if not items:
        raise problem("name-syntax", "the list names no group", help="leave `node_group` out to mean every node")
    return tuple(read_each(listed(items), lambda _, item: _name(text_of(item, "a label"))))


def _component_key(value: Any) -> str:
    text = str(value)
    colon = text.find(":")
    if colon > 0:
        help = f"write a space after the `:`, as in `{text[:colon]}: {text[colon + 1 :].strip() or '...'}`"
        raise problem("name-syntax", "a name cannot contain `:`", help=help, start=colon, end=colon + 1)
    split_names(text)
    return text


def _variable(text: str) -> str:
    # The names that shells accept, plus names with dots, which exist.
    if not _VARIABLE.fullmatch(text):
        guess = re.sub(r"[^A-Za-z0-9_.]", "_", text)
        help = f"did you mean `{guess}`?" if _VARIABLE.fullmatch(guess) else "write it as in `NCCL_DEBUG`"
        raise problem("env-var-syntax", f"`{text}` is not a variable name", help=help)
    return text


def _variable_value(value: Any) -> str:
    if value is None:
        raise problem("env-var-syntax", "the variable has no value", help='write `""` for an empty one')
    if isinstance(value, list | dict):
        message = f"a variable's value is one scalar, found {'a list' if isinstance(value, list) else 'a mapping'}"
        raise problem("env-var-syntax", message, help="quote it when the text itself holds brackets or braces")
    text = text_of(value, "a value")
    if "\0" in text:
        raise problem("env-var-syntax", "a variable's value cannot contain a NUL character")
    return text


def _env_vars(value: Any) -> tuple[tuple[str, str], ...]:
    """Return `[{A: 1}, {B: 2}]` or `{A: 1, B: 2}` as pairs in the order written; a name may occur twice here."""
    if not isinstance(value, dict | list):
        raise expected("a list of variables such as `- NCCL_DEBUG: INFO`", value)
    whole: list[tuple[Path, Any]] = [((), value)]
    maps = whole if isinstance(value, dict) else read_each(listed(cast("list[Any]", value)), _one_variable)
    entries = [((*at, str(name)), item) for at, variables in maps for name, item in variables.items()]
    names = read_each((((*path, "[key]"), item) for path, item in entries), lambda path, _: _variable(str(path[-2])))
    return tuple(zip(names, read_each(entries, lambda _, item: _variable_value(item)), strict=True))


def _one_variable(at: Path, item: Any) -> tuple[Path, Any]:
    """Return the path of an item of a list of variables, and the item, which must be a mapping with one key."""
    if isinstance(item, dict):
        variables = cast("dict[Any, Any]", item)
        size = len(variables)
        if size == 1:
            return at, variables
        message = f"each item of `env_vars` holds one variable, this one holds {size}"
        raise problem("env-var-syntax", message, help="write a separate `- ` item for every variable")
    help = "write `- NAME: value`"
    if isinstance(item, str) and "=" in item:
        name, _, text = item.partition("=")
        help = f"write `- {name.strip()}: {text.strip()}`"
    raise problem("env-var-syntax", "expected one variable, `NAME: value`", help=help)


def _interpreter(text: str) -> str:
    if not text.startswith("/"):
        help = "write the whole path, as in `/opt/venv/bin/python3`"
        raise problem("interpreter-path", f"`{text}` is not an absolute path", help=help)
    if not text.isprintable():
        raise problem("interpreter-path", "a path cannot contain a line end or another invisible character")
    return text


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise problem("bad-value", "the text cannot contain a line end or another invisible character")
    return text


def _ports(value: Any) -> range:
    what = "a port range such as `20000-20999`"
    text = text_of(value, what)
    try:
        pieces = parse_ranks(text)
    except NotationError as error:
        raise problem("bad-value", error.message, help=f"write {what}", start=error.start, end=error.end) from None
    if pieces is None or len(pieces) != 1:
        raise problem("bad-value", f"`{text}` is not one port range", help=f"write {what}")
    ports = pieces[0]
    if ports.start < 1024 or ports.stop > 65536:
        raise problem("bad-value", f"`{text}` is outside of the ports 1024-65535", help=f"write {what}")
    if len(ports) < FEWEST_PORTS:
        message = f"`{text}` holds {len(ports)} port{'s' * (len(ports) != 1)}, Ray needs {FEWEST_PORTS}"
        raise problem("bad-value", message, help=f"every process of Ray listens on one; write {what}")
    return ports


def _hosts(value: Any) -> tuple[str, ...]:
    what = "hosts such as `trainer[00-07]`, or a list of them"
    if not isinstance(value, list):
        return _hosts_of(value, what)
    hosts = read_each(listed(cast("list[Any]", value)), lambda _, item: _hosts_of(item, "a host"))
    return tuple(itertools.chain(*hosts))


def _hosts_of(value: Any, what: str) -> tuple[str, ...]:
    try:
        return expand_hosts(text_of(value, what))
    except NotationError as error:
        raise refused("host-syntax", error) from None


def _address(text: str) -> str:
    try:
        if "@" in text:
            raise NotationError(
                "an address must not name a user", 0, text.index("@") + 1, "write a host name or an IP address"
            )
        text = without_brackets(text)
        check_destination(text)
    except NotationError as error:
        raise refused("host-syntax", error) from None
    return text


def _ssh_word(text: str) -> str:
    if not text or text.startswith("-") or any(char.isspace() or char == "\0" for char in text):
        help = "it cannot be empty, contain blanks or start with `-`"
        raise problem("bad-value", f"`{text}` is not a valid argument for ssh", help=help)
    return text


def _ssh_path(text: str) -> str:
    if not text.strip() or text.startswith("-") or any(char in text for char in "\0\n\r"):
        raise problem("bad-value", f"`{text}` is not a path", help="write it as in `~/.ssh/id_ed25519`")
    return text


def _ssh_options(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise expected("a mapping of ssh options such as `ProxyJump: gate`", value)
    entries = cast("dict[Any, Any]", value)
    texts = read_each((((str(key),), item) for key, item in entries.items()), _ssh_option)
    return dict(zip(map(str, entries), texts, strict=True))


def _ssh_option(path: Path, value: Any) -> str:
    name, text = path[-1], text_of(_yes_no(value), "a value")
    if not str(name).isalnum() or not str(name).isascii():
        raise problem("bad-value", f"`{name}` is not an ssh option", help="write it as in `man ssh_config`")
    if not text or any(char in text for char in "\0\n\r"):
        raise problem("bad-value", f"ssh option `{name}` needs a value of one line")
    return text


def _yes_no(value: Any) -> Any:
    """Return `true` and `false` in ssh's spelling, other values unchanged."""
    data = plain(value)
    return ("yes" if data else "no") if isinstance(data, bool) else value


Name = Annotated[Text, AfterValidator(_name), WithJsonSchema({**_SCALAR, "pattern": r"^[^:,\s]+$"})]
ComponentKey = Annotated[str, PlainValidator(_component_key), WithJsonSchema({"type": "string"})]
VariableName = Annotated[Text, AfterValidator(_variable)]
Line = Annotated[Text, AfterValidator(_one_line)]
InterpreterPath = Annotated[Text, AfterValidator(_interpreter), WithJsonSchema({"type": "string", "pattern": "^/"})]
Labels = Annotated[tuple[str, ...], PlainValidator(_labels), WithJsonSchema(_TEXT_OR_LIST)]
EnvVars = Annotated[
    tuple[tuple[str, str], ...],
    PlainValidator(_env_vars),
    WithJsonSchema(
        {
            "type": ["array", "object"],
            "items": {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": _SCALAR},
            "additionalProperties": _SCALAR,
        }
    ),
]
Ports = Annotated[
    range, PlainValidator(_ports), WithJsonSchema({"type": "string", "pattern": r"^\s*\d+\s*-\s*\d+\s*$"})
]
Hosts = Annotated[
    tuple[str, ...], PlainValidator(_hosts), WithJsonSchema({"type": [*_SCALAR["type"], "array"], "items": _SCALAR})
]
Address = Annotated[Text, AfterValidator(_address)]
SshWord = Annotated[Text, AfterValidator(_ssh_word)]
SshPath = Annotated[Text, AfterValidator(_ssh_path)]
SshOptions = Annotated[
    dict[str, str],
    PlainValidator(_ssh_options),
    WithJsonSchema({"type": "object", "additionalProperties": _SCALAR}),
]
