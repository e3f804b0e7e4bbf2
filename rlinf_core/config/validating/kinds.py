"""The keys of sections whose kind a key chooses (`rlinf_core.config.model`), and of the sections within them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import is_
from typing import Final, NamedTuple

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.model import NoOptions, Variant, chosen
from rlinf_core.config.shipped import is_shipped
from rlinf_core.config.tree import Entry, MappingNode, Path, ScalarNode, find, format_path, is_null, to_data
from rlinf_core.config.validating.model_fields import (
    alternatives,
    choice_of,
    cut,
    fields_at,
    kind_of,
    model_of,
    step,
    types_at,
    value_type,
    variants_of,
)

_LISTED: Final = 12


def meant_kind(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return the name of the kind that a section probably means; None for a path that chooses none."""
    section, variants = find(tree, path[:-1]), variants_of(types_at(model, path[:-1]))
    if not isinstance(section, MappingNode) or len(variants) < 2 or path[-1] != variants[0].chosen_by:
        return None
    kind = kind_of(variants, section, find(tree, path[:-2]))
    return next(iter((*kind.names(), *kind.others)), None)


class _Other(NamedTuple):
    """The relation of a key to an enclosing section with several kinds.

    Attributes:
        kind: the chosen kind of that section.
        called: the kind's name in the file.
        owners: the kinds that have the key.
        within: the path from that section to the key's section.
    """

    kind: type[Variant]
    called: str
    owners: Sequence[type[Variant]]
    within: Path


def _others(model: type[BaseModel], tree: MappingNode, path: Path) -> Iterator[_Other]:
    """Yield the enclosing sections of a key that have several kinds, innermost first."""
    for size in range(len(path) - 1, 0, -1):
        section, variants = find(tree, path[:size]), variants_of(types_at(model, path[:size]))
        if not isinstance(section, MappingNode) or len(variants) < 2:
            continue
        above, within = find(tree, path[: size - 1]), path[size:-1]
        kind, name = kind_of(variants, section, above), _name(choice_of(variants, section, above))
        called = name if name is not None and kind.takes(name) else (*kind.names(), *kind.others)[0]
        owners = [variant for variant in variants if path[-1] in fields_at(variant, within)]
        yield _Other(kind, called, owners, within)


