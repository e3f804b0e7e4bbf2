"""Validation of a tree as a model: every pydantic error becomes a finding at its place.

One mistake must not hide the next: invalid values are removed from the tree and the rest is validated again, so that
the rules about relations between values can check it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from rlinf_core.config.diagnostics import MOST, Diagnostic, Diagnostics, Severity
from rlinf_core.config.foreign_names import foreign_names
from rlinf_core.config.secrets import is_secret
from rlinf_core.config.tree import (
    Composed,
    MappingNode,
    Node,
    Path,
    ScalarNode,
    Span,
    child,
    entry_at,
    find,
    format_path,
    naming,
    part,
    place,
    to_data,
)
from rlinf_core.config.validating import key_findings
from rlinf_core.config.validating.key_findings import keys_at, meant_key, torn_key
from rlinf_core.config.validating.kinds import meant_kind, without_keys_of_others
from rlinf_core.config.validating.model_fields import Cuts, Kept, Validated, cut, fields_at, original, prefixes
from rlinf_core.config.validating.validation_messages import is_our_code, words_for, wrong_kind

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

# Each round removes at least one level of the tree around a mistake; no valid configuration is nested deeper.
_ROUNDS: Final = 16
ANY_ITEM: Final = "*"
StandIns: TypeAlias = Mapping[Path, "int | str | Callable[[str], str | None]"]


def validate(
    model_type: type[M], composed: Composed, diagnostics: Diagnostics, *, stand_ins: StandIns | None = None
) -> Validated[M]:
    """Validate a whole file as a `model_type`, reporting every mistake at its place.

    Args:
        model_type: the model of the whole file.
        composed: the file.
        diagnostics: receives the findings.
        stand_ins: substitutes for required values that are missing or wrong, or functions of the written text; `*` in a
            path matches any index. Rules check `Validated.damaged` before they trust a value.
    """
    rounds = _Rounds(model_type, composed, composed.tree, diagnostics, stand_ins or {})
    model = rounds.begin()
    for _ in range(_ROUNDS):
        if rounds.hopeless or model is not None:
            break
        model = rounds.run()
    pruned, misspelt = frozenset(rounds.pruned), frozenset(rounds.misspelt)
    return Validated(model, rounds.tree, pruned, rounds.kept, rounds.composed, misspelt)


@dataclass(slots=True)
class _Rounds(Generic[M]):
    """The state of one `validate`: the remaining tree, and the paths removed from it."""

    model_type: type[M]
    composed: Composed
    tree: MappingNode
    diagnostics: Diagnostics
    stand_ins: StandIns
    pruned: set[Path] = field(default_factory=set[Path])
    misspelt: set[Path] = field(default_factory=set[Path])
    kept: Kept = field(default_factory=dict[Path, list[int]])
    hopeless: bool = False
    unknown_keys: int = 0

    @property
    def whole(self) -> MappingNode:
        return self.composed.tree

    def begin(self) -> M | None:
        """Move keys to where they are read, remove unresolved values, and return the model if everything is valid."""
        model, errors = self._attempt()
        moved: Collection[Path] = ()
        if any(located.kind == "extra_forbidden" for located in errors):
            source = foreign_names()
            renamed = source.with_our_names(self.model_type, self.whole, self.diagnostics) if source else None
            if renamed is not None and renamed.tree is not self.whole:
                # Keys that left their section, which is gone; others have another place within it.
                moved = [now for before, now in renamed.moved.items() if now[: len(before) - 1] != before[:-1]]
                self.composed = self.composed.moved(renamed.tree, renamed.path)
                self.tree = self.whole
                model, errors = self._attempt()
        # A kind that accepts any keys raises no error for keys that a lower layer wrote for another kind.
        if any(located.kind == "extra_forbidden" for located in errors) or _is_layered(self.whole):
            kept = without_keys_of_others(self.model_type, self.whole, self.diagnostics, moved)
            if kept is not self.whole:
                self.composed, self.tree = self.composed._replace(tree=kept), kept
                model, errors = self._attempt()
        unresolved = self.composed.unresolved
        if not unresolved:
            return model
        # An unknown key is reported even if its value is also wrong.
        holders = prefixes(unresolved)
        unknown = {error.path for error in errors if error.kind == "extra_forbidden" and error.path in holders}
        self._leave_out(unresolved, unknown)
        return None

    def _leave_out(self, unresolved: Collection[Path], unknown: Collection[Path]) -> None:
        for path in unknown:
            self.diagnostics.add(self._unknown_key(path))
        cuts: Cuts = {path: self._stand_in(path) for path in unresolved}
        self.pruned.update(cuts)
        self.hopeless = () in cuts
        if not self.hopeless:
            self.tree = cut(self.tree, {**cuts, **dict.fromkeys(unknown)}, self.kept)

    def _attempt(self) -> tuple[M | None, list[_Located]]:
        try:
            return self.model_type.model_validate(to_data(self.tree)), []
        except ValidationError as failure:
            return None, [_locate(self.model_type, self.tree, error) for error in failure.errors(include_url=False)]

    def run(self) -> M | None:
        model, errors = self._attempt()
        if model is not None:
            return model
        # Removals in earlier rounds cause errors in parents, which are not reported.
        earlier = prefixes(self.pruned)
        # `{a:1}` is a bad key with no value: one mistake.
        bad_keys = {located.path for located in errors if located.of_key}
        errors = [
            error for error in errors if error.of_key or error.error["input"] is not None or error.path not in bad_keys
        ]
        reports: list[Diagnostic] = []
        cuts: Cuts = {}
        for group in _by_union(errors):
            if original(group[0].path, self.kept) not in earlier:
                reports += self._report(group)
            for located in group:
                self._plan_cut(located, cuts)
        for report in _merge_aliases(self._without_twins(reports), self.whole):
            self.diagnostics.add(report)
        self.hopeless = () in cuts
        if not self.hopeless:
            self.tree = cut(self.tree, cuts, self.kept)
        return None

    def _plan_cut(self, located: _Located, cuts: Cuts) -> None:
        path = located.path
        full_path = original(path, self.kept)
        if located.kind == "extra_forbidden":
            cuts.setdefault(path, None)
            return
        stand_in = None if full_path in self.pruned else self._stand_in(full_path)
        self.pruned.add(full_path)
        if stand_in is None and located.kind == "missing":
            path = path[:-1]
            while find(self.tree, path) is None:
                path = path[:-1]
            self.pruned.add(original(path, self.kept))
        cuts[path] = stand_in

    def _stand_in(self, path: Path) -> ScalarNode | None:
        pattern = tuple(ANY_ITEM if isinstance(segment, int) else segment for segment in path)
        value = self.stand_ins.get(pattern)
        if value is None and path:
            value = meant_kind(self.model_type, self.whole, path)
        if callable(value):
            written = find(self.whole, path)
            value = value(written.raw) if isinstance(written, ScalarNode) else None
        return None if value is None else ScalarNode(naming(self.whole, path), str(value), value)

    def _unknown_key(self, path: Path) -> Diagnostic:
        self.unknown_keys += 1
        # Guessing is slow, and further findings of this code are not shown.
        if self.unknown_keys > MOST:
            return Diagnostic("unknown-key", Severity.ERROR, "", naming(self.whole, path))
        return key_findings.unknown_key(self.model_type, self.whole, path)

    def _report(self, group: list[_Located]) -> list[Diagnostic]:
        located = group[0]
        path = original(located.path, self.kept)
        if located.kind == "missing":
            return [key_findings.missing_key(self.model_type, self.whole, path)]
        if located.kind == "extra_forbidden":
            return [self._unknown_key(path)]
        return [self._union_report(group, path) if len(group) > 1 else self._value_report(located, path)]

    def _without_twins(self, reports: list[Diagnostic]) -> list[Diagnostic]:
        """Drop the finding on a missing key if an unknown key is its misspelling: one mistake, one finding."""
        meant: set[Path] = set()
        for report in reports:
            if report.code == "unknown-key" and report.path:
                key = meant_key(self.model_type, self.whole, report.path)
                meant.add((*report.path[:-1], key) if key else report.path)
                if key:
                    self.misspelt.add((*report.path[:-1], key))
        kept = [report for report in reports if report.code != "missing-key" or report.path not in meant]
        return [report for report in kept if not self._is_torn_again(report, kept)]

    def _is_torn_again(self, report: Diagnostic, reports: list[Diagnostic]) -> bool:
        """Return whether an earlier finding has the same hint on a torn key."""
        torn = self._torn_key(report.code, report.path)
        return torn is not None and next(other for other in reports if other.help == torn) is not report

    def _torn_key(self, code: str, path: Path | None) -> str | None:
        return torn_key(self.whole, path) if path and code == "wrong-type" else None

    def _value_report(self, located: _Located, path: Path) -> Diagnostic:
        own = fields_at(self.model_type, path[:-1], self.whole).get(str(path[-1])) if path else None
        holds = [key for key, info in keys_at(self.model_type, self.whole, path).items() if info.is_required()]
        words = words_for(located.error, subject_of(path), own, holds)
        value = find(self.whole, path)
        written = value.raw if isinstance(value, ScalarNode) else None
        if path in self.composed.secret or is_secret(str(path[-1] if path else ""), written):
            words = words.without(value)
        span = located.span(self.whole, path)
        help = self._torn_key(words.code, path) or words.help
        return Diagnostic(words.code, Severity.ERROR, words.message, span, path, help)

    def _union_report(self, group: list[_Located], path: Path) -> Diagnostic:
        for located in group:
            if is_our_code(located.kind) and located.kind != "wrong-type":
                return self._value_report(located, path)
        expected = [str(located.context.get("what", located.kind)) for located in group]
        words = wrong_kind(subject_of(path), expected, group[0].error["input"])
        return Diagnostic(words.code, Severity.ERROR, words.message, place(self.whole, path), path, words.help)


def _is_layered(node: MappingNode) -> bool:
    """Return whether the keys of a mapping come from several layers, such as a file and the overrides."""
    layers = {entry.key.span.source.layer for entry in node.entries}
    return len(layers) > 1 or any(_is_layered(e.value) for e in node.entries if isinstance(e.value, MappingNode))


def subject_of(path: Path) -> str:
    """Return the name of the value at a path in messages: its key, and an index if it is a list item."""
    if not path:
        return "the file"
    start = len(path) - 1
    while start > 0 and isinstance(path[start], int):
        start -= 1
    return f"`{format_path(path[start:])}`"


class _Located(NamedTuple):
    """A pydantic error with its path in the validated tree.

    `union` is the first segment of its `loc` that is not part of the path, usually a member of a union, with the path
    before it.
    """

    error: ErrorDetails
    path: Path
    union: tuple[Path, str] | None
    of_key: bool

    @property
    def kind(self) -> str:
        return self.error["type"]

    @property
    def context(self) -> dict[str, Any]:
        return self.error.get("ctx") or {}

    def span(self, tree: MappingNode, path: Path) -> Span:
        """Return the span to underline: the key, the part of a scalar that the validator named, or the value."""
        target: Node | None = find(tree, path)
        fallback = place(tree, path)
        if self.of_key:
            entry = entry_at(tree, path)
            if entry is not None:
                target, fallback = entry.key, entry.key.span
        start, end = self.context.get("start"), self.context.get("end")
        if isinstance(start, int) and isinstance(end, int):
            return part(target, start, end) or fallback
        return fallback


def _locate(model: type[BaseModel], tree: MappingNode, error: ErrorDetails) -> _Located:
    """Follow `loc` through the tree, skipping segments that are not children: members of unions, tags, validators.

    A missing key may be in a section that the file omits.
    """
    loc = error["loc"]
    steps, last = (loc[:-1], loc[-1:]) if error["type"] == "missing" else (loc, ())
    path: Path = ()
    union: tuple[Path, str] | None = None
    node: Node = tree
    for segment in steps:
        below = child(node, segment)
        if below is not None:
            node = below
            path = (*path, segment)
        elif last and isinstance(segment, str) and segment in fields_at(model, path):
            node = MappingNode(node.span, ())
            path = (*path, segment)
        elif union is None and segment != "[key]":
            union = (path, str(segment))
    return _Located(error, (*path, *last), union, bool(loc) and loc[-1] == "[key]")


def _by_union(errors: list[_Located]) -> list[list[_Located]]:
    """Group the errors of all members of one union at one value; every other error is a separate group.

    If one member matched deeper than the others, only its errors are informative.
    """
    unions: dict[Path, list[_Located]] = {}
    groups: list[list[_Located]] = []
    for located in errors:
        if located.union is None:
            groups.append([located])
        else:
            unions.setdefault(located.union[0], []).append(located)
    for at, members in unions.items():
        labels = {located.union[1] for located in members if located.union}
        deeper = [located for located in members if len(located.path) > len(at)]
        if len(labels) == 1 or deeper:
            groups += [[located] for located in deeper or members]
        else:
            groups.append(members)
    return groups


def _merge_aliases(reports: list[Diagnostic], tree: MappingNode) -> list[Diagnostic]:
    """Return one finding for a mistake found twice through an alias, with the other use as related place."""
    merged: dict[tuple[str, int, int, int], Diagnostic] = {}
    for report in reports:
        span = report.span
        key = (report.code, id(span.source), span.start, span.end)
        first = merged.setdefault(key, report)
        if first.path != report.path:
            use = _use_of_alias(tree, first.path, report.path)
            if use is not None:
                merged[key] = first._replace(related=(*first.related, (use, "also used at")))
    return list(merged.values())


def _use_of_alias(tree: MappingNode, first: Path, second: Path) -> Span | None:
    """Return the key or item with the alias: where the second of two paths to a node diverges from the first."""
    for size in range(min(len(first), len(second)), 0, -1):
        here, there = naming(tree, second[:size]), naming(tree, first[:size])
        if (here.source, here.start) != (there.source, there.start):
            # An alias follows its anchor. In `actor,env: 0-3` the shared value follows both keys, so it is no alias.
            value = find(tree, second[:size])
            return here if value is None or value.span.start < here.start else None
    return None
