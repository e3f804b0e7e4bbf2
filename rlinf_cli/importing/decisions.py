"""The decision on each key of a composed file, and the comments that belong to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, get_origin

from pydantic import BaseModel

from rlinf_cli.importing.foreign_names import is_accepted, names_at
from rlinf_cli.importing.project_rules import engine, needs_values
from rlinf_cli.importing.projects import ENGINE_OPTIONS, Project
from rlinf_cli.importing.references import References, UnresolvableError
from rlinf_cli.importing.rule_rows import Rest, reason_of, without_inner
from rlinf_cli.importing.shared_rules import Leaf, LeftOut, NewValue, ReferenceText, Table, Values
from rlinf_cli.importing.sources import HydraFile
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import read
from rlinf_core.config.tree import (
    Entry,
    MappingNode,
    Node,
    Path,
    ScalarNode,
    SequenceNode,
    SourceText,
    Span,
    format_path,
)
from rlinf_core.config.validating.model_fields import fields_at, model_of, types_at

_BEHIND: Final = re.compile(r"[\s,]+(#.*)$")
_BEHIND_KEY: Final = re.compile(r"[\"']?\s*:(?:\s+[&!]\S+)*\s+(#.*)$")
# Directives for Hydra, which are dropped.
_HYDRA: Final = re.compile(r"#\s*@package\b")


class Comments(NamedTuple):
    """The comments of one value: whole lines above it, and the comment after it on its line; each with its `#`."""

    above: tuple[str, ...] = ()
    behind: str = ""


NO_COMMENTS: Final = Comments()


class CommentFinder:
    """The comments of a source."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self._lines = source.text.splitlines()

    @cached_property
    def header(self) -> tuple[str, ...]:
        """The comments at the beginning of the source."""
        numbered = enumerate(self._lines, 1)
        first = next((number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")), 1)
        return tuple(line for line in self._above_line(first) if not line.startswith("#!"))

    def of_entry(self, entry: Entry) -> Comments:
        """Return the comments of a key and its value."""
        span = entry.key.span
        if span.source is not self.source:
            return NO_COMMENTS
        value = entry.value
        on_line = isinstance(value, ScalarNode) or value.span.text.startswith(("[", "{"))
        if on_line and value.span.source is span.source and value.span.start > span.start:
            behind = _behind(value.span, _BEHIND)
        else:
            behind = _behind(span, _BEHIND_KEY)
        return Comments(self._above(span), behind)

    def of_item(self, node: Node) -> Comments:
        """Return the comments of an item of a list; those of a mapping belong to its keys."""
        if not isinstance(node, ScalarNode) or node.span.source is not self.source:
            return NO_COMMENTS
        return Comments(self._above(node.span), _behind(node.span, _BEHIND))

    def at_end(self) -> tuple[str, ...]:
        """Return the comments after the last value."""
        return self._above_line(len(self._lines) + 1)

    def _above(self, span: Span) -> tuple[str, ...]:
        line = span.begin.line
        # In braces or after a dash, the comments above belong to the first value of the line.
        before = span.source.line(line)[: span.begin.column - 1].strip()
        return self._above_line(line) if before in ("", "-", "?", "- -") else ()

    def _above_line(self, number: int) -> tuple[str, ...]:
        """Return the comments between a line and the content before it, across blank lines."""
        block: list[str] = []
        number -= 1
        while number >= 1 and (
            number in self._comments or not self._lines[number - 1].strip() or _is_hydra(self._lines[number - 1])
        ):
            if number in self._comments:
                block.append(self._comments[number])
            number -= 1
        return tuple(reversed(block))

    @cached_property
    def _comments(self) -> dict[int, str]:
        """The comment lines by line number, without lines of multi-line texts and Hydra's directives."""
        text_lines: set[int] = set()
        tree = read(self.source, Diagnostics())
        if tree is not None:
            _mark(tree, text_lines)
        comments_by_line: dict[int, str] = {}
        for number, line in enumerate(self._lines, 1):
            stripped = line.strip()
            if stripped.startswith("#") and number not in text_lines and not _HYDRA.match(stripped):
                comments_by_line[number] = stripped
        return comments_by_line


def _is_hydra(line: str) -> bool:
    return _HYDRA.match(line.strip()) is not None


def _behind(span: Span, pattern: re.Pattern[str]) -> str:
    finish = span.finish
    rest = span.source.line(finish.line)[finish.column - 1 :]
    match = pattern.match(rest)
    return match[1].rstrip() if match else ""


def _mark(node: Node, text_lines: set[int]) -> None:
    """Add the lines of scalars, in which a `#` is text, to `text_lines`."""
    if isinstance(node, ScalarNode):
        text_lines.update(range(node.span.begin.line, node.span.finish.line + (node.span.finish.column > 1)))
    elif isinstance(node, MappingNode):
        for entry in node.entries:
            _mark(entry.key, text_lines)
            _mark(entry.value, text_lines)
    else:
        for item in node.items:
            _mark(item, text_lines)


_NO_CRITIC: Final = "without `adv_estimator: gae` there is no critic"
# A placeholder in an example, such as `robot_ip: ROBOT_IP`, and the endings of keys that have one.
_PLACEHOLDER: Final = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_ENTERED: Final = ("_ip", "_path", "_port", "_serial")
# The beginning of remedies in `foreign_names.py` for keys whose removal loses nothing.
_REMOVED: Final = "remove it: "
# Limits on following references to sections, in levels and in keys, since a few lines can refer to each other forever.
_DEEPEST: Final = 12
_MOST_KEYS: Final = 5_000
_SO_ANYWAY: Final = "it says what is so anyway"


@dataclass
class KeyDecision:
    """A key, the decision on it, and the section for a remark on it."""

    leaf: Leaf
    result: NewValue | LeftOut | tuple[NewValue, ...]
    section: Path
    comments: Comments


@dataclass
class Conversion:
    """The state of one conversion."""

    file: HydraFile
    project: Project
    recipe: str
    model: type[BaseModel]
    rules: Table
    layout: Mapping[Path, Path]
    references: References
    comments: CommentFinder
    steps: list[KeyDecision] = field(default_factory=list[KeyDecision])
    sections: dict[Path, Comments] = field(default_factory=dict[Path, Comments])
    pending: list[str] = field(default_factory=list[str])
    refused: dict[Path, str] = field(default_factory=dict[Path, str])

    def walk(
        self, node: MappingNode, source: Path, target: Path | None, reason: str | None = None, near: Path = ()
    ) -> None:
        """Decide on every key below a section.

        `target` is its path in the new file; None if the section is omitted for `reason`, which is noted in the section
        at `near`.
        """
        renamed = self._components(node, source)
        for entry in node.entries:
            below = (*source, entry.key.raw)
            comments = self.comments.of_entry(entry)
            if not source and comments.above == self.comments.header:
                comments = comments._replace(above=())
            if entry.key.raw in renamed and not renamed[entry.key.raw].name:
                self._all_left_out(entry, below, target or near, renamed[entry.key.raw].why, comments)
                continue
            at, why = self._target(entry, below, target, reason)
            if at is not None and entry.key.raw in renamed:
                at = (*at[:-1], renamed[entry.key.raw].name)
            self._entry(entry.value, below, at, why, near if target is None else target, comments)

    def _entry(
        self, node: Node, source: Path, target: Path | None, reason: str | None, section: Path, comments: Comments
    ) -> None:
        node = self._section_behind(node, source)
        if isinstance(node, MappingNode) and node.entries:
            if target is not None and target not in self.sections and types_at(self.model, target):
                self.sections[target] = self._with_pending(comments)
            else:
                self.pending += [*comments.above, *([comments.behind] if comments.behind else [])]
            self.walk(node, source, target, reason, section)
            return
        if isinstance(node, SequenceNode) and any(not isinstance(item, ScalarNode) for item in node.items):
            if target is not None:
                self.sections.setdefault(target, comments)
            for index, item in enumerate(node.items):
                below = None if target is None else (*target, index)
                self._entry(item, (*source, index), below, reason, section, self.comments.of_item(item))
            return
        leaf = Leaf(source, node, str(node.span) if node.span.source.text else "")
        comments = self._with_pending(comments)
        self.steps.append(KeyDecision(leaf, self._result(leaf, target, reason), section, comments))

    def _with_pending(self, comments: Comments) -> Comments:
        """Return comments, preceded by those of enclosing sections without a counterpart."""
        above, self.pending = (*self.pending, *comments.above), []
        return comments._replace(above=above)

    def _section_behind(self, node: Node, source: Path) -> Node:
        """Return the section to which a value refers; any other value unchanged."""
        is_reference = isinstance(node, ScalarNode) and "${" in node.raw
        if not is_reference or len(source) > _DEEPEST or len(self.steps) > _MOST_KEYS:
            return node
        try:
            target = self.references.section(node, source)
        except UnresolvableError:
            return node
        return target if isinstance(target, MappingNode) else node

    def _result(self, leaf: Leaf, target: Path | None, reason: str | None) -> NewValue | LeftOut | tuple[NewValue, ...]:
        node = leaf.node
        if isinstance(node, ScalarNode) and node.raw == "???":
            return LeftOut("it has no value: the original requires one on the command line")
        if reason in (_NO_CRITIC, _SO_ANYWAY):
            return LeftOut(reason, quiet=True)
        rule = self.rules.get(format_path(leaf.path))
        if rule is not None:
            return rule(leaf, Values(self.references))
        if target is None or reason is not None:
            if reason is None:
                return reason_of(self.project, leaf.path)
            return LeftOut(reason.removeprefix(_REMOVED), quiet=reason.startswith(_REMOVED))
        if target[:2] == ("rollout", "engine_options") and isinstance(node, ScalarNode) and node.value is None:
            return LeftOut("null leaves it to the engine", quiet=True)
        if isinstance(node, ScalarNode) and _PLACEHOLDER.fullmatch(node.raw) and str(target[-1]).endswith(_ENTERED):
            return NewValue(
                target, ReferenceText(f"${{env:{node.raw}}}"), f"is read from the environment variable `{node.raw}`"
            )
        if isinstance(node, ScalarNode | SequenceNode):
            return NewValue(target, node, same=True)
        return LeftOut("it is empty", quiet=True)

    def _target(
        self, entry: Entry, source: Path, target: Path | None, reason: str | None
    ) -> tuple[Path | None, str | None]:
        """Return a key's path in the new file, or None with a reason."""
        name = entry.key.raw
        if source in self.layout:
            return self.layout[source], None
        if self.project is Project.VERL and source[:-1] == ENGINE_OPTIONS:
            used = engine(Values(self.references))
            if source[-1] == used == "vllm":
                return ("rollout", "engine_options"), None
            return None, f"they are not arguments of `{used}`"
        if self.project is Project.VERL and source == ENGINE_OPTIONS:
            return source, None
        if any(known[: len(source)] == source for known in self.layout):
            return source, None
        if self.project is Project.VERL and source == ("distillation",):
            return None, None
        if self.project is Project.VERL and source == ("critic",) and not needs_values(Values(self.references)):
            return None, _NO_CRITIC
        if target is None or reason is not None:
            return None, reason
        if target[:1] == ("cluster",) and len(target) > 1:
            return (*target, name), None
        return self._by_tables(name, target, entry.value)

    def _by_tables(self, name: str, target: Path, value: Node) -> tuple[Path | None, str | None]:
        annotations = types_at(self.model, target)
        if not annotations:
            return None, None
        fields = fields_at(self.model, target)
        if name in fields:
            return (*target, name), None
        if not any(model_of(annotation) for annotation in annotations):
            if any(get_origin(annotation) in (dict, Mapping) for annotation in annotations):
                return (*target, name), None
            return None, None
        known = names_at(annotations)
        ours = known.names.get(name)
        if ours is not None:
            return (*target, ours), None
        idle = {**known.accepted, **known.same}
        if name in idle and is_accepted(value, idle[name], self.file.tree, self.model):
            return None, _SO_ANYWAY
        moved = known.moved.get(name) or known.means.get(name) or known.former.get(name)
        if moved is not None:
            return to_path(parse_path(moved)[0]), None
        return None, known.unavailable.get(name)

    def _components(self, node: MappingNode, source: Path) -> Mapping[str, Rest]:
        """Return the keys of `component_placement` that change."""
        acts = self.recipe != "sft" or self.file.tree.entry("env") is not None
        return without_inner(node, acts=acts) if source == ("cluster", "component_placement") else {}

    def _all_left_out(self, entry: Entry, source: Path, section: Path, reason: str, comments: Comments) -> None:
        leaf = Leaf(source, entry.value, str(entry.key.span))
        self.steps.append(KeyDecision(leaf, LeftOut(reason), section, comments))


def puts(result: NewValue | LeftOut | tuple[NewValue, ...]) -> tuple[NewValue, ...]:
    """Return the values that a key sets in the new file."""
    return result if isinstance(result, tuple) else (result,) if isinstance(result, NewValue) else ()
