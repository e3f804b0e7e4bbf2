"""Composition of a Hydra file without Hydra: defaults list, packages and search path.

Hydra's own `compose` returns plain values; a conversion needs the comments, and findings need lines. A test compares
the result with Hydra's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlinf_core.config.composing.merge import merge
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode, SequenceNode, find
from rlinf_core.config.yaml.reader import load_source, read, resolve_plain

DEFAULTS: Final = "defaults"
HYDRA: Final = "hydra"
# Far above real use, far below what a malicious file asks for.
MAX_FILES: Final = 500
MAX_DEPTH: Final = 32
_HEADER: Final = re.compile(r"^\s*#\s*@package\s+(\S+)\s*$")
_VARIABLE: Final = re.compile(r"\$\{(?:oc\.)?env:\s*([A-Za-z_]\w*)\s*(?:,\s*([^}]*?)\s*)?\}")
_CHOICE: Final = re.compile(r"\$\{([\w/@.]+)\}")
_OLD_BOOLEANS: Final = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_OLD_INTEGER: Final = re.compile(r"[-+]?\d+(_\d+)+")
_NOWHERE: Final = Span(SourceText("", ""), 0, 0)


class HydraFile(NamedTuple):
    """A composed file.

    Attributes:
        tree: the effective values, references unresolved; without `defaults`, with `hydra` of the main file.
        sources: the main file and the files of its defaults lists, in order of reading.
        groups: the groups of these lists, as `group` or `group@package`.
    """

    tree: MappingNode
    sources: tuple[SourceText, ...]
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Default:
    """One item of a defaults list.

    Attributes:
        group: as written, empty for a bare file name.
        names: the files of the group; empty for `null`.
        package: the part after `@`, or None.
    """

    node: Node
    group: str = ""
    names: tuple[ScalarNode, ...] = ()
    package: str | None = None
    override: bool = False
    optional: bool = False
    is_self: bool = False


@dataclass
class _Part:
    """A part of a composed file: a tree and its target package."""

    tree: MappingNode
    package: str


def compose_hydra(
    main: SourceText,
    diagnostics: Diagnostics,
    *,
    environ: Mapping[str, str],
    search_path: Sequence[str] = (),
    choices: Mapping[str, str | None] | None = None,
) -> HydraFile | None:
    """Compose a file with the files of its defaults lists.

    Args:
        main: the file.
        diagnostics: receives the findings.
        environ: the environment for `${oc.env:NAME}` in the search path.
        search_path: further folders of groups, after those of the file.
        choices: overrides of the defaults lists, file by group.

    Returns:
        None after reporting a file that is unreadable, missing, or part of a cycle.
    """
    tree = read(main, diagnostics)
    if tree is None or not diagnostics.ok:
        return None
    folder = os.path.dirname(main.name) or "."
    folders = [folder, *_search_path(tree, folder, environ, diagnostics), *search_path]
    composer = _Composer(diagnostics, folders, [main], dict(choices or {}))
    parts = composer.parts(tree, main, group="", package="", chain=(os.path.realpath(main.name),))
    if not diagnostics.ok:
        return None
    composed: Node = MappingNode(tree.span, ())
    for part in parts:
        over = _wrapped(part)
        composed = merge(composed, _without_missing(over, composed))
    assert isinstance(composed, MappingNode)
    hydra = tree.entry(HYDRA)
    entries = [entry for entry in composed.entries if entry.key.raw != HYDRA]
    whole = _as_yaml_1_1(MappingNode(tree.span, tuple([*entries, hydra] if hydra else entries)))
    assert isinstance(whole, MappingNode)
    return HydraFile(whole, tuple(composer.sources), frozenset(composer.met))


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


def named_files(tree: MappingNode) -> Iterator[str]:
    """Return the files that the defaults list of a tree names, each as `group/name` without extension."""
    for default in _defaults(tree, Diagnostics()) or ():
        for name in default.names:
            yield f"{default.group}/{name.raw}".strip("/")


def _search_path(tree: MappingNode, folder: str, environ: Mapping[str, str], diagnostics: Diagnostics) -> Iterator[str]:
    """Return the folders of `hydra.searchpath`; warn about those that are unknown."""
    written = find(tree, (HYDRA, "searchpath"))
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
        if missing:
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


@dataclass
class _Composer:
    diagnostics: Diagnostics
    folders: list[str]
    sources: list[SourceText]
    # The files chosen by overrides, by `group@package`; None deletes the group.
    choices: dict[str, str | None]
    chosen: dict[str, str] = field(default_factory=dict[str, str])
    met: set[str] = field(default_factory=set[str])

    def parts(
        self, tree: MappingNode, source: SourceText, group: str, package: str, chain: tuple[str, ...]
    ) -> list[_Part]:
        """Return the parts of a file in merge order."""
        own = MappingNode(tree.span, tuple(entry for entry in tree.entries if entry.key.raw != DEFAULTS))
        mine = _Part(own, package)
        defaults = _defaults(tree, self.diagnostics)
        if not defaults:
            return [mine]
        for default in reversed(defaults):
            if default.override:
                name = default.names[0].raw if default.names else None
                self.choices.setdefault(_key(_joined(group, default.group), default.package), name)
        if not any(default.is_self for default in defaults):
            defaults = [*defaults, _Default(tree, is_self=True)]
        groups: list[list[_Part]] = []
        # Later items first, as in Hydra: overrides in their files apply to earlier ones too.
        for default in reversed(defaults):
            if default.is_self:
                groups.append([mine])
            elif not default.override and default.group.strip("/").partition("/")[0] != HYDRA:
                groups.append(self._below(default, group, package, chain))
        return [part for parts in reversed(groups) for part in parts]

    def _below(self, default: _Default, group: str, package: str, chain: tuple[str, ...]) -> list[_Part]:
        names = [name.raw for name in default.names]
        at = _joined(group, default.group)
        key = _key(at, default.package)
        self.met.add(key)
        if key in self.choices:
            choice = self.choices[key]
            names = [] if choice is None else [choice]
        if names:
            self.chosen[key] = names[-1]
        parts: list[_Part] = []
        for index, name in enumerate(names):
            node = default.names[min(index, len(default.names) - 1)] if default.names else default.node
            name = _CHOICE.sub(lambda match: self.chosen.get(match[1], match[0]), name)
            parts += self._load(default, node, at, name, package, chain)
        return parts

    def _load(
        self, default: _Default, node: Node, at: str, name: str, package: str, chain: tuple[str, ...]
    ) -> list[_Part]:
        if name == "???":
            self._report(
                "base-unreadable", node, f"`{at}: ???` leaves the choice to the command line", f"add `{at}=NAME`"
            )
            return []
        # A bare file name is relative to the file that names it.
        relative = name.removeprefix("/") if name.startswith("/") else f"{at}/{name}".strip("/")
        relative = relative.removesuffix(".yaml")
        file = self._file(relative)
        if file is None:
            if not default.optional:
                self._report_missing(node, relative)
            return []
        real = os.path.realpath(file)
        if real in chain:
            names = " -> ".join(f"`{os.path.basename(file)}`" for file in (*chain[chain.index(real) :], real))
            self._report("extends-cycle", node, f"these defaults form a cycle: {names}", "remove one of them")
            return []
        if len(chain) >= MAX_DEPTH or len(self.sources) >= MAX_FILES:
            message = f"the defaults lists name more than {MAX_FILES} files, or are more than {MAX_DEPTH} levels deep"
            self._report("extends-cycle", node, message, "merge some of them")
            return []
        diagnostics = Diagnostics()
        source = load_source(file, diagnostics)
        tree = read(source, diagnostics) if source is not None else None
        self.diagnostics.extend(diagnostics)
        if source is None or tree is None:
            if diagnostics.ok:
                self._report("base-unreadable", node, f"the top level of `{file}` is not a mapping", None)
            return []
        self.sources.append(source)
        inside = os.path.dirname(relative)
        below = _package(package, default, source, name, inside)
        return self.parts(tree, source, inside, below, (*chain, real))

    def _file(self, relative: str) -> str | None:
        for folder in self.folders:
            file = os.path.normpath(os.path.join(folder, f"{relative}.yaml"))
            if os.path.isfile(file):
                return file
        return None

    def _report_missing(self, node: Node, relative: str) -> None:
        from rlinf_core.suggest import did_you_mean

        beside: set[str] = set()
        for folder in self.folders:
            try:
                listed = os.listdir(os.path.join(folder, os.path.dirname(relative)))
            except OSError:
                continue
            beside |= {
                os.path.join(os.path.dirname(relative), entry_name[:-5])
                for entry_name in listed
                if entry_name.endswith(".yaml")
            }
        searched = ", ".join(f"`{folder}`" for folder in dict.fromkeys(map(os.path.normpath, self.folders)))
        hint = did_you_mean(relative, sorted(beside)) or "name its folder with `--search-path FOLDER`"
        self._report("base-unreadable", node, f"there is no `{relative}.yaml` in {searched}", hint)

    def _report(self, code: str, node: Node, message: str, help: str | None) -> None:
        self.diagnostics.error(code, message, node.span, (DEFAULTS,), help)


def _defaults(tree: MappingNode, diagnostics: Diagnostics) -> list[_Default] | None:
    """Return the items of the defaults list; report items of an unknown form."""
    entry = tree.entry(DEFAULTS)
    if entry is None:
        return None
    items = entry.value.items if isinstance(entry.value, SequenceNode) else ()
    defaults = [_default(item) for item in items]
    wrong = [item for item, default in zip(items, defaults, strict=True) if default is None]
    if not isinstance(entry.value, SequenceNode) and not _is_null(entry.value):
        wrong = [entry.key]
    for item in wrong:
        message = "this is not a valid item of a defaults list"
        help = "valid items: `name`, `group: name`, `group@package: name`, `override group: name` and `_self_`"
        diagnostics.error("extends-form", message, item.span, (DEFAULTS,), help)
    return [default for default in defaults if default is not None]


def _default(item: Node) -> _Default | None:
    if isinstance(item, ScalarNode):
        if item.raw == "_self_":
            return _Default(item, is_self=True)
        name, _, package = item.raw.partition("@")
        if not name:
            return None
        return _Default(item, "", (ScalarNode(item.span, name, name),), package or None)
    if not isinstance(item, MappingNode) or len(item.entries) != 1:
        return None
    key, value = item.entries[0].key, item.entries[0].value
    *words, group = key.raw.split()
    if not set(words) <= {"override", "optional"}:
        return None
    group, _, package = group.partition("@")
    names = value.items if isinstance(value, SequenceNode) else () if _is_null(value) else (value,)
    scalars = tuple(name for name in names if isinstance(name, ScalarNode))
    if len(scalars) < len(names):
        return None
    return _Default(key, group, scalars, package or None, "override" in words, "optional" in words)


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.value is None


def _joined(group: str, below: str) -> str:
    return below.strip("/") if below.startswith("/") else f"{group}/{below}".strip("/")


def _key(group: str, package: str | None) -> str:
    return f"{group}@{package}" if package else group


def _package(parent: str, default: _Default, source: SourceText, name: str, inside: str) -> str:
    """Return the package of a file: that of the defaults list, that of its header, or its group."""
    relative = default.package
    if relative is None:
        header = _header(source)
        if header is not None:
            header = header.replace("_group_", inside.replace("/", "."))
            relative = header if header.startswith("_global_") else f"_global_.{header}"
        else:
            own = f"{default.group}/{name}" if default.group else name
            relative = os.path.dirname(own.removeprefix("/")).replace("/", ".")
    relative = relative.replace("_group_", inside.replace("/", ".")).replace("_name_", os.path.basename(name))
    relative = "" if relative == "_here_" else relative.removeprefix("_here_.")
    whole = ".".join(filter(None, (parent, relative)))
    _, root, absolute = whole.rpartition("_global_")
    return absolute.strip(".") if root else whole


def _header(source: SourceText) -> str | None:
    for line in source.text.splitlines():
        match = _HEADER.match(line)
        if match:
            return match[1]
        if line.strip() and not line.lstrip().startswith("#"):
            return None
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


def _wrapped(part: _Part) -> MappingNode:
    tree = part.tree
    for name in reversed(part.package.split(".") if part.package else ()):
        tree = MappingNode(_NOWHERE, (Entry(ScalarNode(_NOWHERE, name, name), tree),))
    return tree
