"""Removal of invalid nodes from a tree, so that the rest can be validated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel

from rlinf_core.config.tree import Entry, MappingNode, Node, Path, ScalarNode, SequenceNode

M = TypeVar("M", bound=BaseModel)

# Edits by path: None removes the node, a scalar replaces it.
Cuts: TypeAlias = dict[Path, ScalarNode | None]
# By the path of a list in the whole tree: the original indexes of the remaining items.
Kept: TypeAlias = dict[Path, list[int]]


@dataclass(frozen=True)
class Validated(Generic[M]):
    """The result of a validation.

    Attributes:
        model: the model of the valid part, or None if there is too little.
        tree: the part of the tree that the model was built from, with equal indexes.
        pruned: the paths, in the whole tree, of wrong or missing values: removed, or replaced by a stand-in.
        kept: the remaining items of its lists.
        whole: the whole tree, with every key where it is read.
        secret, referred: paths in it whose values must not be shown, and paths that references read.
        misspelt: paths in it of known keys that are misspelt in the file, and so have their defaults.
    """

    model: M | None
    tree: MappingNode
    pruned: frozenset[Path]
    kept: Kept
    whole: MappingNode
    secret: frozenset[Path] = frozenset()
    referred: frozenset[Path] = frozenset()
    misspelt: frozenset[Path] = frozenset()

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
    """Return the paths themselves and everything above them."""
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


@dataclass(slots=True)
class _Plan:
    """The cuts at and below one node."""

    here: bool = False
    replacement: ScalarNode | None = None
    below: dict[str | int, _Plan] = field(default_factory=dict["str | int", "_Plan"])


def cut(tree: MappingNode, cuts: Cuts, kept: Kept) -> MappingNode:
    """Return `tree` with the edits applied, and update `kept`. A replacement for a missing key adds it."""
    root = _Plan()
    for path, replacement in cuts.items():
        plan = root
        for segment in path:
            plan = plan.below.setdefault(segment, _Plan())
        plan.here, plan.replacement = True, replacement
    return _cut_mapping(tree, root, (), kept)


def _cut(node: Node, plan: _Plan, at: Path, kept: Kept) -> Node | None:
    if plan.here:
        return plan.replacement
    if isinstance(node, MappingNode):
        return _cut_mapping(node, plan, at, kept)
    return _cut_sequence(node, plan, at, kept) if isinstance(node, SequenceNode) else node


def _cut_mapping(node: MappingNode, plan: _Plan, at: Path, kept: Kept) -> MappingNode:
    entries: list[Entry] = []
    for entry in node.entries:
        inner = plan.below.get(entry.key.raw)
        value = entry.value if inner is None else _cut(entry.value, inner, (*at, entry.key.raw), kept)
        if value is entry.value:
            entries.append(entry)
        elif value is not None:
            entries.append(Entry(entry.key, value))
    for key, inner in plan.below.items():
        if inner.replacement is not None and node.entry(str(key)) is None:
            entries.append(Entry(ScalarNode(inner.replacement.span, str(key), str(key)), inner.replacement))
    return MappingNode(node.span, tuple(entries))


def _cut_sequence(node: SequenceNode, plan: _Plan, at: Path, kept: Kept) -> SequenceNode:
    origins = kept.get(at) or list(range(len(node.items)))
    items: list[Node] = []
    remaining: list[int] = []
    for index, item in enumerate(node.items):
        inner = plan.below.get(index)
        value = item if inner is None else _cut(item, inner, (*at, origins[index]), kept)
        if value is not None:
            items.append(value)
            remaining.append(origins[index])
    kept[at] = remaining
    return SequenceNode(node.span, tuple(items))
