"""Job files of other projects: their discovery in a folder, and composition by Hydra with positions and comments."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_cli.importing.hydra_source import (
    DEFAULTS,
    FORMS,
    HYDRA,
    EndlessDefaultsError,
    JobFiles,
    from_hydra,
    named_files,
    tree_of,
    use,
)
from rlinf_cli.importing.projects import FOLDER_BY_VARIABLE, JOB_SECTIONS
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import load_source, read
from rlinf_core.config.tree import OVERRIDES_NAME, MappingNode, ScalarNode, SequenceNode, SourceText, Span, find
from rlinf_core.errors import ConfigError

_VARIABLE: Final = re.compile(r"\$\{(?:oc\.)?env:\s*([A-Za-z_]\w*)\s*(?:,\s*([^}]*?)\s*)?\}")
# Hydra's compatibility version 1.1 composes as 1.2 and 1.3 do, and still knows `_name_` in a package.
_VERSION_BASE: Final = "1.1"
# The beginnings of Hydra's errors about several values for one key.
_SWEEPS: Final = ("Ambiguous value", "Sweep parameters")
# The beginnings of Hydra's errors about an override.
_OF_OVERRIDES: Final = ("Could not ", "Override ", "Key ")


class HydraFile(NamedTuple):
    """A composed file.

    Attributes:
        tree: the effective values with references unresolved, without `defaults`, with `hydra` of the main file.
        main: the imported file.
    """

    tree: MappingNode
    main: SourceText


def _composed(files: JobFiles, overrides: Sequence[str]) -> dict[str, object] | None:
    """Return the data that Hydra composes; None after reporting its error."""
    use(files)
    try:
        files.size(files.main_name)
        for override in overrides:
            key, _, name = override.lstrip("+").partition("=")
            group = key.partition("@")[0]
            if files.path_of(f"{group}/{name}") is not None:
                files.size(f"{group}/{name}")
        if not files.diagnostics.ok:
            return None
        with warnings.catch_warnings(action="ignore"):
            with hydra.initialize(version_base=_VERSION_BASE, config_path=None, job_name="import"):
                job = hydra.compose(files.main_name, list(overrides))
            return from_hydra(OmegaConf.to_container(job, resolve=False))
    except MissingConfigException as error:
        files.report_missing(os.path.normpath(error.missing_cfg_file or "").removesuffix(".yaml"))
    except EndlessDefaultsError as error:
        files.report_cycle(error.cycle)
    except RecursionError:
        files.report("extends-form", "these files nest too deeply for Hydra", "flatten them")
    except OverrideParseException as error:
        message = f"`{error.override}` is not an override in Hydra's syntax"
        span = _override_in(str(error.override), overrides)
        files.diagnostics.error("override-syntax", message, span, (), "write `section.key=value`, or `group=name`")
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        # Hydra checks some forms by `assert`, and raises OmegaConf's errors with an empty message.
        first, _, rest = str(error.__cause__ if not str(error) else error).strip().partition("\n")
        message = first or "Hydra does not accept this defaults list"
        if overrides and message.startswith((*_OF_OVERRIDES, *_SWEEPS)):
            span = _override_in(message, overrides)
            if message.startswith(_SWEEPS):
                message, rest = "a sweep over several jobs cannot be imported: choose one value", ""
            files.diagnostics.error("override-path", message, span, (), " ".join(rest.split()) or None)
        else:
            files.report("extends-form", message, " ".join(rest.split()) or FORMS)
    finally:
        use(None)
    return None


def _override_in(message: str, overrides: Sequence[str]) -> Span:
    """Return the span of the argument that a message of Hydra names, else of the first argument."""
    lines = [" ".join(override.split()) for override in overrides]
    source = SourceText(OVERRIDES_NAME, "\n".join(lines), "overrides")
    keys = [line.lstrip("+~").partition("=")[0] for line in lines]
    at = next((index for index, key in enumerate(keys) if f"'{key}'" in message or lines[index] in message), 0)
    start = sum(len(line) + 1 for line in lines[:at])
    return Span(source, start, start + len(lines[at]))


def _search_path(tree: MappingNode, folder: str, environ: Mapping[str, str], diagnostics: Diagnostics) -> Iterator[str]:
    """Yield the folders of `hydra.searchpath`; report those that are unknown or guessed."""
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
    """Yield the folder of the checkout that RLinf's launch scripts search for a file without a search path."""
    listed = tree.entry(DEFAULTS)
    named = [name for name, _ in named_files(tree) if "/" in name]
    guessed = _guessed("/config", "EMBODIED_PATH", folder, named=True)
    if listed is None or guessed is None or all(os.path.isfile(os.path.join(folder, f"{name}.yaml")) for name in named):
        return
    message = f"files are missing beside this one: `{guessed}` is searched, too, by the file's place"
    diagnostics.add(Diagnostic("base-unreadable", Severity.NOTE, message, listed.key.span, ()))
    yield guessed


