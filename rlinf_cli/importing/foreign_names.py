"""Key names of related projects: aliases are renamed before validation, other keys get a specific message.

The tables are in `foreign_names.toml`; they are loaded for an unknown key, and by `rlinf import`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import is_
from pathlib import Path as FilePath
from typing import Any, Final, NamedTuple, cast

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.tree import (
    Entry,
    MappingNode,
    Node,
    Path,
    ScalarNode,
    SequenceNode,
    find,
    format_path,
    merge,
    to_data,
)
from rlinf_core.config.validating.foreign_names import Renamed
from rlinf_core.config.validating.model_fields import alternatives, model_of, sections, step, written_fields
from rlinf_core.scalars import YamlBool

TABLES: Final = FilePath(__file__).with_suffix(".toml")
OURS: Final = ("rlinf_core", "recipes")


class SectionNames(NamedTuple):
    """Key names of related projects for one section.

    Attributes:
        names: aliases of fields, each with its field.
        moved: keys that are in another section here, each with its path.
        unavailable: keys that have no counterpart here, each with what to do instead.
        accepted: such keys, each with the values by which it says what is so anyway.
        means: keys that are read as one of another section, each with its path.
    """

    names: Mapping[str, str]
    moved: Mapping[str, str]
    unavailable: Mapping[str, str]
    accepted: Mapping[str, Sequence[object]]
    means: Mapping[str, str]


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


@cache
def names_of(section: type[BaseModel]) -> SectionNames:
    """Return the names for a section: those of its class and of the sections that it extends."""
    merged: dict[str, dict[str, Any]] = {kind: {} for kind in SectionNames._fields}
    for base in reversed(section.__mro__):
        # A user-defined section may have the name of one of ours.
        if base.__module__.partition(".")[0] in OURS:
            table = tables().get(base.__name__, {})
            # A section that lacks what its base moves says so.
            for key in table.get("unavailable", {}):
                merged["moved"].pop(key, None)
            for kind, entries in table.items():
                merged[kind] |= entries
    fields = written_fields(section)
    names = {other: ours for other, ours in merged["names"].items() if ours in fields and other not in fields}
    moved = {other: path for other, path in merged["moved"].items() if other not in fields}
    own_names = {*fields, *names}
    left = [
        {key: value for key, value in merged[kind].items() if key not in own_names}
        for kind in ("unavailable", "accepted", "means")
    ]
    return SectionNames(names, moved, *left)


def with_our_names(model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics) -> Renamed:
    """Return `tree` with aliases renamed; see `ForeignNames`."""
    renamer = _Renamer(diagnostics)
    renamed = renamer.mapping(tree, [model], ())
    renamed, moved = renamer.with_moved(renamed)
    return Renamed(_without_accepted(renamed, [model], renamed), renamer.paths, moved)


def _names_among(annotations: Iterable[object]) -> Iterator[SectionNames]:
    return (names_of(section) for section in map(model_of, annotations) if section is not None)


def other_names_of(annotations: Iterable[object]) -> dict[str, str]:
    """Return the aliases of the fields of all sections among `annotations`."""
    return {other: ours for section in _names_among(annotations) for other, ours in section.names.items()}


def places_of_other_name(model: type[BaseModel], name: str) -> list[tuple[str, str]]:
    """Return the sections in which `name` is an alias of a field, with the field, shallowest path first."""
    return [
        (place, names_of(section).names[name]) for place, section in sections(model) if name in names_of(section).names
    ]


def meant_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys that are read as keys of another section than those among `annotations`, with their paths."""
    return {key: path for section in _names_among(annotations) for key, path in section.means.items()}


