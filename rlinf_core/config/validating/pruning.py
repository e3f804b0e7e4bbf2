"""Removal of invalid nodes from a tree, so that the rest can be validated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel

from rlinf_core.config.tree import Composed, Entry, MappingNode, Node, Path, ScalarNode, SequenceNode

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
