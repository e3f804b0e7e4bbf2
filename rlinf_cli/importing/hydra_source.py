"""The files of a job for Hydra: a source of configurations that reads each file by the rules of our own files, and
trees as plain data and back.

Hydra's own source would open pipes and devices, expand aliases without limit, and import packages of a search path.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Final, cast

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import load_source, read, split_components
from rlinf_core.config.tree import (
    Entry,
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    SourceText,
    Span,
    resolve_plain,
    scalars,
    to_data,
)
from rlinf_core.suggest import did_you_mean

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


def _for_hydra(node: MappingNode) -> dict[str, Any]:
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


DEFAULTS: Final = "defaults"
HYDRA: Final = "hydra"
# The package in which Hydra looks for plugins, and which may be a folder beside the files.
_PLUGINS: Final = "hydra_plugins"
# Far above real use, and low enough to stop a malicious file.
MAX_FILES: Final = 500
# An integer of more digits stays text, as in our own files.
_LONGEST_NUMBER: Final = 1000
FORMS: Final = "valid items: `name`, `group: name`, `group@package: name`, `override group: name` and `_self_`"


def named_files(tree: MappingNode, inside: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the files that a tree's defaults list names, as `group/name`, each with its node.

    Args:
        tree: the content of a file.
        inside: the group of this file.
    """
    listed = tree.get(DEFAULTS)
    for item in listed.items if isinstance(listed, SequenceNode) else ():
        entry = item.entries[0] if isinstance(item, MappingNode) and item.entries else None
        group = entry.key.raw.split()[-1].partition("@")[0] if entry is not None and entry.key.raw.strip() else ""
        for _, scalar in scalars(entry.value if entry is not None else item):
            path = f"{group}/{scalar.raw.partition('@')[0]}" if group else scalar.raw.partition("@")[0]
            path = path if path.startswith("/") else f"{inside}/{path}"
            yield os.path.normpath(path.strip("/")).removesuffix(".yaml"), entry.key if entry is not None else item


def _of_yaml_1_1(node: Node) -> Node:
    """Return a tree with words and numbers resolved by YAML 1.1, by OmegaConf's own reader."""
    if isinstance(node, MappingNode):
        return MappingNode(node.span, tuple(Entry(entry.key, _of_yaml_1_1(entry.value)) for entry in node.entries))
    if isinstance(node, SequenceNode):
        return SequenceNode(node.span, tuple(map(_of_yaml_1_1, node.items)))
    if not node.plain or len(node.raw) > _LONGEST_NUMBER:
        return node
    scalar = yaml.ScalarNode(_reader().resolve(yaml.ScalarNode, node.raw, (True, False)), node.raw)
    try:
        value = _reader().construct_object(scalar)
    except (ValueError, yaml.YAMLError):  # `0b_` and `=`, which OmegaConf cannot read
        return node
    if type(value) is type(node.value) and repr(value) == repr(node.value):
        return node
    return replace(scalar_of(value), span=node.span)


@cache
def _reader() -> Any:
    return get_yaml_loader()("")


class EndlessDefaultsError(Exception):
    """Defaults lists name each other in a `cycle`, or, if that is empty, name too many files."""

    def __init__(self, cycle: Sequence[str]) -> None:
        super().__init__(cycle)
        self.cycle = cycle