def key_of_others(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return a hint for a key that only other kinds of an enclosing section have, or for an option of a kind without
    options; None for other keys.

    The hint proposes no other kind, since that may be another robot.
    """
    for kind, called, owners, within in _others(model, tree, path):
        key, name = kind.chosen_by, str(path[-1])
        reason = f": {kind.lacking[name]}; remove it" if name in kind.lacking and not within else ": remove it"
        if owners:
            names = [f"`{known}`" for owner in owners for known in (*owner.names(), *owner.others)]
            listed = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
            return f"it is a key of `{key}` {listed}, not of `{called}`{reason}"
        if within and any(
            issubclass(below, NoOptions) for below in filter(None, map(model_of, types_at(kind, within)))
        ):
            return f"`{called}` has no `{within[-1]}`{reason}"
    return None


def without_keys_of_others(
    model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics, moved: Collection[Path] = ()
) -> MappingNode:
    """Return a file without keys of other kinds that a base set for its own kind, or that are null or the default.

    So a file that extends another, or an argument, chooses another kind of a section by its key alone. Files that
    `rlinf` wrote have all keys, which then hold their defaults.

    Args:
        model: the model of the whole file.
        tree: the file.
        diagnostics: receives a note for each section that loses keys that a person wrote.
        moved: the paths of keys from a removed section; all are dropped if the kind has none of them.
    """
    dropped: list[_Dropped] = []
    kept = _section(tree, [model], moved, None, None, (), dropped)
    for choice in dict.fromkeys(drop.choice for drop in dropped):
        diagnostics.add(_note([drop for drop in dropped if drop.choice == choice]))
    return kept


class _Dropped(NamedTuple):
    """A key that a person wrote for another kind of its section.

    Attributes:
        path: the path of the key.
        entry: the entry.
        before: the name of the kind that it was written for, if it has one.
        choice: the section's path and the entry that chooses its kind.
    """

    path: Path
    entry: Entry
    before: str | None
    choice: tuple[Path, Entry]


def _note(dropped: Sequence[_Dropped]) -> Diagnostic:
    """Return the note on the keys dropped from one section."""
    section, chooses = dropped[0].choice
    kind = next((drop.before for drop in dropped if drop.before is not None), None)
    keys = [f"`{format_path(drop.path[len(section) :])}`" for drop in dropped]
    others = f" and {len(keys) - _LISTED} others" if len(keys) > _LISTED else ""
    listed = f"{', '.join(keys[:_LISTED])}{others}"
    owner = "another kind" if kind is None else f"`{kind}`"
    span = chooses.key.span
    now = f"`{chooses.key.raw}: {to_data(chooses.value)}`"
    return Diagnostic(
        "no-effect",
        Severity.NOTE,
        f"of `{format_path(section)}`, {listed} of {owner} {'are' if keys[1:] else 'is'} left out: {now} is chosen in"
        f" {span.source.name}:{span.begin.line}",
        dropped[0].entry.key.span,
        dropped[0].path,
        related=((span, "chosen here"),),
    )


def without_idle_keys(model: type[BaseModel], tree: MappingNode) -> MappingNode:
    """Return the configuration of an earlier run without keys that only other kinds of their section have.

    An earlier rlinf wrote the keys of all kinds, and ignored those of the kinds not chosen.
    """
    idle = [
        path
        for path in _paths(tree)
        if types_at(model, path[:-1], tree) and not types_at(model, path, tree) and is_of_others(model, tree, path)
    ]
    return cut(tree, dict.fromkeys(idle), {})


def without_defaults(model: type[BaseModel], tree: MappingNode) -> MappingNode:
    """Return a configuration without the numbers, texts and nulls that their keys have by default."""
    idle: list[Path] = []
    for path in _paths(tree):
        node, field = find(tree, path), fields_at(model, path[:-1], tree).get(str(path[-1]))
        if isinstance(node, ScalarNode) and field is not None:
            default: object = field.get_default(call_default_factory=True)
            if default == to_data(node) and not isinstance(default, BaseModel):
                idle.append(path)
    return cut(tree, dict.fromkeys(idle), {})


def is_of_others(model: type[BaseModel], tree: MappingNode, path: Path) -> bool:
    """Return whether other kinds of an enclosing section have a key."""
    return any(other.owners for other in _others(model, tree, path))


def _paths(node: MappingNode, path: Path = ()) -> Iterator[Path]:
    for entry in node.entries:
        yield (*path, entry.key.raw)
        if isinstance(entry.value, MappingNode):
            yield from _paths(entry.value, (*path, entry.key.raw))


class _Choice(NamedTuple):
    """The chosen kind of a section, which also applies to the sections within it.

    Attributes:
        kind: the kind.
        name: its name in the file, or None.
        variants: all kinds of the section.
        entry: the entry that chooses the kind, or None.
        otherwise: the kind without that entry, and its name.
        section: the path of the section.
    """

    kind: type[Variant]
    name: str | None
    variants: Sequence[type[Variant]]
    entry: Entry | None
    otherwise: tuple[type[Variant], str | None]
    section: Path

    @classmethod
    def of(
        cls, variants: Sequence[type[Variant]], node: MappingNode, above: MappingNode | None, section: Path
    ) -> _Choice:
        """Return the choice of the section `node` within `above`."""
        entry = choice_of(variants, node, above)
        rest = MappingNode(node.span, tuple(other for other in node.entries if other is not entry))
        # Without its own entry the section may follow another section's choice.
        follows = len(rest.entries) < len(node.entries)
        first = next(iter(variants[0].names()), None)
        otherwise = (
            (kind_of(variants, rest, above), _name(choice_of(variants, rest, above)) or first)
            if follows
            else (variants[0], first)
        )
        return cls(kind_of(variants, node, above), _name(entry) or first, variants, entry, otherwise, section)


def _name(entry: Entry | None) -> str | None:
    """Return the name of a kind that an entry chooses; None for none."""
    name = None if entry is None else to_data(entry.value)
    return str(name) if isinstance(name, str) and name else None


def _section(
    node: MappingNode,
    types: list[object],
    moved: Collection[Path],
    above: MappingNode | None,
    choice: _Choice | None,
    path: Path,
    dropped: list[_Dropped],
) -> MappingNode:
    variants = variants_of(types)
    if len(variants) > 1:
        choice = _Choice.of(variants, node, above, path)
        types = [annotation for annotation in types if annotation is choice.kind or annotation not in variants]
    before = node
    if choice is not None:
        node = _of_kind(node, choice, path, {step[0] for step in moved}, dropped)
    entries: list[Entry] = []
    for entry in node.entries:
        value = entry.value
        if isinstance(value, MappingNode):
            below = [member for upper in types for part in step(upper, entry.key.raw) for member in alternatives(part)]
            within = [path[1:] for path in moved if path[0] == entry.key.raw and path[1:]]
            here = (*path, entry.key.raw)
            value = _section(value, below, within, before, choice, here, dropped) if below else value
        entries.append(entry if value is entry.value else Entry(entry.key, value, entry.replaced))
    return node if all(map(is_, entries, node.entries)) else MappingNode(node.span, tuple(entries))


def _of_kind(
    node: MappingNode, choice: _Choice, path: Path, moved: Collection[str | int], dropped: list[_Dropped]
) -> MappingNode:
    within = path[len(choice.section) :]
    own = fields_at(choice.kind, within)
    gone = set[str | int]() if own.keys() & set(moved) else set(moved)
    takes_any = _takes_any(choice.kind, within)
    if not own and not takes_any and not any(map(model_of, types_at(choice.kind, within))):
        return node  # within a value

    def is_dropped(entry: Entry) -> bool:
        name, before = entry.key.raw, _kinds_before(choice, entry)
        if name in own or takes_any:
            if not takes_any and (within or name not in choice.kind.of_kind):
                return False
            others = [kind for kind in before if kind[1] != choice.name and _has(kind[0], within, name)]
            other = next(iter(others), None)
            if other is None or choice.kind.keeps(name, to_data(entry.value), str(other[1]), str(choice.name)):
                return False
        else:
            owners = [owner for owner in choice.variants if name in fields_at(owner, within)]
            if name in gone or any(_says_nothing(entry, owner, within) for owner in owners):
                return bool(owners)
            # Options beside the named ones belong to the kind that takes them, unless this one does, too.
            free = not _takes_others(choice.kind, within)
            having = (
                kind for kind in before if _has(kind[0], within, name) or (free and _takes_others(kind[0], within))
            )
            other = next(having, None)
            if other is None:
                return False
        # Shipped configurations set keys for their own kind; a note on those would not help.
        if choice.entry is not None and not is_shipped(entry.key.span.source.name) and not is_null(entry.value):
            dropped.append(_Dropped((*path, name), entry, other[1], (choice.section, choice.entry)))
        return True

    entries = tuple(entry for entry in node.entries if not is_dropped(entry))
    return node if len(entries) == len(node.entries) else MappingNode(node.span, entries)


def _takes_any(kind: type[Variant], within: Path) -> bool:
    """Return whether a section within a kind accepts any keys, such as the options of a custom class."""
    return any(value_type(annotation) is not None for annotation in types_at(kind, within))


def _takes_others(kind: type[Variant], within: Path) -> bool:
    """Return whether a section within a kind accepts keys beside its own, such as arguments of a package."""
    sections = filter(None, map(model_of, types_at(kind, within)))
    return any(section.model_config.get("extra") == "allow" for section in sections)


def _has(kind: type[Variant], within: Path, name: str) -> bool:
    return name in fields_at(kind, within) or _takes_any(kind, within)


def _says_nothing(entry: Entry, kind: type[Variant], within: Path) -> bool:
    """Return whether an entry is null, an empty mapping or the default of a kind."""
    if isinstance(entry.value, MappingNode):
        return not entry.value.entries
    if not isinstance(entry.value, ScalarNode):
        return False
    value, default = entry.value.value, fields_at(kind, within)[entry.key.raw].default
    return value is None or (value == default and isinstance(value, bool) == isinstance(default, bool))


def _kinds_before(choice: _Choice, entry: Entry) -> list[tuple[type[Variant], str | None]]:
    """Return the kinds, with names, that were in effect from the layer of an entry until the final choice."""
    kinds: list[tuple[type[Variant], str | None]] = []
    layer = entry.key.span.source.layer
    if choice.entry is None or choice.entry.key.span.source.layer <= layer:
        return kinds
    for earlier in choice.entry.replaced:
        written = {choice.variants[0].chosen_by: to_data(earlier.value)}
        kinds.append((chosen(choice.variants, written), _name(earlier) or choice.otherwise[1]))
        if earlier.key.span.source.layer <= layer:
            return kinds
    return [*kinds, choice.otherwise]
