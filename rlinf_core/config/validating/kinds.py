"""Keys of sections of which a key chooses the kind (`rlinf_core.config.variants`), and of the sections within them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import NamedTuple

from pydantic import BaseModel

from rlinf_core.config.tree import Entry, MappingNode, Path, ScalarNode, find, to_data
from rlinf_core.config.validating.model_fields import (
    alternatives,
    choice_of,
    fields_at,
    kind_of,
    model_of,
    step,
    types_at,
    variants_of,
)
from rlinf_core.config.variants import Variant, chosen


def meant_kind(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return the name of the kind that a section probably means; None for a path that chooses none."""
    section, variants = find(tree, path[:-1]), variants_of(types_at(model, path[:-1]))
    if not isinstance(section, MappingNode) or len(variants) < 2 or path[-1] != variants[0].chosen_by:
        return None
    kind = kind_of(variants, section, find(tree, path[:-2]))
    return next(iter((*kind.names(), *kind.others)), None)


def key_of_others(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return a hint for a key that other kinds of its section, or of one around that, have; None for any other key."""
    for size in range(len(path) - 1, 0, -1):
        section, variants = find(tree, path[:size]), variants_of(types_at(model, path[:size]))
        if not isinstance(section, MappingNode) or len(variants) < 2:
            continue
        owners = [variant for variant in variants if path[-1] in fields_at(variant, path[size:-1])]
        names = [f"`{name}`" for owner in owners for name in owner.names()]
        if not names:
            continue
        key = variants[0].chosen_by
        above = find(tree, path[: size - 1])
        kind, choice = kind_of(variants, section, above), choice_of(variants, section, above)
        name = None if choice is None else to_data(choice.value)
        here = name if isinstance(name, str) and kind.takes(name) else (*kind.names(), *kind.others)[0]
        others = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        return f"it is a key of `{key}` {others}, not of `{here}`: remove it, or write `{key}: {names[0].strip('`')}`"
    return None


def without_keys_of_others(model: type[BaseModel], tree: MappingNode, moved: Collection[Path] = ()) -> MappingNode:
    """Return a file without the keys of other kinds that a base has set for one, or that say nothing: null, or their
    default, as a file that `rlinf` wrote has all keys.

    A file that extends another, or an argument, chooses another kind of a section by its key alone.

    Args:
        model: the model of the whole file.
        tree: the file.
        moved: the paths of keys that stood in a former section, which goes as a whole if the kind has none of them.
    """
    return _section(tree, [model], moved, None, None)


class _Choice(NamedTuple):
    """The kind of a section that a key chooses, for that section and those within it.

    Attributes:
        kind: the kind.
        variants: the kinds that there are.
        entry: what chooses it.
        otherwise: the kind without that.
        within: the way from that section to the one at hand.
    """

    kind: type[Variant]
    variants: Sequence[type[Variant]]
    entry: Entry | None
    otherwise: type[Variant]
    within: Path = ()

    @classmethod
    def of(cls, variants: Sequence[type[Variant]], node: MappingNode, above: MappingNode | None) -> _Choice:
        """Return that of a section."""
        entry = choice_of(variants, node, above)
        rest = MappingNode(node.span, tuple(other for other in node.entries if other is not entry))
        # Without its own choice a section follows another one.
        otherwise = variants[0] if len(rest.entries) == len(node.entries) else kind_of(variants, rest, above)
        return cls(kind_of(variants, node, above), variants, entry, otherwise)


def _section(
    node: MappingNode,
    types: list[object],
    moved: Collection[Path],
    above: MappingNode | None,
    choice: _Choice | None,
) -> MappingNode:
    variants = variants_of(types)
    if len(variants) > 1:
        choice = _Choice.of(variants, node, above)
        types = [annotation for annotation in types if annotation is choice.kind or annotation not in variants]
    before = node
    if choice is not None:
        node = _of_kind(node, choice, {path[0] for path in moved})
    entries: list[Entry] = []
    for entry in node.entries:
        value = entry.value
        if isinstance(value, MappingNode):
            below = [member for upper in types for part in step(upper, entry.key.raw) for member in alternatives(part)]
            within = [path[1:] for path in moved if path[0] == entry.key.raw and path[1:]]
            inner = None if choice is None else choice._replace(within=(*choice.within, entry.key.raw))
            value = _section(value, below, within, before, inner) if below else value
        entries.append(entry if value is entry.value else Entry(entry.key, value, entry.replaced))
    return node if all(map(is_, entries, node.entries)) else MappingNode(node.span, tuple(entries))


def _of_kind(node: MappingNode, choice: _Choice, moved: Collection[str | int]) -> MappingNode:
    if not any(model_of(type_) for type_ in types_at(choice.kind, choice.within)):
        return node  # any keys
    own = fields_at(choice.kind, choice.within)
    gone = set[str | int]() if own.keys() & set(moved) else set(moved)

    def is_dropped(entry: Entry) -> bool:
        if entry.key.raw in own:
            return False
        owners = [owner for owner in choice.variants if entry.key.raw in fields_at(owner, choice.within)]
        if entry.key.raw in gone or any(_says_nothing(entry, owner, choice.within) for owner in owners):
            return bool(owners)
        return any(owner in owners for owner in _kinds_before(choice, entry))

    entries = tuple(entry for entry in node.entries if not is_dropped(entry))
    return node if len(entries) == len(node.entries) else MappingNode(node.span, entries)


def _says_nothing(entry: Entry, kind: type[Variant], within: Path) -> bool:
    """Return whether an entry is null or the default of its kind."""
    if not isinstance(entry.value, ScalarNode):
        return False
    value, default = entry.value.value, fields_at(kind, within)[entry.key.raw].default
    return value is None or (value == default and isinstance(value, bool) == isinstance(default, bool))


def _kinds_before(choice: _Choice, entry: Entry) -> list[type[Variant]]:
    """Return the kinds that a section had from the layer of an entry on, up to the last choice."""
    kinds: list[type[Variant]] = []
    layer = entry.key.span.source.layer
    if choice.entry is None or choice.entry.key.span.source.layer <= layer:
        return kinds
    for earlier in choice.entry.replaced:
        kinds.append(chosen(choice.variants, {choice.variants[0].chosen_by: to_data(earlier.value)}))
        if earlier.key.span.source.layer <= layer:
            return kinds
    return [*kinds, choice.otherwise]
