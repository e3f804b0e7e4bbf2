"""Composition, the second stage of loading: a file, its bases and the overrides become one tree without references."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

from rlinf_core.config.composing.interpolation import interpolate
from rlinf_core.config.composing.overrides import apply_overrides, parse_overrides
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import load_source, read, split_components
from rlinf_core.config.shipped import shipped_config
from rlinf_core.config.tree import (
    Composed,
    Entry,
    MappingNode,
    Node,
    Path,
    ScalarNode,
    SequenceNode,
    SourceText,
    find,
    first_line,
    merge,
)
from rlinf_core.suggest import did_you_mean

EXTENDS: Final = "extends"
# Real chains have a handful of files; a much longer one is a mistake, or an attempt to exhaust the stack.
MAX_CHAIN: Final = 32
_SHOWN: Final = 8
# The codes of values that could not be read, and so are not judged further.
_UNREAD: Final = frozenset({"undefined-alias", "recursive-alias", "unknown-tag", "tag-mismatch"})
ANOTHER_FILE: Final = "name another file, or write a space after each `:`"


def compose(
    main: SourceText,
    overrides: Sequence[str],
    diagnostics: Diagnostics,
    *,
    environ: Mapping[str, str],
    without_recipe: str | None = None,
) -> Composed | None:
    """Merge a file with its bases, apply the overrides, and resolve the references.

    Args:
        main: the file.
        overrides: arguments of the command line.
        diagnostics: receives the findings. A faulty value stays unchanged for later stages.
        environ: the environment for `${env:NAME}`.
        without_recipe: the only section used of a file without the key `recipe`; by default all sections.

    Returns:
        None if a file could not be read.
    """
    arguments, parsed = parse_overrides(overrides, diagnostics)
    read = with_bases(main, diagnostics)
    if read is None:
        return None
    tree, sources = read
    reported = (finding.path for finding in diagnostics if finding.code in _UNREAD)
    unread = frozenset(path for path in reported if isinstance(find(tree, path), ScalarNode))
    if arguments is not None:
        tree = apply_overrides(tree, parsed, diagnostics)
        sources = (*sources, arguments)
    # A reference contains a `$`, which YAML can also write as an escape. Most files have neither and need no resolver.
    composed = Composed(tree, sources, unread)
    if not any("$" in source.text or "\\" in source.text for source in sources):
        return composed
    return interpolate(composed, diagnostics, environ, only=None if tree.entry("recipe") else without_recipe)


def with_bases(main: SourceText, diagnostics: Diagnostics) -> tuple[MappingNode, tuple[SourceText, ...]] | None:
    """Read a file and merge it over its bases: files beside it, or shipped configurations.

    Returns:
        The tree without `extends`, and the sources, `main` first; None if `main` or a base could not be read.
    """
    tree = _read(main, diagnostics)
    if tree is None:
        return None
    loader = _Loader(diagnostics, main)
    if main.kind == "file":
        loader.chain.append(os.path.realpath(main.name))
    merged = loader.over_bases(tree, main)
    return None if merged is None else (merged, tuple(loader.sources))


def _read(source: SourceText, diagnostics: Diagnostics) -> MappingNode | None:
    tree = read(source, diagnostics)
    split = None if tree is None else split_components(tree, (), diagnostics)
    return split if isinstance(split, MappingNode) else None


class _Loader:
    def __init__(self, diagnostics: Diagnostics, main: SourceText) -> None:
        self.diagnostics = diagnostics
        self.sources = [main]
        # The real paths of the files being read; each file extends the next.
        self.chain: list[str] = []
        self.done: dict[str, MappingNode | None] = {}

    def over_bases(self, tree: MappingNode, source: SourceText) -> MappingNode | None:
        entry = tree.entry(EXTENDS)
        if entry is None:
            return tree
        named = self._named(entry)
        bases = [self._base(scalar, source, path, index) for index, (scalar, path) in enumerate(named or ())]
        if named is None or None in bases:
            return None
        own = MappingNode(tree.span, tuple(entry for entry in tree.entries if entry.key.raw != EXTENDS))
        layers: list[Node] = [base for base in bases if base is not None]
        merged = reduce(merge, (*layers, own))
        return merged if isinstance(merged, MappingNode) else own

    def _named(self, entry: Entry) -> list[tuple[ScalarNode, Path]] | None:
        """Return the scalars that name bases, or None after reporting an error."""
        value = entry.value
        items: list[tuple[Node, Path]] = [(value, (EXTENDS,))]
        if isinstance(value, SequenceNode):
            items = [(item, (EXTENDS, index)) for index, item in enumerate(value.items)] or items
        named: list[tuple[ScalarNode, Path]] = []
        for item, path in items:
            if not isinstance(item, ScalarNode) or not isinstance(item.value, str) or not item.raw or "\0" in item.raw:
                span = first_line(item) if item.span.end > item.span.start else entry.key.span
                message = "`extends` takes the name of a file, or a list of them"
                self.diagnostics.error("extends-form", message, span, path, "write `extends: base.yaml`")
            elif "${" in item.raw:
                message = "`extends` is read before references are resolved, so it cannot contain one"
                self.diagnostics.error("extends-form", message, item.span, path, "write the name of the file")
            else:
                named.append((item, path))
        return named if len(named) == len(items) else None

    def _base(self, scalar: ScalarNode, source: SourceText, path: Path, index: int) -> MappingNode | None:
        name = self._locate(scalar, source)
        if name is None:
            self._report_missing(scalar, source, path)
            return None
        real = os.path.realpath(name)
        if real in self.chain:
            circle = [os.path.basename(file) for file in (*self.chain[self.chain.index(real) :], real)]
            names = " -> ".join(f"`{file}`" for file in circle)
            message = "a file cannot be its own base" if len(circle) == 2 else f"these files extend each other: {names}"
            self.diagnostics.error("extends-cycle", message, scalar.span, path, "remove one of them from the cycle")
            return None
        if len(self.chain) >= MAX_CHAIN:
            message = f"more than {MAX_CHAIN} files extend one another"
            self.diagnostics.error("extends-cycle", message, scalar.span, path, "merge some of them")
            return None
        if real not in self.done:
            self.done[real] = self._load(name, real, scalar, path, source, index)
        return self.done[real]

    def _locate(self, scalar: ScalarNode, source: SourceText) -> str | None:
        beside = os.path.normpath(os.path.join(_folder(source), os.path.expanduser(scalar.raw)))
        exists = os.path.exists(beside)
        if exists and not os.path.isdir(beside):
            return beside
        shipped = shipped_config(scalar.raw.removesuffix(".yaml"))
        return str(shipped) if shipped else beside if exists else None

    def _load(
        self, name: str, real: str, scalar: ScalarNode, path: Path, of: SourceText, index: int
    ) -> MappingNode | None:
        reports = Diagnostics()
        text = load_source(name, reports, is_base=True)
        if text is None:
            # The finding must show the line with `extends` that names the file.
            for problem in reports:
                message = f"the base `{name}` cannot be read: {problem.message}"
                self.diagnostics.error("base-unreadable", message, scalar.span, path, problem.help)
            return None
        self.diagnostics.extend(reports)
        source = text.as_base(of, index)
        self.sources.append(source)
        tree = _read(source, self.diagnostics)
        if tree is None:
            return None
        if (why := no_configuration(tree)) is not None:
            self.diagnostics.error("base-unreadable", f"the base `{name}` {why}", scalar.span, path, ANOTHER_FILE)
            return None
        self.chain.append(real)
        merged = self.over_bases(tree, source)
        self.chain.pop()
        return merged

    def _report_missing(self, scalar: ScalarNode, source: SourceText, path: Path) -> None:
        requested = os.path.dirname(scalar.raw)
        try:
            listed = sorted(os.listdir(os.path.join(_folder(source), requested) or "."))
        except OSError:
            listed = []
        files = [os.path.join(requested, name) for name in listed if name.endswith((".yaml", ".yml"))]
        help = did_you_mean(scalar.raw, files) or "a base is relative to the file that extends it"
        self.diagnostics.error("base-unreadable", f"there is no file `{scalar.raw}` to extend", scalar.span, path, help)


def no_configuration(tree: MappingNode) -> str | None:
    """Return why a mapping is no configuration but, say, a password file, quoting at most 8 characters; else None."""
    raw = next((entry.key.raw for entry in tree.entries if ":" in entry.key.raw or "=" in entry.key.raw), None)
    return None if raw is None else f"is no configuration: a key begins with `{raw[:_SHOWN]}`"


def _folder(source: SourceText) -> str:
    """Return the folder that a source's bases are relative to; for standard input the current folder."""
    return os.path.dirname(source.name) if source.kind == "file" else ""
