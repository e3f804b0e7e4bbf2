"""Merging of trees: mappings merge, lists and scalars replace. Keys that name several components are split before."""

from __future__ import annotations

from typing import Final

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.names import name_pieces
from rlinf_core.config.places import part
from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode

COMPONENT_PLACEMENT: Final[Path] = ("cluster", "component_placement")


def merge(base: Node, over: Node) -> Node:
    """Return `base` overridden by `over`.

    Keys keep the order of `base`, new ones follow. Spans are those of the last layer to set a value.
    """
    if not (isinstance(base, MappingNode) and isinstance(over, MappingNode)):
        return over
    entries = {entry.key.raw: entry for entry in base.entries}
    for entry in over.entries:
        earlier = entries.get(entry.key.raw)
        value = entry.value if earlier is None else merge(earlier.value, entry.value)
        entries[entry.key.raw] = Entry(entry.key, value)
    return MappingNode(over.span, tuple(entries.values()))


def split_components(node: Node, path: Path, diagnostics: Diagnostics) -> Node:
    """Return a value at `path` with one entry for each component of `cluster.component_placement`.

    `actor,env: 0-3` becomes two entries, each with its part of the key. A component that is placed twice is reported,
    and keeps its first place. A key with a missing name stays as it is, for the model to refuse.
    """
    if not isinstance(node, MappingNode) or path != COMPONENT_PLACEMENT[: len(path)]:
        return node
    if path != COMPONENT_PLACEMENT:
        inner = node.entry(key := str(COMPONENT_PLACEMENT[len(path)]))
        if inner is None:
            return node
        split = Entry(inner.key, split_components(inner.value, (*path, key), diagnostics))
        return MappingNode(node.span, tuple(split if entry is inner else entry for entry in node.entries))
    entries: dict[str, Entry] = {}
    for whole in node.entries:
        pieces = name_pieces(whole.key.raw)
        if not all(name for name, _, _ in pieces):
            entries[whole.key.raw] = whole
            continue
        for name, start, end in pieces:
            key = ScalarNode(part(whole.key, start, end) or whole.key.span, name, name, whole.key.plain)
            first = entries.setdefault(name, Entry(key, whole.value)).key
            if first is not key:
                message = f"component `{name}` is placed twice"
                help = "write one entry per component; an entry may list several parts, as in `0-3,8-11`"
                related = ((first.span, "first placed at"),)
                diagnostics.error("component-twice", message, key.span, (*path, name), help, related)
    return MappingNode(node.span, tuple(entries.values()))
