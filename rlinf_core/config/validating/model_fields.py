"""The fields that models allow at a path of a file, and the removal of what they refuse, to validate the rest."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Final, Generic, NamedTuple, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf_core.config.model import Variant, chosen
from rlinf_core.config.tree import (
    Composed,
    Entry,
    MappingNode,
    Node,
    Path,
    ScalarNode,
    SequenceNode,
    child,
    is_null,
    to_data,
)

M = TypeVar("M", bound=BaseModel)

# Edits by path: None removes the node, a scalar replaces it.
Cuts: TypeAlias = dict[Path, ScalarNode | None]
# The original indexes of the remaining items, by the path of their list in the whole tree.
Kept: TypeAlias = dict[Path, list[int]]


@dataclass(frozen=True)
class Validated(Generic[M]):
    """The result of a validation.

    Attributes:
        model: the model of the valid part, or None if there is too little.
        tree: the part of the tree that the model was built from, with equal indexes.
        pruned: the paths, in the whole tree, of wrong or missing values, which were removed or replaced by stand-ins.
        kept: the remaining items of its lists.
        composed: the whole tree, with every key at the path where it is read.
        misspelt: paths in the whole tree of keys that the file misspells, and that so have their defaults.
    """

    model: M | None
    tree: MappingNode
    pruned: frozenset[Path]
    kept: Kept
    composed: Composed
    misspelt: frozenset[Path] = frozenset()

    @property
    def whole(self) -> MappingNode:
        """The whole tree."""
        return self.composed.tree

    @cached_property
    def _above(self) -> frozenset[Path]:
        return prefixes(self.pruned)

    def original(self, path: Path) -> Path:
        """Map a path in `tree`, whose lists may have lost items, to the original tree."""
        return original(path, self.kept)

    def damaged(self, path: Path) -> bool:
        """Return whether the value at `path` in the whole tree, a part of it, or a parent was pruned."""
        if not self.pruned:
            return False
        return path in self._above or any(path[:size] in self.pruned for size in range(len(path)))


def prefixes(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the paths and all paths above them."""
    return frozenset(path[:size] for path in paths for size in range(len(path) + 1))


def original(path: Path, kept: Kept) -> Path:
    """Map a path in a pruned tree to the whole tree."""
    if not kept:
        return path
    full_path: Path = ()
    for segment in path:
        indexes = kept.get(full_path)
        if isinstance(segment, int) and indexes is not None and segment < len(indexes):
            segment = indexes[segment]
        full_path = (*full_path, segment)
    return full_path


def cut(tree: MappingNode, cuts: Cuts, kept: Kept) -> MappingNode:
    """Return `tree` with the edits applied, and update `kept`. A replacement for a missing key adds it."""
    # For each path above an edit, its children that are or contain edits, in the order of the edits.
    below: dict[Path, dict[Path, None]] = {}
    for path in cuts:
        for size in range(1, len(path) + 1):
            below.setdefault(path[: size - 1], {})[path[:size]] = None

    def edited(node: Node, path: Path, whole: Path) -> Node | None:
        """Return the edited node at `path` in `tree`, which is `whole` in the whole tree."""
        if path in cuts:
            return cuts[path]
        if isinstance(node, ScalarNode) or path not in below:
            return node
        if isinstance(node, MappingNode):
            return edited_mapping(node, path, whole)
        origins = kept.get(whole) or range(len(node.items))
        pairs = [(edited(item, (*path, i), (*whole, origins[i])), origins[i]) for i, item in enumerate(node.items)]
        kept[whole] = [origin for item, origin in pairs if item is not None]
        return SequenceNode(node.span, tuple(item for item, _ in pairs if item is not None))

    def edited_mapping(node: MappingNode, path: Path, whole: Path) -> MappingNode:
        entries: list[Entry] = []
        for entry in node.entries:
            name = entry.key.raw
            value = edited(entry.value, (*path, name), (*whole, name))
            if value is not None:
                entries.append(entry if value is entry.value else Entry(entry.key, value))
        for added in below.get(path, ()):
            replacement, name = cuts.get(added), str(added[-1])
            if replacement is not None and node.entry(name) is None:
                entries.append(Entry(ScalarNode(replacement.span, name, name), replacement))
        return MappingNode(node.span, tuple(entries))

    return edited_mapping(tree, (), ())


_LISTS = (list, tuple, set, frozenset)


def alternatives(annotation: object) -> Iterator[object]:
    """Yield the members of a union, each without `Annotated`; the annotation itself if it is not a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    elif (aliased := getattr(annotation, "__value__", None)) is not None:  # `type X = ...`
        yield from alternatives(aliased)
    else:
        yield annotation


def model_of(annotation: object) -> type[BaseModel] | None:
    """Return `annotation` if it is a model class."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def written_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their name in files."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


class ModelPart(NamedTuple):
    """A type directly inside another type.

    Attributes:
        key: the field's name in files, `ITEM` for list items, `NAME` for values under user-defined keys.
        annotation: the type.
        field, section: the field of that key and the model that has it; None for items and values.
    """

    key: str
    annotation: object
    field: FieldInfo | None = None
    section: type[BaseModel] | None = None


ITEM: Final = "[]"
NAME: Final = "NAME"


