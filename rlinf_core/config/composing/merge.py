"""Merging of trees: mappings merge, lists and scalars replace.

Keys of `cluster.component_placement` may name several components, `actor,env: 0-3`: they are split into one entry per
component if an upper layer groups them differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from typing import Final

from rlinf_core.config.names import name_pieces
from rlinf_core.config.places import part
from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode

COMPONENT_PLACEMENT: Final[Path] = ("cluster", "component_placement")


def merge(base: Node, over: Node, path: Path = ()) -> Node:
    """Return `base` overridden by `over`; `path` is their common path.

    Keys keep the order of `base`, new ones follow. Spans are those of the last layer to set a value.
    """
    if not (isinstance(base, MappingNode) and isinstance(over, MappingNode)):
        return over
    if path == COMPONENT_PLACEMENT:
        if _names_twice(base) or _names_twice(over):
            return _replace_shares(base, over)
        base, over = _align_components(base, over)
    entries = {entry.key.raw: entry for entry in base.entries}
    for entry in over.entries:
        name = entry.key.raw
        earlier = entries.get(name)
        value = entry.value if earlier is None else merge(earlier.value, entry.value, (*path, name))
        entries[name] = Entry(entry.key, value)
    return MappingNode(over.span, tuple(entries.values()))


def component_names(key: str) -> tuple[str, ...]:
    """Return the components that a key of `component_placement` names."""
    return tuple(piece.name for piece in name_pieces(key))


def find_components(placement: MappingNode, key: str) -> Entry | None:
    """Return the entry for exactly the components of `key`, in any order; for a single one also a shared entry."""
    wanted = sorted(component_names(key))
    for entry in placement.entries:
        names = component_names(entry.key.raw)
        if sorted(names) == wanted or (len(wanted) == 1 and wanted[0] in names):
            return entry
    return None


def split_components(placement: MappingNode, names: Set[str], keep: Collection[str] = ()) -> MappingNode:
    """Return `placement` with joined entries that contain one of `names` split up; a key in `keep` stays as written."""
    entries: list[Entry] = []
    for entry in placement.entries:
        joined = component_names(entry.key.raw)
        kept_whole = entry.key.raw == joined[0] or entry.key.raw in keep
        entries += [entry] if kept_whole or names.isdisjoint(joined) else _pieces(entry)
    return MappingNode(placement.span, _with_unique_keys(entries))


def _align_components(base: MappingNode, over: MappingNode) -> tuple[MappingNode, MappingNode]:
    """Return both mappings, rewritten to use the same key for the same component."""
    shared = set(_all_names(base)) & set(_all_names(over))
    if not shared:
        return base, over
    # A group joined in the same way in both stays joined, in the base's spelling.
    spelled = {tuple(sorted(component_names(entry.key.raw))): entry.key.raw for entry in base.entries}
    same: set[str] = set()
    entries: list[Entry] = []
    for entry in over.entries:
        spelling = spelled.get(tuple(sorted(component_names(entry.key.raw))))
        if spelling is not None:
            same.add(spelling)
            key = ScalarNode(entry.key.span, spelling, spelling, entry.key.plain)
            entry = entry if entry.key.raw == spelling else Entry(key, entry.value)
        entries.append(entry)
    over = MappingNode(over.span, tuple(entries))
    return split_components(base, shared, same), split_components(over, shared, same)


def _replace_shares(base: MappingNode, over: MappingNode) -> MappingNode:
    """Merge two placements, one of which names a component twice: an error, so the rest stays as written."""
    replaced = set(_all_names(over))
    touched = split_components(base, replaced)
    kept = [entry for entry in touched.entries if not replaced.issuperset(component_names(entry.key.raw))]
    return MappingNode(over.span, _with_unique_keys([*kept, *over.entries]))


def _all_names(placement: MappingNode) -> list[str]:
    return [name for entry in placement.entries for name in component_names(entry.key.raw)]


def _names_twice(placement: MappingNode) -> bool:
    return any(count > 1 for count in Counter(_all_names(placement)).values())


def _pieces(entry: Entry) -> list[Entry]:
    """Return one entry per component of a joined key, each with the span of its part of the key."""
    return [
        Entry(ScalarNode(part(entry.key, start, end) or entry.key.span, name, name), entry.value)
        for name, start, end in name_pieces(entry.key.raw)
    ]


def _with_unique_keys(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries with unique keys. A duplicate gets leading blanks, which are ignored in a name."""
    unique: dict[str, Entry] = {}
    for entry in entries:
        name = entry.key.raw
        while name in unique:
            name = f" {name}"
        if name != entry.key.raw:
            entry = Entry(ScalarNode(entry.key.span, name, name, plain=False), entry.value)
        unique[name] = entry
    return tuple(unique.values())
