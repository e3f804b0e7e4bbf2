"""Composition of a Hydra file: hydra-core orders the files, and their values are merged with positions.

Hydra's own `compose` returns plain values; a conversion needs the comments, and findings need lines. A test compares
the result with Hydra's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rlinf_cli.importing.hydra_defaults import DEFAULTS, HYDRA, named_files, order_files
from rlinf_cli.importing.projects import FOLDER_BY_VARIABLE
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import read, split_components
from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode, SequenceNode, find, merge, resolve_plain

_VARIABLE: Final = re.compile(r"\$\{(?:oc\.)?env:\s*([A-Za-z_]\w*)\s*(?:,\s*([^}]*?)\s*)?\}")
_OLD_BOOLEANS: Final = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_OLD_INTEGER: Final = re.compile(r"[-+]?\d+(_\d+)+")
_NOWHERE: Final = Span(SourceText("", ""), 0, 0)


class HydraFile(NamedTuple):
    """A composed file.

    Attributes:
        tree: the effective values, references unresolved; without `defaults`, with `hydra` of the main file.
        sources: the main file and the files of its defaults lists.
        values: the overrides that set values, which are not applied yet.
    """

    tree: MappingNode
    sources: tuple[SourceText, ...]
    values: tuple[str, ...] = ()

    @property
    def main(self) -> SourceText:
        """The file that is imported."""
        return self.sources[0]


def compose_hydra(
    main: SourceText,
    diagnostics: Diagnostics,
    *,
    environ: Mapping[str, str],
    search_path: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> HydraFile | None:
    """Compose a file with the files of its defaults lists.

    Args:
        main: the file.
        diagnostics: receives the findings.
        environ: the environment for `${oc.env:NAME}` in the search path.
        search_path: further folders of groups, after those of the file.
        overrides: arguments of Hydra; those that choose files are applied.

    Returns:
        None after reporting a file that is unreadable, missing, or part of a cycle.
    """
    tree = read(main, diagnostics)
    if tree is None or not diagnostics.ok:
        return None
    folder = os.path.dirname(main.name) or "."
    folders = [folder, *_search_path(tree, folder, environ, diagnostics), *search_path]
    ordered = order_files(main, folders, overrides, diagnostics)
    if ordered is None:
        return None
    composed: Node = MappingNode(tree.span, ())
    for part, package in ordered.parts:
        over = split_components(_wrapped(part, package), (), diagnostics)
        assert isinstance(over, MappingNode)
        composed = merge(composed, _without_missing(over, composed))
    assert isinstance(composed, MappingNode)
    hydra = tree.entry(HYDRA)
    entries = [entry for entry in composed.entries if entry.key.raw != HYDRA]
    effective = _as_yaml_1_1(MappingNode(tree.span, tuple([*entries, hydra] if hydra else entries)))
    assert isinstance(effective, MappingNode)
    return HydraFile(effective, ordered.sources, ordered.values)


def _as_yaml_1_1(node: Node) -> Node:
    """Return a tree with words and numbers resolved by YAML 1.1, as OmegaConf does."""
    if isinstance(node, MappingNode):
        return MappingNode(node.span, tuple(Entry(entry.key, _as_yaml_1_1(entry.value)) for entry in node.entries))
    if isinstance(node, SequenceNode):
        return SequenceNode(node.span, tuple(map(_as_yaml_1_1, node.items)))
    if not node.plain:
        return node
    raw = _OLD_BOOLEANS.get(node.raw.lower(), node.raw)
    raw = raw.replace("_", "") if _OLD_INTEGER.fullmatch(raw) else raw
    return node if raw == node.raw else ScalarNode(node.span, raw, resolve_plain(raw))


def _search_path(tree: MappingNode, folder: str, environ: Mapping[str, str], diagnostics: Diagnostics) -> Iterator[str]:
    """Return the folders of `hydra.searchpath`; warn about those that are unknown."""
    written = find(tree, (HYDRA, "searchpath"))
    if written is None:
        yield from _beside(tree, folder, diagnostics)
    items = written.items if isinstance(written, SequenceNode) else [written] if written is not None else []
    for item in items:
        if not isinstance(item, ScalarNode):
            continue
        missing: list[str] = []

        def replaced(match: re.Match[str], missing: list[str] = missing) -> str:
            default: str | None = match[2]
            value = environ.get(match[1], default)
            if value is None:
                missing.append(match[1])
            return value or ""

        text = _VARIABLE.sub(replaced, item.raw)
        scheme, _, rest = text.rpartition("://")
        guessed = _guessed(item.raw, missing[0], folder) if missing else None
        if guessed is not None:
            message = f"the environment has no variable `{missing[0]}`: `{guessed}` is searched, by the file's place"
            diagnostics.add(Diagnostic("unknown-variable", Severity.NOTE, message, item.span, ()))
            yield guessed
        elif missing:
            message = f"the environment has no variable `{missing[0]}`: this folder is not searched"
            help = "set it, or name the folder with `--search-path FOLDER`"
            diagnostics.add(Diagnostic("unknown-variable", Severity.WARNING, message, item.span, (), help))
        elif scheme not in ("", "file"):
            message = f"`{scheme}://` names a Python package; packages are not imported, so it is not searched"
            help = "name the folder with `--search-path FOLDER`"
            diagnostics.add(Diagnostic("base-unreadable", Severity.WARNING, message, item.span, (), help))
        else:
            yield rest
            if not os.path.isabs(rest):
                # Hydra resolves it against the current folder; an imported file is often read from elsewhere.
                yield os.path.join(folder, rest)
                guessed = _guessed(rest, "", folder)
                yield from [guessed] if guessed is not None else []


def _beside(tree: MappingNode, folder: str, diagnostics: Diagnostics) -> Iterator[str]:
    """Return the folder of the checkout that the launch scripts search for a file without a search path."""
    listed = tree.entry(DEFAULTS)
    named = [name for name, _ in named_files(tree) if "/" in name]
    guessed = _guessed("/config", "EMBODIED_PATH", folder, named=True)
    if listed is None or guessed is None or all(os.path.isfile(os.path.join(folder, f"{name}.yaml")) for name in named):
        return
    message = f"files are missing beside this one: `{guessed}` is searched, too, by the file's place"
    diagnostics.add(Diagnostic("base-unreadable", Severity.NOTE, message, listed.key.span, ()))
    yield guessed


def _guessed(raw: str, variable: str, folder: str, *, named: bool = False) -> str | None:
    """Return the folder that an unset variable of the search path means in the checkout that holds the file.

    Args:
        raw: the item of the search path.
        variable: the variable, or another name.
        folder: the folder of the file.
        named: only where the table has the variable.
    """
    rest = raw.rpartition("}")[2].strip("/")
    below = os.path.join(FOLDER_BY_VARIABLE.get(variable, ""), rest)
    here = os.path.abspath(folder)
    while here != (above := os.path.dirname(here)):
        for relative in (below,) if named else (below, rest):
            if relative and os.path.isdir(path := os.path.join(here, relative)):
                return path
        here = above
    return None


def _without_missing(over: MappingNode, base: Node) -> MappingNode:
    """Return a tree without `???` values that `base` sets: in OmegaConf they mark a missing value."""
    entries: list[Entry] = []
    for entry in over.entries:
        below = base.get(entry.key.raw) if isinstance(base, MappingNode) else None
        if isinstance(entry.value, ScalarNode) and entry.value.raw == "???" and below is not None:
            continue
        if isinstance(entry.value, MappingNode) and below is not None:
            entry = Entry(entry.key, _without_missing(entry.value, below))
        entries.append(entry)
    return MappingNode(over.span, tuple(entries))


def _wrapped(tree: MappingNode, package: str) -> MappingNode:
    """Return a file's values below its package, without its defaults list."""
    tree = MappingNode(tree.span, tuple(entry for entry in tree.entries if entry.key.raw != DEFAULTS))
    for name in reversed(package.split(".") if package else ()):
        tree = MappingNode(_NOWHERE, (Entry(ScalarNode(_NOWHERE, name, name), tree),))
    return tree
