"""Warnings about keys without effect, by the `no_effect` rules of the models (`rlinf_core.config.model`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from pydantic import BaseModel

from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.model import ConfigModel, IgnoredKeys, WorldSizes
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import Entry, MappingNode, Path, SourceText, child, entry_at, find, is_null, key_span
from rlinf_core.config.validating.model_fields import Validated, fields_at
from rlinf_core.job.load import Job, rules_of
from rlinf_core.job.recipe import Recipe
from rlinf_core.job.report import FindingPlace, Report

NO_EFFECT: Final = "no-effect"
# A file that lacks at most this fraction of all keys was written by rlinf: a run's `config.yaml`, which may lack newer
# keys.
_LEFT_OUT: Final = 0.1


def report_no_effect(job: Job) -> None:
    """Report each key that the user wrote and that has no effect.

    For a run's own `config.yaml`, which holds every default, only errors are reported. Keys that already have an error
    and keys of an extended shipped configuration are skipped.
    """
    if (config := job.partial_config) is not None and job.recipe is not None and job.view is not None:
        with rules_of(job.recipe, job.view, job.diagnostics):
            _report(config, job.world_sizes, job.view, job.diagnostics, _not_of_user(job.recipe, job.sources))


def _report(
    config: BaseModel,
    world_sizes: WorldSizes,
    view: Validated[Any],
    diagnostics: Diagnostics,
    bases: Collection[SourceText],
) -> None:
    report = Report(view, diagnostics)
    wrong = {diagnostic.path for diagnostic in diagnostics if diagnostic.severity is Severity.ERROR}
    dead: dict[Path, _Match] = {}
    for match in _matches(config, world_sizes, view.tree):
        for leaf in _written(view.tree, match.path, config, bases):
            if not _is_read(leaf, view.composed.referred):
                dead.setdefault(leaf, match)
    elsewhere = _read_elsewhere(view.tree, dead)
    by_match: dict[_Match, list[Path]] = {}
    for leaf, match in dead.items():
        if leaf not in elsewhere and leaf not in wrong:
            by_match.setdefault(match, []).append(leaf)
    is_written_out = bool(by_match) and _is_written_out(config)
    for match, leaves in by_match.items():
        changed = any(_is_changed(config, leaf, view.tree) for leaf in leaves)
        severity = match.rule.severity if changed else Severity.NOTE
        if severity is Severity.ERROR or not is_written_out:
            _emit(match, _common(leaves, len(match.path)), severity, report, view.tree)


def _not_of_user(recipe: Recipe, sources: Sequence[SourceText]) -> list[SourceText]:
    """Return the sources of a job that are shipped configurations, unless all are."""
    ours = {os.path.realpath(file) for file in (*shipped_configs().values(), recipe.default_config)}
    shipped = [source for source in sources if source.kind == "file" and os.path.realpath(source.name) in ours]
    return shipped if len(shipped) < len(sources) else []


def _emit(match: _Match, path: Path, severity: Severity, report: Report, tree: MappingNode) -> None:
    """Report keys without effect by one rule, at their common path."""
    rule = match.rule
    causes = [(*match.at, *_path(cause)) for cause in rule.because]
    report(
        FindingPlace(path, (path, *causes)),
        "not-available" if severity is Severity.ERROR else NO_EFFECT,
        f"{_named(tree, path)} has no effect: {rule.reason(match.section)}",
        rule.help,
        severity=severity,
        related=[(cause, f"`{cause[-1]}` is set at") for cause in causes if find(tree, cause)][:1],
    )


def _named(tree: MappingNode, path: Path) -> str:
    """Return the name of a key, after the alias that the file uses, if any."""
    name, span = str(path[-1]), key_span(tree, path)
    written = span.text if span is not None else name
    return f"`{name}`" if written == name or not written.isidentifier() else f"`{written}` (`{name}`)"


@dataclass(frozen=True, eq=False)
class _Match:
    """A key, at `path`, matched by a rule of the section at `at`."""

    rule: IgnoredKeys
    section: BaseModel
    at: Path
    path: Path


def _matches(model: BaseModel, world_sizes: WorldSizes, node: MappingNode, at: Path = ()) -> Iterator[_Match]:
    """Yield the matches of rules with written keys, outer sections first."""
    for rule in type(model).no_effect if isinstance(model, ConfigModel) else ():
        written = [key for key in map(_path, rule.keys) if find(node, key) is not None]
        if written and rule.when(model, world_sizes):
            yield from (_Match(rule, model, at, (*at, *key)) for key in written)
    for name, field in type(model).model_fields.items():
        below, value = child(node, field.alias or name), getattr(model, name)
        if isinstance(value, BaseModel) and isinstance(below, MappingNode):
            yield from _matches(value, world_sizes, below, (*at, field.alias or name))


def _path(key: str) -> Path:
    return tuple(key.split("."))


def _written(tree: MappingNode, top: Path, config: BaseModel, bases: Collection[SourceText]) -> list[Path]:
    """Return the paths of written values at and below a key, except those of `bases` and nulls that mean the
    default."""
    entry = entry_at(tree, top)
    return [
        path
        for path, leaf in (_leaves(entry, top) if entry is not None else ())
        if leaf.key.span.source not in bases and not _says_nothing(leaf, config, path)
    ]


def _says_nothing(entry: Entry, config: BaseModel, path: Path) -> bool:
    if is_null(entry.value):
        owner = _owner(config, path)
        if not isinstance(owner, BaseModel):
            return False
        # Validation drops a null if the default is a value; else null is the default.
        field = type(owner).model_fields.get(str(path[-1]))
        return path[-1] not in owner.model_fields_set or (field is not None and field.get_default() is None)
    return isinstance(entry.value, MappingNode)


def _owner(config: BaseModel, path: Path) -> object:
    owner: object = config
    for segment in path[:-1]:
        owner = getattr(owner, str(segment), None)
    return owner


def _leaves(entry: Entry, path: Path) -> Iterator[tuple[Path, Entry]]:
    if isinstance(entry.value, MappingNode) and entry.value.entries:
        for child in entry.value.entries:
            yield from _leaves(child, (*path, child.key.raw))
    else:
        yield path, entry


def _read_elsewhere(tree: MappingNode, dead: Collection[Path]) -> set[Path]:
    """Return the paths in `dead` whose key in the source, through an alias, also sets a value with effect."""
    if not dead:
        return set()
    places: dict[tuple[int, int], list[Path]] = {}
    for entry in tree.entries:
        for path, leaf in _leaves(entry, (entry.key.raw,)):
            places.setdefault((id(leaf.key.span.source), leaf.key.span.start), []).append(path)
    return {path for paths in places.values() if not all(path in dead for path in paths) for path in paths}


def _is_read(path: Path, referred: Collection[Path]) -> bool:
    """Return whether a reference reads the value at `path`, its parent, or a part of it."""
    return any(path[: len(reference)] == reference or reference[: len(path)] == path for reference in referred)


def _is_changed(config: BaseModel, path: Path, tree: MappingNode) -> bool:
    """Return whether the value at `path` differs from its field's default; True if it is not a field."""
    owner, name = _owner(config, path), str(path[-1])
    if isinstance(owner, Mapping):  # options, of which those that the file sets are kept
        field = fields_at(type(config), path[:-1], tree).get(name)
        value = cast("Mapping[str, Any]", owner).get(name)
    elif isinstance(owner, BaseModel):
        field, value = type(owner).model_fields.get(name), getattr(owner, name, None)
    else:
        return True
    return field is None or value != field.get_default(call_default_factory=True)


def _common(paths: Sequence[Path], least: int) -> Path:
    """Return the longest common prefix of `paths`, of at least `least` segments."""
    first, size = paths[0], len(paths[0])
    while size > least and any(path[:size] != first[:size] for path in paths):
        size -= 1
    return first[:size]


def _is_written_out(config: BaseModel) -> bool:
    """Return whether nearly all keys with a default are written out, as only a program does."""
    written_out = [name in model.model_fields_set for model in _models(config) for name in _defaults(model)]
    return written_out.count(False) <= _LEFT_OUT * len(written_out)


def _models(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models(getattr(value, name))


def _defaults(model: BaseModel) -> Iterator[str]:
    """Yield the fields whose values are no sections or mappings, and neither null nor empty."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if not isinstance(value, BaseModel | Mapping) and value not in (None, (), ""):
            yield name
