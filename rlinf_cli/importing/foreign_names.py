"""Key names of related projects, with their replacements for `rlinf validate` and their conversion by `rlinf import`.

The tables are in `foreign.toml`, which is loaded for an unknown key, and by `rlinf import`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import is_
from pathlib import Path as FilePath
from typing import Any, Final, cast

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.foreign_names import Renamed, SectionNames
from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode, SourceText, find, format_path, to_data
from rlinf_core.config.validating.model_fields import (
    alternatives,
    fields_at,
    model_of,
    sections,
    step,
    types_at,
    written_fields,
)
from rlinf_core.scalars import YamlBool, kind_of
from rlinf_core.suggest import quoted

TABLE: Final = FilePath(__file__).with_name("foreign.toml")
# The prefix of remedies for keys whose removal loses nothing.
_REMOVED: Final = "remove it: "
OURS: Final = ("rlinf_core", "recipes")
PROJECTS: Final = ("RLinf", "verl")


@cache
def foreign_table() -> dict[str, Any]:
    """Return the whole table."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the entries of every section, by the name of its class and then by kind (fields of `SectionNames`)."""
    table = foreign_table()
    by_section: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in SectionNames._fields:
        for section, entries in table.get(kind, {}).items():
            by_section.setdefault(section, {})[kind] = entries
    for row in table["reasons"]:
        answer = (_REMOVED if row.get("quiet") else "") + row["why"]
        for section in row.keys() - {"why", "quiet", *PROJECTS}:
            unavailable = by_section.setdefault(section, {}).setdefault("unavailable", {})
            unavailable |= dict.fromkeys(row[section], answer)
    return by_section


@cache
def names_of(section: type[BaseModel]) -> SectionNames:
    """Return the names for a section: those of its class and of the sections that it extends."""
    merged: dict[str, dict[str, Any]] = {kind: {} for kind in SectionNames._fields}
    for base in reversed(section.__mro__):
        # A user-defined section may have the name of one of ours.
        if base.__module__.partition(".")[0] in OURS:
            table = tables().get(base.__name__, {})
            # A key that is unavailable in a section overrides its base's move of that key.
            for key in table.get("unavailable", {}):
                merged["moved"].pop(key, None)
            for kind, entries in table.items():
                merged[kind] |= entries
    fields = written_fields(section)
    names = {other: ours for other, ours in merged["names"].items() if ours in fields and other not in fields}
    moved = {other: path for other, path in merged["moved"].items() if other not in fields}
    own_names = {*fields, *names}
    unavailable, same, accepted, means, former = (
        {key: value for key, value in merged[kind].items() if key not in own_names}
        for kind in ("unavailable", "same", "accepted", "means", "former")
    )
    accepted = {**dict.fromkeys((*means, *former), ()), **accepted}
    return SectionNames(names, moved, unavailable, same, accepted, means, former)


def with_our_names(model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics) -> Renamed:
    """Return `tree` with moved keys and without keys that state our fixed behavior; see `ForeignNames`."""
    mover = _Mover(model, tree)
    placed, moved = mover.with_moved(mover.mapping(tree, [model], ()), diagnostics)
    return Renamed(_without_accepted(placed, [model], placed, model), moved)


def names_at(annotations: Iterable[object]) -> SectionNames:
    """Return the names for all sections among `annotations`."""
    sections = [names_of(section) for section in map(model_of, annotations) if section is not None]
    kinds: list[dict[str, Any]] = [{} for _ in SectionNames._fields]
    for names in sections:
        for kind, entries in zip(kinds, names, strict=True):
            kind |= entries
    return SectionNames(*kinds)


def places_of_other_name(model: type[BaseModel], name: str) -> list[tuple[str, str]]:
    """Return the paths of sections in which `name` means a field, with the field, shallowest path first."""
    return [
        (place, names_of(section).names[name]) for place, section in sections(model) if name in names_of(section).names
    ]


