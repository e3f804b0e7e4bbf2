"""Templates for schedulers: a job script for Slurm, a RayCluster or RayJob for KubeRay, and their options `--with`.

They are built from a validated file and checked options, with every value quoted for its context. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import quoted

_KEY: Final = re.compile(r"[a-z][a-z0-9-]*\Z")


class SchedulerOption(NamedTuple):
    """One option.

    Attributes:
        group: the node group to which it applies; None for all nodes.
        key: the key, such as `time` or `volume`.
        value: the value; None without `=`.
    """

    group: str | None
    key: str
    value: str | None

    def covers(self, node: NodeTarget) -> bool:
        return self.group is None or self.group in node.groups


def parse(words: Iterable[str], nodes: Sequence[NodeTarget]) -> list[SchedulerOption]:
    """Parse the options as written on the command line; their groups are those of `nodes`.

    Raises:
        ConfigError: a word is not `[GROUP:]KEY[=VALUE]`, or the file has no such group.
    """
    groups = sorted({group for node in nodes for group in node.groups})
    options: list[SchedulerOption] = []
    for word in words:
        name, equals, value = word.partition("=")
        group, colon, key = name.rpartition(":")
        if not _KEY.match(key):
            what = f"`--with {word}` is not KEY, KEY=VALUE or GROUP:KEY=VALUE"
            raise ConfigError(what, help="write it as in `--with time=24:00:00`")
        if colon and group not in groups:
            raise ConfigError(
                f"`--with {word}` names no group of the file", help=f"its groups are {quoted(groups) or 'none'}"
            )
        if not value.isprintable():
            raise ConfigError(f"the value of `--with {key}` has a line break or a control character")
        options.append(SchedulerOption(group if colon else None, key, value if equals else None))
    # The last of several values of a key counts, and that is the one of a node's group.
    return sorted(options, key=lambda option: option.group is not None)


def one_line(text: str) -> str:
    """Return a text on one line for a comment, without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
