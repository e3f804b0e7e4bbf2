"""Keys of sections of which a key chooses the kind (`rlinf_core.config.variants`)."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_

from pydantic import BaseModel

from rlinf_core.config.tree import Entry, MappingNode, Path, ScalarNode, find
from rlinf_core.config.validating.model_fields import (
    alternatives,
    step,
    types_at,
    variants_of,
    written_fields,
    written_values,
)
from rlinf_core.config.variants import Variant, chosen


def meant_kind(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return the name of the kind that a section probably means; None for a path that chooses none."""
    section, variants = find(tree, path[:-1]), variants_of(types_at(model, path[:-1]))
    if not isinstance(section, MappingNode) or len(variants) < 2 or path[-1] != variants[0].chosen_by:
        return None
    return next(iter(chosen(variants, written_values(section)).names()), None)


def key_of_others(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return a hint for a key that other kinds of its section have; None for any other key."""
    section, variants = find(tree, path[:-1]), variants_of(types_at(model, path[:-1]))
    if not isinstance(section, MappingNode) or len(variants) < 2:
        return None
    owners = [variant for variant in variants if path[-1] in written_fields(variant)]
    names = [f"`{name}`" for owner in owners for name in owner.names()]
    if not names:
        return None
    key = variants[0].chosen_by
    written = written_values(section)
    kind, name = chosen(variants, written), written.get(key)
    here = name if isinstance(name, str) and kind.takes(name) else kind.names()[0]
    others = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
    return f"it is a key of `{key}` {others}, not of `{here}`: remove it, or write `{key}: {names[0].strip('`')}`"


def without_keys_of_others(model: type[BaseModel], tree: MappingNode, moved: Collection[Path] = ()) -> MappingNode:
    """Return a file without the keys of other kinds that a base has set for one, or that say nothing: null, or their
    default, as a file that `rlinf` wrote has all keys.

    A file that extends another, or an argument, chooses another kind of a section by its key alone.

    Args:
        model: the model of the whole file.
        tree: the file.
        moved: the paths of keys that stood in a former section, which goes as a whole if the kind has none of them.
    """
    return _section(tree, [model], moved)


def _section(node: MappingNode, types: list[object], moved: Collection[Path]) -> MappingNode:
    variants = variants_of(types)
    if len(variants) > 1:
        kind = chosen(variants, written_values(node))
        node = _of_kind(node, kind, variants, {path[0] for path in moved})
        types = [annotation for annotation in types if annotation is kind or annotation not in variants]
    entries: list[Entry] = []
    for entry in node.entries:
        value = entry.value
        if isinstance(value, MappingNode):
            below = [member for above in types for part in step(above, entry.key.raw) for member in alternatives(part)]
            within = [path[1:] for path in moved if path[0] == entry.key.raw and path[1:]]
            value = _section(value, below, within) if below else value
        entries.append(entry if value is entry.value else Entry(entry.key, value))
    return node if all(map(is_, entries, node.entries)) else MappingNode(node.span, tuple(entries))


def _of_kind(
    node: MappingNode, kind: type[Variant], variants: list[type[Variant]], moved: Collection[str | int]
) -> MappingNode:
    own = written_fields(kind)
    gone = set[str | int]() if own.keys() & set(moved) else set(moved)
    choice = node.entry(kind.chosen_by)

    def is_dropped(entry: Entry) -> bool:
        if entry.key.raw in own:
            return False
        owners = [owner for owner in variants if entry.key.raw in written_fields(owner)]
        if entry.key.raw in gone or any(_says_nothing(entry, owner) for owner in owners):
            return bool(owners)
        return any(owner in owners for owner in _kinds_before(choice, entry, variants))

    entries = tuple(entry for entry in node.entries if not is_dropped(entry))
    return node if len(entries) == len(node.entries) else MappingNode(node.span, entries)


def _says_nothing(entry: Entry, kind: type[Variant]) -> bool:
    """Return whether an entry is null or the default of its kind."""
    if not isinstance(entry.value, ScalarNode):
        return False
    value, default = entry.value.value, written_fields(kind)[entry.key.raw].default
    return value is None or (value == default and isinstance(value, bool) == isinstance(default, bool))


def _kinds_before(choice: Entry | None, entry: Entry, variants: list[type[Variant]]) -> list[type[Variant]]:
    """Return the kinds that a section had from the layer of an entry on, up to the last choice."""
    kinds: list[type[Variant]] = []
    layer = entry.key.span.source.layer
    if choice is None or choice.key.span.source.layer <= layer:
        return kinds
    for earlier in choice.replaced:
        kinds.append(chosen(variants, written_values(MappingNode(earlier.key.span, (earlier,)))))
        if earlier.key.span.source.layer <= layer:
            return kinds
    return [*kinds, variants[0]]
