"""State of the tree builder for open mappings and lists, and the merging of `<<`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode


@dataclass(slots=True, eq=False)
class OpenNode:
    """A mapping or list that is still open. Offsets are the parser's."""

    is_mapping: bool
    start: int
    end: int
    bracketed: bool
    anchor: str | None
    items: list[Node] = field(default_factory=list["Node"])
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    key: ScalarNode | None = None
    key_end: int = 0
    awaits_value: bool = False
    # Mappings named by `<<`, and how many entries precede it.
    merged: list[MappingNode] = field(default_factory=list[MappingNode])
    merge_key: ScalarNode | None = None
    merge_index: int = 0
    size: int = 1
    height: int = 1


class Anchored(NamedTuple):
    """A finished node with an anchor: how many values it stands for, and how deep it is (0 for a scalar)."""

    node: Node
    size: int
    height: int


def with_merged(frame: OpenNode) -> tuple[Entry, ...]:
    """Return the entries of a mapping with those of `<<` in its place: own keys win, then the mapping named first."""
    own = tuple(frame.entries.values())
    if not frame.merged:
        return own
    taken = dict.fromkeys(frame.entries)
    merged: list[Entry] = []
    for source in frame.merged:
        for entry in source.entries:
            if entry.key.raw not in taken:
                taken[entry.key.raw] = None
                merged.append(entry)
    return (*own[: frame.merge_index], *merged, *own[frame.merge_index :])
