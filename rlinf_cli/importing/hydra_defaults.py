"""Order of the files behind a Hydra defaults list, by hydra-core.

Hydra is given the defaults lists alone and no value of a file: nothing of a file is resolved, imported or instantiated.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final, NamedTuple

from hydra import MissingConfigException, version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import load_source, read
from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import MappingNode, Node, ScalarNode, SequenceNode, Value, scalars, to_data
from rlinf_core.suggest import did_you_mean

DEFAULTS: Final = "defaults"
HYDRA: Final = "hydra"
# Far above real use, far below what a malicious file asks for.
MAX_FILES: Final = 500
# Files are composed as by 1.2 and 1.3; only 1.1 still knows `_name_` in a package.
_VERSION_BASE: Final = "1.1"
_FORMS: Final = "valid items: `name`, `group: name`, `group@package: name`, `override group: name` and `_self_`"


class OrderedFiles(NamedTuple):
    """The files of a composition.

    Attributes:
        parts: the files in merge order, each with its target package.
        sources: their texts, the main file first.
        values: the overrides that set values rather than choose files.
    """

    parts: tuple[tuple[MappingNode, str], ...]
    sources: tuple[SourceText, ...]
    values: tuple[str, ...]


def order_files(
    main: SourceText, folders: Sequence[str], overrides: Sequence[str], diagnostics: Diagnostics
) -> OrderedFiles | None:
    """Return the files of a composition in merge order; None after reporting what is wrong.

    Args:
        main: the file whose defaults list comes first.
        folders: where groups are searched.
        overrides: arguments of Hydra, of files and of values.
        diagnostics: receives the findings.
    """
    files = _Files(main, folders, diagnostics)
    groups = [argument.lstrip("+~").partition("=")[0].partition("@")[0] for argument in overrides]
    values = [argument for argument, group in zip(overrides, groups, strict=True) if not files.group_exists(group)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version.setbase(_VERSION_BASE)
            parsed = OverridesParser.create().parse_overrides([text for text in overrides if text not in values])
            if any(override.is_sweep_override() for override in parsed):
                raise ValueError("a sweep over several jobs cannot be imported: choose one file of a group")
            ordered = create_defaults_list(files, files.main_name, parsed, prepend_hydra=False, skip_missing=False)
    except MissingConfigException as error:
        files.report_missing(os.path.normpath(error.missing_cfg_file or "").removesuffix(".yaml"))
    except (_TooManyFilesError, RecursionError):
        files.report_cycle()
    except OverrideParseException as error:
        message = f"`{error.override}` is not an override in Hydra's syntax"
        files.report("override-syntax", message, "write `GROUP=NAME`")
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        # Hydra asserts some forms.
        first, _, rest = str(error).strip().partition("\n")
        message = first or "Hydra does not accept this defaults list"
        files.report("extends-form", message, " ".join(rest.split()) or _FORMS)
    else:
        values += [override.input_line or "" for override in ordered.config_overrides]
        parts = [(files.trees[part.config_path or ""], part.package or "") for part in ordered.defaults]
        sources = dict.fromkeys([main, *(tree.span.source for tree in files.trees.values())])
        return OrderedFiles(tuple(parts), tuple(sources), tuple(values)) if diagnostics.ok else None
    return None


def named_files(tree: MappingNode, inside: str = "") -> Iterator[tuple[str, Node]]:
    """Return the files that a tree's defaults list names, as `group/name`, each with its position.

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


class _TooManyFilesError(Exception):
    """The defaults lists name more files than any real job."""