class JobFiles:
    """The main file of a job, and the files below the searched folders.

    Attributes:
        main, main_name: the main file, and its name for Hydra.
        trees: the files read so far, by their names for Hydra, with scalars resolved as by OmegaConf.
    """

    def __init__(self, main: SourceText, folders: Sequence[str], diagnostics: Diagnostics) -> None:
        self.main, self.folders, self.diagnostics = main, folders, diagnostics
        self.main_name = os.path.splitext(os.path.basename(main.name))[0]
        self.trees: dict[str, MappingNode] = {}
        self._defaults: dict[str, list[object]] = {}
        self._sizes: dict[str, int] = {}

    def path_of(self, name: str) -> str | None:
        """Return the file that Hydra calls `name`, in the first folder that has it."""
        if name == self.main_name:
            return self.main.name
        file = f"{name.removesuffix('.yaml')}.yaml"
        paths = (os.path.normpath(os.path.join(folder, file)) for folder in self.folders)
        return next((path for path in paths if os.path.isfile(path)), None)

    def has_group(self, name: str) -> bool:
        """Return whether a searched folder has a group `name`."""
        return any(os.path.isdir(os.path.join(folder, name)) for folder in self.folders)

    def options(self, group: str) -> list[str]:
        """Return the names of the files of a group."""
        folders = [os.path.join(folder, group) for folder in self.folders]
        names = {name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
        return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))

    def tree(self, name: str) -> MappingNode:
        """Return the tree of a file; an empty tree after reporting an error."""
        if name not in self.trees:
            path = self.path_of(name) or ""
            is_main = path == self.main.name
            source = self.main if is_main else load_source(path, self.diagnostics, is_base=True)
            tree = read(source, self.diagnostics) if source is not None else None
            tree = _of_yaml_1_1(tree or MappingNode(Span(source or self.main, 0, 0), ()))
            split = split_components(tree, (), self.diagnostics)
            assert isinstance(split, MappingNode)
            self.trees[name] = split
            self._defaults[name] = [*self._items(split)]
        return self.trees[name]

    def load(self, name: str) -> ConfigResult:
        """Return a file for Hydra, without the settings of Hydra itself."""
        tree = self.tree(name)
        values = tuple(entry for entry in tree.entries if entry.key.raw not in (DEFAULTS, HYDRA))
        data = {**_for_hydra(MappingNode(tree.span, values)), DEFAULTS: self._defaults[name]}
        header = ConfigSource._get_header_dict(tree.span.source.text)  # pyright: ignore[reportPrivateUsage]
        return ConfigResult("rlinf", name, OmegaConf.create(data), header)

    def _items(self, tree: MappingNode) -> Iterator[object]:
        """Yield the items of a defaults list, except Hydra's own; report invalid items."""
        listed = tree.get(DEFAULTS)
        if listed is None or (isinstance(listed, ScalarNode) and listed.value is None):
            return
        for item in listed.items if isinstance(listed, SequenceNode) else (listed,):
            entry = item.entries[0] if isinstance(item, MappingNode) and len(item.entries) == 1 else None
            written = entry.key.raw if entry is not None else item.raw if isinstance(item, ScalarNode) else ""
            group = "".join(written.split()[-1:])
            named = [scalar for _, scalar in scalars(entry.value if entry is not None else item)]
            # A resolver would read the environment of the importing user.
            texts = all(isinstance(name.value, str) and ":" not in name.raw.partition("${")[2] for name in named)
            is_null = entry is not None and isinstance(entry.value, ScalarNode) and entry.value.value is None
            if not isinstance(listed, SequenceNode) or group[:1] in ("", "@") or not (texts or is_null):
                message = "this is not a valid item of a defaults list"
                self.diagnostics.error("extends-form", message, item.span, (DEFAULTS,), FORMS)
            elif not group.strip("/").startswith(f"{HYDRA}/"):
                # Hydra's own settings configure a run that does not exist here.
                yield to_data(item)

    def size(self, name: str, above: tuple[str, ...] = ()) -> int:
        """Return the maximum number of files that Hydra reads for a file, counting repeated files each time.

        Raises:
            EndlessDefaultsError: the files form a cycle, or are more than `MAX_FILES`.
        """
        if name in above:
            raise EndlessDefaultsError([*above[above.index(name) :], name])
        if name not in self._sizes:
            size = 1
            tree = self.tree(name)
            for named, _ in named_files(tree, os.path.dirname(name)) if self.diagnostics.ok else ():
                size += max((self.size(option, (*above, name)) for option in self._meant(named)), default=0)
                if size > MAX_FILES:
                    raise EndlessDefaultsError([])
            self._sizes[name] = size
        return self._sizes[name]

    def _meant(self, name: str) -> list[str]:
        """Return the files that a name in a defaults list may mean; it may refer to another group's choice."""
        if "${" in name:
            group, _, pattern = name.rpartition("/")
            pattern = pattern.partition("${")[0] + "*"
            return [f"{group}/{option}" for option in self.options(group) if fnmatch.fnmatch(option, pattern)]
        return [name] if self.path_of(name) is not None else []

    def report_missing(self, name: str) -> None:
        """Report that no folder has the file `name`."""
        nodes = [node for file in self.trees for named, node in self._named(file) if named == name]
        group = os.path.dirname(name)
        searched = ", ".join(f"`{folder}`" for folder in dict.fromkeys(map(os.path.normpath, self.folders)))
        beside = [os.path.join(group, option) for option in self.options(group)]
        help = did_you_mean(name, beside) or "name its folder with `--search-path FOLDER`"
        self.report("base-unreadable", f"there is no `{name}.yaml` in {searched}", help, *nodes)

    def report_cycle(self, cycle: Sequence[str]) -> None:
        """Report defaults lists that name each other, or, if `cycle` is empty, too many files."""
        if not cycle:
            self.report("extends-cycle", f"the defaults lists name more than {MAX_FILES} files", "merge some of them")
            return
        nodes = [node for name, node in self._named(cycle[-2]) if name == cycle[-1]]
        names = " -> ".join(f"`{name}.yaml`" for name in cycle)
        self.report("extends-cycle", f"these defaults form a cycle: {names}", "remove one of them", *nodes)

    def _named(self, file: str) -> Iterator[tuple[str, Node]]:
        return named_files(self.trees[file], os.path.dirname(file))

    def report(self, code: str, message: str, help: str, *nodes: Node) -> None:
        """Report an error at the first of `nodes`, or without any at the main file's defaults list or start."""
        entry: Entry | None = self.tree(self.main_name).entry(DEFAULTS)
        span = nodes[0].span if nodes else entry.key.span if entry is not None else Span(self.main, 0, 0)
        self.diagnostics.error(code, message, span, (DEFAULTS,), help)


class JobConfigSource(ConfigSource):
    """Hydra's source for the files of the job that `use` sets."""

    files: ClassVar[JobFiles | None] = None

    @staticmethod
    def scheme() -> str:
        return "rlinf"

    def load_config(self, config_path: str) -> ConfigResult:
        if self.files is None:
            raise ConfigLoadError(config_path)
        return self.files.load(config_path)

    def available(self) -> bool:
        return True

    def is_config(self, config_path: str) -> bool:
        return self.files is not None and self.files.path_of(config_path) is not None

    def is_group(self, config_path: str) -> bool:
        return self.files is not None and self.files.has_group(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return self.files.options(config_path) if self.files is not None else []


class _SearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if JobConfigSource.files is not None:
            search_path.append("main", f"{JobConfigSource.scheme()}://")


def use(files: JobFiles | None) -> None:
    """Set the job whose files Hydra composes, or None. Installed plugins of Hydra are not imported."""
    JobConfigSource.files = files
    others = sys.modules.get(_PLUGINS)
    sys.modules[_PLUGINS] = None  # pyright: ignore[reportArgumentType]
    try:
        for plugin in (JobConfigSource, _SearchPath):
            Plugins.instance().register(plugin)
    finally:
        del sys.modules[_PLUGINS]
        if others is not None:
            sys.modules[_PLUGINS] = others