def moved_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys that belong to a section outside `annotations`, with their paths."""
    return {key: path for section in _names_among(annotations) for key, path in section.moved.items()}


def accepted_keys(annotations: Iterable[object]) -> dict[str, Sequence[object]]:
    """Return the keys that may be written though sections lack them, with the values that they may have; see
    `ForeignNames`.
    """
    accepted: dict[str, Sequence[object]] = {}
    for section in _names_among(annotations):
        accepted |= {**dict.fromkeys(section.means, ()), **section.accepted}
    return accepted


def unavailable_keys(annotations: Iterable[object]) -> dict[str, str]:
    """Return the keys that the sections among `annotations` lack, each with what to do instead."""
    return {key: instead for section in _names_among(annotations) for key, instead in section.unavailable.items()}


class _Renamer:
    def __init__(self, diagnostics: Diagnostics) -> None:
        self.diagnostics = diagnostics
        self.paths: dict[Path, str] = {}
        self.leaving: list[tuple[Path, Path, Entry]] = []

    def mapping(self, node: MappingNode, annotations: list[object], path: Path) -> MappingNode:
        names = other_names_of(annotations)
        means = meant_keys(annotations)
        entries: list[Entry] = []
        for entry in self._without_twins(node, names, path):
            if entry.key.raw in means:
                self.leaving.append(((*path, entry.key.raw), tuple(means[entry.key.raw].split(".")), entry))
                continue
            ours = names.get(entry.key.raw)
            if ours is not None:
                self.paths[(*path, ours)] = entry.key.raw
                entry = Entry(ScalarNode(entry.key.span, ours, ours, entry.key.plain), entry.value)
            key = entry.key.raw
            value = self._node(entry.value, _below(annotations, key), (*path, key))
            entries.append(entry if value is entry.value else Entry(entry.key, value))
        if len(entries) == len(node.entries) and all(map(is_, entries, node.entries)):
            return node
        return MappingNode(node.span, tuple(entries))

    def _without_twins(self, node: MappingNode, names: dict[str, str], path: Path) -> list[Entry]:
        """Return the entries of a mapping without duplicates by alias; the effective one is kept."""
        remaining = {entry.key.raw: entry for entry in node.entries}
        for other, ours in names.items():
            entry, twin = remaining.get(other), remaining.get(ours)
            if entry is None or twin is None:
                continue
            if _layer(twin) == _layer(entry):
                self._report_both(entry, twin, (*path, other))
            earlier, later = (twin, entry) if _layer(entry) > _layer(twin) else (entry, twin)
            del remaining[earlier.key.raw]
            remaining[later.key.raw] = Entry(later.key, merge(earlier.value, later.value))
        return list(remaining.values())

    def with_moved(self, tree: MappingNode) -> tuple[MappingNode, dict[Path, Path]]:
        """Return the tree with moved keys in their new sections, and the new path of each.

        Where our key is set as well in the same text, the values must agree; of two texts the later one wins.
        """
        moved: dict[Path, Path] = {}
        for path, target, entry in self.leaving:
            moved[path] = target
            if isinstance(entry.value, ScalarNode) and entry.value.value in (None, ""):
                continue
            parent = find(tree, target[:-1])
            twin = parent.entry(str(target[-1])) if isinstance(parent, MappingNode) else None
            if twin is None or _layer(entry) > _layer(twin):
                key = ScalarNode(entry.key.span, str(target[-1]), str(target[-1]), entry.key.plain)
                tree = _put(tree, target, Entry(key, entry.value))
            elif _layer(twin) == _layer(entry) and to_data(twin.value) != to_data(entry.value):
                name = format_path(target)
                self.diagnostics.error(
                    "duplicate-key",
                    f"`{format_path(path)}` is another name of `{name}`, which names something else",
                    entry.key.span,
                    path,
                    f"keep `{name}`",
                    ((twin.key.span, f"`{target[-1]}` is given at"),),
                )
        return tree, moved

    def _node(self, node: Node, annotations: list[object], path: Path) -> Node:
        if isinstance(node, MappingNode) and annotations:
            return self.mapping(node, annotations, path)
        if isinstance(node, SequenceNode) and annotations:
            below = _below(annotations, 0)
            items = tuple(self._node(item, below, (*path, index)) for index, item in enumerate(node.items))
            return node if items == node.items else SequenceNode(node.span, items)
        return node

    def _report_both(self, entry: Entry, twin: Entry, path: Path) -> None:
        name, ours = entry.key.raw, twin.key.raw
        self.diagnostics.error(
            "duplicate-key",
            f"`{name}` is an alias of `{ours}`, which is set too",
            entry.key.span,
            path,
            f"keep `{ours}`",
            ((twin.key.span, f"`{ours}` is set at"),),
        )


def _put(node: MappingNode, path: Path, entry: Entry) -> MappingNode:
    """Return a mapping with an entry at a path, in place of what stood there; sections above it are made."""
    name, below = str(path[0]), path[1:]
    old = node.entry(name)
    if below:
        inside = (
            old.value if old is not None and isinstance(old.value, MappingNode) else MappingNode(entry.key.span, ())
        )
        key = old.key if old is not None else ScalarNode(entry.key.span, name, name)
        entry = Entry(key, _put(inside, below, entry))
    entries = [entry if other is old else other for other in node.entries]
    return MappingNode(node.span, (*entries, entry) if old is None else tuple(entries))


def _without_accepted(node: MappingNode, annotations: list[object], tree: MappingNode) -> MappingNode:
    """Return a mapping without the keys that say what is so anyway."""
    accepted = accepted_keys(annotations)
    entries: list[Entry] = []
    for entry in node.entries:
        value = entry.value
        if entry.key.raw in accepted and is_accepted(value, accepted[entry.key.raw], tree):
            continue
        if isinstance(value, MappingNode):
            value = _without_accepted(value, _below(annotations, entry.key.raw), tree)
        entries.append(entry if value is entry.value else Entry(entry.key, value))
    if len(entries) == len(node.entries) and all(map(is_, entries, node.entries)):
        return node
    return MappingNode(node.span, tuple(entries))


def is_accepted(node: Node, values: Sequence[object], tree: MappingNode) -> bool:
    """Return whether a value says nothing: it is empty, or one of `values`, where `${...}` stands for a key's value."""
    if isinstance(node, ScalarNode) and node.value in (None, ""):
        return True
    return any(_says(to_data(node), value, tree) for value in values)


def _says(written: Any, expected: object, tree: MappingNode) -> bool:
    if isinstance(expected, dict) and isinstance(written, dict):
        known = cast("dict[str, object]", expected)
        values = cast("dict[str, Any]", written)
        return all(key in known and (value is None or _says(value, known[key], tree)) for key, value in values.items())
    if isinstance(expected, str) and expected.startswith("${"):
        other = find(tree, tuple(expected[2:-1].split(".")))
        return other is not None and written == to_data(other)
    if isinstance(expected, bool) != isinstance(written, YamlBool | bool):
        return False
    return bool(written == expected)


def _layer(entry: Entry) -> tuple[float, ...]:
    return entry.key.span.source.layer


def _below(annotations: list[object], segment: str | int) -> list[object]:
    return [
        member for annotation in annotations for below in step(annotation, segment) for member in alternatives(below)
    ]
