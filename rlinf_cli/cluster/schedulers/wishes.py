"""The options `--with [GROUP:]KEY[=VALUE]` of `rlinf up --print`: what a script or manifest asks for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_core.errors import ConfigError

_KEY: Final = re.compile(r"[a-z][a-z0-9-]*\Z")


class Wish(NamedTuple):
    """One option.

    Attributes:
        group: the node group whose nodes it is for; None for all nodes.
        key: such as `time` or `volume`.
        value: None without `=`.
    """

    group: str | None
    key: str
    value: str | None

    def covers(self, node: NodeTarget) -> bool:
        return self.group is None or self.group in node.groups


def parse(words: Iterable[str], nodes: Sequence[NodeTarget]) -> list[Wish]:
    """Return the options.

    Args:
        words: the words, as written on the command line.
        nodes: the nodes of the file; their groups can be named.

    Raises:
        ConfigError: a word is not `[GROUP:]KEY[=VALUE]`, or the file has no such group.
    """
    return [_parsed(word, sorted({group for node in nodes for group in node.groups})) for word in words]


def _parsed(word: str, groups: Sequence[str]) -> Wish:
    name, equals, value = word.partition("=")
    group, colon, key = name.rpartition(":")
    if not _KEY.match(key):
        raise ConfigError(
            f"`--with {word}` is not KEY, KEY=VALUE or GROUP:KEY=VALUE", help="write it as in `--with time=24:00:00`"
        )
    if colon and group not in groups:
        listed = ", ".join(f"`{known}`" for known in groups) or "none"
        raise ConfigError(f"`--with {word}` names no group of the file", help=f"its groups are {listed}")
    if not value.isprintable():
        raise ConfigError(f"the value of `--with {key}` has a line break or a control character")
    return Wish(group if colon else None, key, value if equals else None)


def unknown(wish: Wish, keys: Collection[str], template: str) -> ConfigError:
    """Return the error for a key that a template does not have."""
    close = get_close_matches(wish.key, keys, 1)
    listed = ", ".join(f"`{key}`" for key in keys)
    return ConfigError(
        f"`--print {template}` has no `{wish.key}`",
        help=f"did you mean `{close[0]}`?" if close else f"it has {listed}",
    )