def _guessed(raw: str, variable: str, folder: str, *, named: bool = False) -> str | None:
    """Return the folder that an unset variable of the search path means in the file's checkout, or None.

    Args:
        raw: the item of the search path.
        variable: the variable; another name has no folder of its own.
        folder: the folder of the file.
        named: whether to try only the variable's folder, and not also the item relative to parent folders.
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


ENDINGS: Final = (".yaml", ".yml")
SCRIPT_ENDINGS: Final = (".sh", ".bash")
# The suffix of a converted file beside its original.
IMPORTED: Final = ".rlinf.yaml"
MAX_FILES: Final = 2000


def read_job(
    name: str, overrides: Sequence[str], search_path: Sequence[str], environ: Mapping[str, str]
) -> tuple[HydraFile | None, Diagnostics]:
    """Read a job file, and compose it with the files of its defaults lists.

    Args:
        name: the file.
        overrides: arguments of Hydra: `group=name` for a group in the searched folders, `key=value`, `+key=value`,
            `~key`.
        search_path: further folders with groups, searched after those of the file.
        environ: the environment for `${oc.env:NAME}` in the search path.

    Returns:
        The composed file, or None after an error, and the findings.

    Raises:
        ConfigError: the file is a shell script.
    """
    diagnostics = Diagnostics()
    if is_script(Path(name)):
        raise ConfigError("this is a shell script, which `rlinf import` does not read", help=instead_of_script(name))
    main = load_source(name, diagnostics)
    tree = None if main is None else read(main, diagnostics)
    if main is None or tree is None or not diagnostics.ok:
        return None, diagnostics
    folder = os.path.dirname(main.name) or "."
    files = JobFiles(main, [folder, *_search_path(tree, folder, environ, diagnostics), *search_path], diagnostics)
    data = _composed(files, overrides)
    if data is None or not diagnostics.ok:
        return None, diagnostics
    composed = tree_of(data, files.tree(files.main_name))
    assert isinstance(composed, MappingNode)
    settings = tree.entry(HYDRA)
    whole = MappingNode(tree.span, (*composed.entries, *([settings] if settings else [])))
    return HydraFile(whole, main) if diagnostics.ok else None, diagnostics


def is_script(file: Path) -> bool:
    """Return whether a file is a script, by its ending or its first two bytes."""
    if file.suffix in SCRIPT_ENDINGS:
        return True
    if not file.is_file():
        return False
    with file.open("rb") as start:
        return start.read(2) == b"#!"


def instead_of_script(name: str) -> str:
    """Return the remedy for a script of verl: the command that writes its job to a file."""
    return (
        f"where verl is installed, `bash {name} --cfg job > job.yaml` writes the job that it starts; then `rlinf import"
        " job.yaml`"
    )


def job_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the job files below a folder, and the other YAML files."""
    files = sorted(
        Path(where) / name
        for where, _, names in os.walk(folder)
        for name in names
        if name.endswith(ENDINGS) and not name.endswith(IMPORTED)
    )[:MAX_FILES]
    jobs: list[Path] = []
    others: list[Path] = []
    named: set[str] = set()
    for file in files:
        quiet = Diagnostics()
        source = load_source(str(file), quiet)
        tree = read(source, quiet) if source is not None else None
        if tree is None:
            # An unreadable file counts as a job, so that it is reported.
            jobs.append(file)
            continue
        # A file that is named without a group is a base, which is itself a job.
        named |= {os.path.realpath(file.parent / f"{name}.yaml") for name, _ in named_files(tree) if "/" in name}
        sections = set(tree.keys())
        is_job = bool(sections & set(JOB_SECTIONS)) or (DEFAULTS in sections and file.parent == folder)
        (jobs if is_job else others).append(file)
    named_by_others = [file for file in jobs if os.path.realpath(file) in named]
    return [file for file in jobs if file not in named_by_others], sorted([*others, *named_by_others])