class _Files(ConfigRepository):
    """Files below several folders, of which Hydra sees headers and defaults lists."""

    def __init__(self, main: SourceText, folders: Sequence[str], diagnostics: Diagnostics) -> None:
        self.sources = []
        self.main, self.folders, self.diagnostics = main, folders, diagnostics
        self.main_name = os.path.splitext(os.path.basename(main.name))[0]
        self.trees: dict[str, MappingNode] = {}
        self.loads = 0

    def path_of(self, name: str) -> str | None:
        """Return the file that Hydra calls `name`, in the first folder that has it."""
        if name == self.main_name:
            return self.main.name
        file = f"{name.removesuffix('.yaml')}.yaml"
        paths = (os.path.normpath(os.path.join(folder, file)) for folder in self.folders)
        return next((path for path in paths if os.path.isfile(path)), None)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the header and the defaults list of a file; None if there is none."""
        self.loads += 1
        path = self.path_of(config_path)
        # Hydra asks twice for each.
        if self.loads > 2 * MAX_FILES:
            raise _TooManyFilesError
        if path is None:
            return None
        if config_path not in self.trees:
            source = self.main if path == self.main.name else load_source(path, self.diagnostics)
            tree = read(source, self.diagnostics) if source is not None else None
            self.trees[config_path] = tree or MappingNode(Span(source or self.main, 0, 0), ())
        tree = self.trees[config_path]
        ours = self._items(tree)
        header = ConfigSource._get_header_dict(tree.span.source.text)  # pyright: ignore[reportPrivateUsage]
        return ConfigResult("rlinf", path, OmegaConf.create({}), header, self._create_defaults_list(config_path, ours))

    def _items(self, tree: MappingNode) -> ListConfig:
        """Return the items of a defaults list for Hydra; report the invalid ones."""
        listed = tree.get(DEFAULTS)
        if listed is None or (isinstance(listed, ScalarNode) and listed.value is None):
            return ListConfig([])
        items: list[Value] = []
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
                self.diagnostics.error("extends-form", message, item.span, (DEFAULTS,), _FORMS)
            elif not group.strip("/").startswith(f"{HYDRA}/"):
                # Hydra's own settings configure a run that does not exist here.
                items.append(to_data(item))
        return ListConfig(items)

    def config_exists(self, config_path: str) -> bool:
        return self.path_of(config_path) is not None

    def group_exists(self, config_path: str) -> bool:
        return any(os.path.isdir(os.path.join(folder, config_path)) for folder in self.folders)

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        folders = [os.path.join(folder, group_name) for folder in self.folders]
        names = {name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
        return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))

    def _named(self, file: str) -> Iterator[tuple[str, Node]]:
        return named_files(self.trees[file], os.path.dirname(file))

    def report_missing(self, name: str) -> None:
        """Report that no folder has the file `name`."""
        nodes = [node for file in self.trees for named, node in self._named(file) if named == name]
        group = os.path.dirname(name)
        searched = ", ".join(f"`{folder}`" for folder in dict.fromkeys(map(os.path.normpath, self.folders)))
        beside = [os.path.join(group, option) for option in self.get_group_options(group)]
        help = did_you_mean(name, beside) or "name its folder with `--search-path FOLDER`"
        self.report("base-unreadable", f"there is no `{name}.yaml` in {searched}", help, *nodes)

    def report_cycle(self) -> None:
        """Report the defaults lists that name each other, or that there are too many."""
        graph = {file: [name for name, _ in self._named(file)] for file in self.trees}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            # Each is named by the next one. The file that was read first shall begin.
            cycle: list[str] = error.args[1][:0:-1]
            first = min(range(len(cycle)), key=lambda index: list(graph).index(cycle[index]))
            cycle = [*cycle[first:], *cycle[:first], cycle[first]]
            nodes = [node for name, node in self._named(cycle[-2]) if name == cycle[-1]]
            names = " -> ".join(f"`{name}.yaml`" for name in cycle)
            self.report("extends-cycle", f"these defaults form a cycle: {names}", "remove one of them", *nodes)
        else:
            self.report("extends-cycle", f"the defaults lists name more than {MAX_FILES} files", "merge some of them")

    def report(self, code: str, message: str, help: str, *nodes: Node) -> None:
        """Report an error at the first of some nodes; without one, at the main file's defaults list."""
        entry = self.trees[self.main_name].entry(DEFAULTS) if self.main_name in self.trees else None
        span = nodes[0].span if nodes else entry.key.span if entry is not None else Span(self.main, 0, 0)
        self.diagnostics.error(code, message, span, (DEFAULTS,), help)