class _Mover:
    """A collector of the keys of a tree that are read as keys of another section."""

    def __init__(self, model: type[BaseModel], tree: MappingNode) -> None:
        self.model, self.tree = model, tree
        self.leaving: list[tuple[Path, Path, Entry]] = []
        self.former: list[tuple[Path, Path, Entry]] = []
        self.adapted: dict[Path, Path] = {}
        self.notes: list[Diagnostic] = []

    def mapping(self, node: MappingNode, annotations: list[object], path: Path) -> MappingNode:
        """Return a mapping without these keys, at any depth, and collect the keys."""
        names = names_at(annotations)
        entries: list[Entry] = []
        if _is_model(annotations):
            node = self._with_lora(node, path)
        for entry in node.entries:
            key, value = entry.key.raw, entry.value
            former = self._former((*path, key)) if key in names.former else None
            if key in names.means or former is not None:
                target: Path = tuple((names.means.get(key) or former or "").split("."))
                if former is not None:
                    self.former.append(((*path, key), target, entry))
                    if self._is_section(target) and not (isinstance(value, MappingNode) and value.entries):
                        continue
                dropped = foreign_table()["dropped"].get(format_path((*path, key)), ())
                self.leaving += [leaf for leaf in _leaves((*path, key), target, entry) if leaf[0][-1] not in dropped]
                continue
            if isinstance(value, MappingNode) and (below := _below(annotations, key)):
                value = self.mapping(value, below, (*path, key))
            entries.append(entry if value is entry.value else Entry(entry.key, value))
        return _with_entries(node, entries)

    def _with_lora(self, node: MappingNode, path: Path) -> MappingNode:
        """Return a model's section with `lora` in the place of its former keys, a switch and a rank."""
        switch, rank, lora = map(node.entry, ("is_lora", "lora_rank", "lora"))
        values = [entry.value.value for entry in (switch, rank) if entry and isinstance(entry.value, ScalarNode)]
        if not values or any(isinstance(value, str) and value for value in values):
            return node
        is_on = switch is not None and isinstance(switch.value, ScalarNode) and switch.value.value is True
        if is_on and "lora" not in fields_at(self.model, path, self.tree):
            return node
        is_on = is_on and (lora is None or to_data(lora.value) is None)
        former = ("is_lora", "lora_rank", "lora") if is_on else ("is_lora", "lora_rank")
        entries = [entry for entry in node.entries if entry.key.raw not in former]
        if is_on and switch is not None:
            span, size = switch.key.span, values[1] if len(values) > 1 and isinstance(values[1], int) else 32

            def scalar(value: str | float) -> ScalarNode:
                return ScalarNode(span, str(value), value)

            sizes = (
                Entry(scalar("rank"), rank.value if rank else scalar(size)),
                Entry(scalar("alpha"), scalar(2 * size)),
            )
            entries.append(Entry(scalar("lora"), MappingNode(span, sizes)))
            before, now = format_path((*path, "is_lora")), format_path((*path, "lora"))
            help = f"write `lora: {{rank: {size}, alpha: {2 * size}}}`: the next release reads nothing else"
            message = f"`{before}` is now `{now}`"
            self.notes.append(Diagnostic("former-key", Severity.WARNING, message, span, (*path, "is_lora"), help))
            self.adapted |= {(*path, "is_lora"): (*path, "lora"), (*path, "lora_rank"): (*path, "lora", "rank")}
        elif rank is not None and values[-1] not in (None, "", 32):
            message, help = (
                "`lora_rank` has no effect without `is_lora`",
                "remove it, or write `lora: {rank: 16, alpha: 32}`",
            )
            self.notes.append(
                Diagnostic("former-key", Severity.WARNING, message, rank.key.span, (*path, "lora_rank"), help)
            )
        return MappingNode(node.span, tuple(entries))

    def with_moved(self, tree: MappingNode, diagnostics: Diagnostics) -> tuple[MappingNode, dict[Path, Path]]:
        """Return the tree with moved keys in their new sections, and the new path of each.

        If the same text also sets the target key, the values must agree; between two texts the later one wins.
        """
        moved = dict(self.adapted)
        for note in self.notes:
            diagnostics.add(note)
        together: dict[tuple[Path, Path, SourceText], list[tuple[Path, Path, Entry]]] = {}
        for path, target, entry in self.former:
            # Keys that keep their name and move to the same section are one finding.
            place = (path[:-1], target[:-1]) if path[-1] == target[-1] else (path, target)
            together.setdefault((*place, entry.key.span.source), []).append((path, target, entry))
        for (before, now, _), keys in together.items():
            if keys[1:]:
                names = quoted(str(path[-1]) for path, _, _ in keys)
                message = f"{names} of `{format_path(before)}` are now in `{format_path(now)}`"
                help = "write them there: the next release reads nothing else"
                span = keys[0][2].key.span
                diagnostics.add(Diagnostic("former-key", Severity.WARNING, message, span, keys[0][0], help))
            else:
                self._tell_former(*keys[0], diagnostics)
        for path, target, entry in self.leaving:
            # Keys of a removed section may have been renamed since, and may be keys of another kind of their section.
            if (now := self._former(target)) is not None:
                target = tuple(now.split("."))
            elif str(target[-1]) in names_at(types_at(self.model, target[:-1])).former:
                continue
            moved[path] = target
            if isinstance(entry.value, ScalarNode) and entry.value.value in (None, ""):
                field = fields_at(self.model, target[:-1], tree).get(str(target[-1]))
                # A null is a value of its own where the key takes one, as of a bound that is switched off.
                if entry.value.value == "" or field is None or type(None) not in alternatives(field.annotation):
                    continue
            if _has_other_value(tree, target[:-1]):
                continue  # which validation refuses
            parent = find(tree, target[:-1])
            twin = parent.entry(str(target[-1])) if isinstance(parent, MappingNode) else None
            if twin is None or _layer(entry) > _layer(twin):
                key = ScalarNode(entry.key.span, str(target[-1]), str(target[-1]), entry.key.plain)
                tree = _put(tree, target, Entry(key, entry.value))
            elif _layer(twin) == _layer(entry) and to_data(twin.value) != to_data(entry.value):
                name = format_path(target)
                diagnostics.error(
                    "duplicate-key",
                    f"`{format_path(path)}` is another name of `{name}`, which names something else",
                    entry.key.span,
                    path,
                    f"keep `{name}`",
                    ((twin.key.span, f"`{target[-1]}` is given at"),),
                )
        return tree, moved

    def _tell_former(self, path: Path, target: Path, entry: Entry, diagnostics: Diagnostics) -> None:
        before, now, value = f"`{format_path(path)}`", f"`{format_path(target)}`", to_data(entry.value)
        section = self._is_section(target)
        if section and value and not isinstance(value, dict):
            message = f"`{path[-1]}`: expected a mapping, found {kind_of(value)}"
            diagnostics.error("wrong-type", message, entry.value.span, path, f"its keys are now in {now}")
            return
        message = f"the keys of {before} are now in {now}" if section else f"{before} is now {now}"
        do = "remove it" if section and not value else f"write {'them' if section else 'it'} there"
        help = f"{do}: the next release reads nothing else"
        diagnostics.add(Diagnostic("former-key", Severity.WARNING, message, entry.key.span, path, help))

    def _former(self, path: Path) -> str | None:
        """Return the present path of a former key of the kind that its section chooses; None for other keys."""
        return names_at(types_at(self.model, path[:-1], self.tree)).former.get(str(path[-1]))

    def _is_section(self, path: Path) -> bool:
        return any(map(model_of, types_at(self.model, path)))


