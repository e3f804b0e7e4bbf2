"""The conversion of trees to plain data for Hydra, and of composed data back to trees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, cast

from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode, SequenceNode, resolve_plain

_NOWHERE: Final = Span(SourceText("", ""), 0, 0)
# A plain reference, which Hydra may have to follow if a file sets keys below it. Other references stay text for Hydra.
_REFERENCE: Final = re.compile(r"\$\{\s*(?:oc\.select:\s*)?\.*[\w.\[\]]+\s*(?:,\s*(?:null|\{\})\s*)?\}")
# Texts with references that YAML accepts without quotes.
_UNQUOTED: Final = re.compile(r"[\w$./][\w.:,/\[\]${}-]*\$\{[\w.:,/\[\]${}-]*[\w}]|\$\{[\w.:,/\[\]${}-]*[\w}]")
# Replaces the `$` of references that Hydra must not resolve.
_MARK: Final = "\ue000"


def plain(node: Node) -> Any:
    """Return a tree as plain data; a quoted scalar is its text."""
    if isinstance(node, MappingNode):
        return {entry.key.raw: plain(entry.value) for entry in node.entries}
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return node.value if node.plain else node.raw


def for_hydra(node: MappingNode) -> dict[str, Any]:
    """Return a tree as plain data in which Hydra sees only plain references."""
    return changed(plain(node), lambda text: text if _REFERENCE.fullmatch(text) else marked(text))


def marked(text: str) -> str:
    """Return a text whose references Hydra and OmegaConf do not recognize."""
    return text.replace("${", f"{_MARK}{{")


def from_hydra(data: Any) -> Any:
    """Return composed data with the original references."""
    return changed(data, lambda text: text.replace(f"{_MARK}{{", "${"))


def changed(data: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with its texts changed."""
    if isinstance(data, dict):
        return {str(key): changed(value, change) for key, value in cast("dict[Any, Any]", data).items()}
    if isinstance(data, list):
        return [changed(item, change) for item in cast("list[Any]", data)]
    return change(data) if isinstance(data, str) else data


def tree_of(data: Any, written: Node | None) -> Node:
    """Return plain data as a tree, reusing equal nodes at the same path in `written`."""
    if isinstance(data, dict):
        entries: list[Entry] = []
        for key, value in cast("dict[str, Any]", data).items():
            entry = written.entry(key) if isinstance(written, MappingNode) else None
            named = entry.key if entry is not None else ScalarNode(_NOWHERE, key, key)
            entries.append(Entry(named, tree_of(value, entry.value if entry is not None else None)))
        return MappingNode(written.span if isinstance(written, MappingNode) else _NOWHERE, tuple(entries))
    if isinstance(data, list):
        items = cast("list[Any]", data)
        if isinstance(written, SequenceNode) and plain(written) == items:
            return written
        return SequenceNode(_NOWHERE, tuple(tree_of(item, None) for item in items))
    if isinstance(written, ScalarNode) and type(before := plain(written)) is type(data) and before == data:
        return written
    return scalar_of(data)


def scalar_of(value: Any) -> ScalarNode:
    """Return a scalar without a position in a file."""
    if isinstance(value, str):
        return ScalarNode(_NOWHERE, value, value, plain=_UNQUOTED.fullmatch(value) is not None)
    if value is None:
        return ScalarNode(_NOWHERE, "null", None)
    raw = str(value).lower() if isinstance(value, bool) else str(value)
    return ScalarNode(_NOWHERE, raw, resolve_plain(raw))