def parts(annotation: object) -> Iterator[ModelPart]:
    """Yield the types directly inside a type, or inside any member of a union."""
    for member in alternatives(annotation):
        section = model_of(member)
        if section is not None:
            for key, field in written_fields(section).items():
                yield ModelPart(key, field.annotation, field, section)
        elif (item := item_type(member)) is not None:
            yield ModelPart(ITEM, item)
        elif (value := value_type(member)) is not None:
            yield ModelPart(NAME, value)


def step(annotation: object, segment: str | int) -> Iterator[object]:
    """Yield the types allowed under one path segment of a value of this type."""
    for part in parts(annotation):
        if part.field is not None:
            matches = part.key == str(segment)
        else:
            matches = part.key == NAME or isinstance(segment, int)
        if matches:
            yield part.annotation


def item_type(annotation: object) -> object | None:
    """Return `X` of `list[X]` or `tuple[X, ...]`, else None."""
    if get_origin(annotation) not in _LISTS:
        return None
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return cast(object, arguments[0]) if len(arguments) == 1 else None


def value_type(annotation: object) -> object | None:
    """Return `V` of `dict[K, V]`, else None."""
    origin = get_origin(annotation)
    if not (isinstance(origin, type) and issubclass(origin, Mapping)):
        return None
    arguments = get_args(annotation)
    return cast(object, arguments[1]) if len(arguments) == 2 else None


def types_at(model: type[BaseModel], path: Path, tree: Node | None = None) -> list[object]:
    """Return all types allowed at `path`, unions flattened; empty when the models have no such path.

    Args:
        model: the model of the whole file.
        path: the path.
        tree: the file, which chooses the kinds of sections; None: all kinds.
    """
    types: list[object] = [model]
    for segment in path:
        types = [below for annotation in types for below in step(annotation, segment)]
        types = [member for annotation in types for member in alternatives(annotation)]
        above, tree = tree, None if tree is None else child(tree, segment)
        if isinstance(tree, MappingNode):
            types = _of_kind(types, tree, above)
    return types


def _of_kind(types: list[object], section: MappingNode, above: Node | None) -> list[object]:
    """Return types without the variants that a section does not choose."""
    variants = variants_of(types)
    if len(variants) < 2:
        return types
    wanted = kind_of(variants, section, above)
    return [annotation for annotation in types if annotation is wanted or annotation not in variants]


def variants_of(types: Iterable[object]) -> list[type[Variant]]:
    """Return the kinds of a section among types."""
    kinds = [section for section in map(model_of, types) if section is not None and issubclass(section, Variant)]
    return list(dict.fromkeys(kinds))


def choice_of(variants: Sequence[type[Variant]], section: MappingNode, above: Node | None) -> Entry | None:
    """Return the entry that chooses the kind of a section, its own or that of the section that it follows, or None.

    Args:
        variants: all kinds of the section.
        section: the section.
        above: the section that contains it.
    """
    key, follows = variants[0].chosen_by, variants[0].follows
    own = section.entry(key)
    if own is not None and not is_null(own.value):
        return own
    followed = child(above, follows) if above is not None and follows else None
    return followed.entry(key) if isinstance(followed, MappingNode) else own


def kind_of(variants: Sequence[type[Variant]], section: MappingNode, above: Node | None) -> type[Variant]:
    """Return the kind that a section chooses or probably means; see `choice_of` and `chosen`."""
    choice = choice_of(variants, section, above)
    written = cast("dict[str, object]", to_data(section))
    return chosen(variants, {**written, variants[0].chosen_by: None if choice is None else to_data(choice.value)})


def fields_at(model: type[BaseModel], path: Path, tree: Node | None = None) -> dict[str, FieldInfo]:
    """Return the fields of all models allowed at `path`; see `types_at`."""
    fields: dict[str, FieldInfo] = {}
    for annotation in types_at(model, path, tree):
        below = model_of(annotation)
        if below is not None:
            fields |= written_fields(below)
    return fields


def places_of(model: type[BaseModel], name: str) -> list[str]:
    """Return the paths of sections with a field `name`, as `cluster.node_groups[]`, shallowest first (top: empty)."""
    return [place for place, section in sections(model) if name in written_fields(section)]


@cache  # each unknown key is looked up in all sections
def sections(model: type[BaseModel]) -> tuple[tuple[str, type[BaseModel]], ...]:
    """Return all sections of a file with their paths, shallowest first; the path of `model` itself is empty."""
    return tuple(_sections(model))


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    # Each entry carries its enclosing models, which ends the search in a recursive model.
    level: list[tuple[str, object, frozenset[object]]] = [("", model, frozenset())]
    while level:
        below: list[tuple[str, object, frozenset[object]]] = []
        for place, annotation, around in level:
            models = dict.fromkeys(filter(None, map(model_of, alternatives(annotation))))
            yield from ((place, section) for section in models if section not in around)
            for part in parts(annotation):
                if part.section not in around:
                    within = around if part.section is None else around | {part.section}
                    below.append((join(place, part.key), part.annotation, within))
        level = below


def join(place: str, key: str) -> str:
    """Return the path of a child of `place`."""
    return f"{place}{key}" if key == ITEM else f"{place}.{key}" if place else key