def _is_model(annotations: Iterable[object]) -> bool:
    """Return whether a section describes a model, by the name of its class, as the table names sections."""
    sections = [section for section in map(model_of, annotations) if section is not None]
    return any(base.__name__ == "BareModelConfig" for section in sections for base in section.__mro__)


def _leaves(path: Path, target: Path, entry: Entry) -> Iterator[tuple[Path, Path, Entry]]:
    """Yield the values in an entry, each with its present path and its new path."""
    if not isinstance(entry.value, MappingNode) or not entry.value.entries:
        yield path, target, entry
        return
    for below in entry.value.entries:
        yield from _leaves((*path, below.key.raw), (*target, below.key.raw), below)


def _has_other_value(tree: MappingNode, path: Path) -> bool:
    """Return whether a section at a path, or above it, is neither a mapping nor null."""
    above = [find(tree, path[:size]) for size in range(1, len(path) + 1)]
    return any(not isinstance(node, MappingNode) and to_data(node) is not None for node in above if node is not None)


def _put(node: MappingNode, path: Path, entry: Entry) -> MappingNode:
    """Return a mapping with the entry at a path set or replaced; missing sections above it are made."""
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


def _without_accepted(
    node: MappingNode, annotations: list[object], tree: MappingNode, model: type[BaseModel]
) -> MappingNode:
    """Return a mapping without the keys that state our fixed behavior."""
    accepted = names_at(annotations).accepted
    entries: list[Entry] = []
    for entry in node.entries:
        value = entry.value
        if entry.key.raw in accepted and is_accepted(value, accepted[entry.key.raw], tree, model):
            continue
        if isinstance(value, MappingNode):
            value = _without_accepted(value, _below(annotations, entry.key.raw), tree, model)
        entries.append(entry if value is entry.value else Entry(entry.key, value))
    return _with_entries(node, entries)


def _with_entries(node: MappingNode, entries: Sequence[Entry]) -> MappingNode:
    """Return a mapping with other entries; the node itself if they are its own."""
    same = len(entries) == len(node.entries) and all(map(is_, entries, node.entries))
    return node if same else MappingNode(node.span, tuple(entries))


def is_accepted(node: Node, values: Sequence[object], tree: MappingNode, model: type[BaseModel]) -> bool:
    """Return whether a value may be ignored: it is empty or one of `values`. There, `${...}` means a key's value in
    `tree`, or if the key is absent its default in `model`."""
    if isinstance(node, ScalarNode) and node.value in (None, ""):
        return True
    return any(_says(to_data(node), value, tree, model) for value in values)


def _says(written: Any, expected: object, tree: MappingNode, model: type[BaseModel]) -> bool:
    if isinstance(expected, dict) and isinstance(written, dict):
        known = cast("dict[str, object]", expected)
        values = cast("dict[str, Any]", written)
        return all(
            key in known and (value is None or _says(value, known[key], tree, model)) for key, value in values.items()
        )
    if isinstance(expected, str) and expected.startswith("${"):
        *above, name = expected[2:-1].split(".")
        other = find(tree, (*above, name))
        field = fields_at(model, tuple(above)).get(name)
        default = None if field is None else field.default
        return bool(written == (default if other is None else to_data(other)))
    if isinstance(expected, bool) != isinstance(written, YamlBool | bool):
        return False
    return bool(written == expected)


def _layer(entry: Entry) -> tuple[float, ...]:
    return entry.key.span.source.layer


def _below(annotations: list[object], segment: str | int) -> list[object]:
    return [
        member for annotation in annotations for below in step(annotation, segment) for member in alternatives(below)
    ]
