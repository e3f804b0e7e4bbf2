"""The file being written: sections, values and comments in order of insertion, and remarks on omitted keys."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlinf_cli.importing.decisions import NO_COMMENTS, Comments, Conversion, KeyDecision, puts
from rlinf_cli.importing.references import UnresolvableError
from rlinf_cli.importing.shared_rules import Added, Fate, KeyOutcome, Leaf, LeftOut, NewValue, ReferenceText
from rlinf_core.config.composing.origins import inline, yaml_text
from rlinf_core.config.tree import Node, Path, ScalarNode, SequenceNode, format_path

WIDTH: Final = 120
# Text that needs no quotes in a bracketed list.
_IN_BRACKETS: Final = re.compile(r"[\w./+-]+|\"[^\"]*\"")


@dataclass
class Value:
    """A value as YAML: one line, or several items of a list."""

    text: str = ""
    items: tuple[tuple[Comments, str], ...] = ()
    comments: Comments = NO_COMMENTS


@dataclass
class FileSection:
    """A mapping, or a list if the keys are numbers.

    Attributes:
        children: its content by key, and remarks, which are lines of comments, each by a unique object.
    """

    children: dict[object, FileSection | Value | tuple[str, ...]] = field(
        default_factory=dict[object, "FileSection | Value | tuple[str, ...]"]
    )
    comments: Comments = NO_COMMENTS

    def put(self, path: Path, value: Value) -> None:
        """Set the value at a path; create missing sections."""
        self.section(path[:-1]).children[path[-1]] = value

    def section(self, path: Path) -> FileSection:
        """Return the section at a path; create it if missing."""
        here = self
        for segment in path:
            below = here.children.get(segment)
            if not isinstance(below, FileSection):
                below = here.children[segment] = FileSection()
            here = below
        return here

    def nearest(self, path: Path) -> tuple[FileSection, bool]:
        """Return the section at a path, or its nearest existing parent, and whether the path exists."""
        here = self
        for segment in path:
            below = here.children.get(segment)
            if not isinstance(below, FileSection):
                return here, False
            here = below
        return here, True

    def remark(self, path: Path, lines: Sequence[str]) -> None:
        """Add a standalone comment at the end of the section at a path, or of its nearest existing parent."""
        self.nearest(path)[0].children[object()] = tuple(lines)

    def has_values(self) -> bool:
        """Return whether the section holds a value."""
        children = self.children.values()
        return any(
            isinstance(child, Value) or (isinstance(child, FileSection) and child.has_values()) for child in children
        )

    def text(self) -> str:
        """Return the whole file."""
        return "\n".join(_lines(self, 0)) + "\n"


def _lines(section: FileSection, indent: int) -> Iterator[str]:
    blank = " " * indent
    first = True
    for key, child in section.children.items():
        if isinstance(child, tuple):
            yield from (f"{blank}{line}" for line in child)
            continue
        if indent == 0 and not first:
            yield ""
        first = False
        yield from (f"{blank}{line}" for line in child.comments.above)
        behind = f"  {child.comments.behind}" if child.comments.behind else ""
        if isinstance(child, FileSection) and not child.has_values():
            yield from (f"{blank}{line}" for line in (child.comments.behind,) if line)
            yield from _lines(child, indent)
        elif isinstance(key, int):
            yield from [f"{blank}- {child.text}{behind}"] if isinstance(child, Value) else _item(child, indent)
        elif isinstance(child, Value) and not child.items:
            yield f"{blank}{yaml_text(str(key))}: {child.text}{behind}"
        else:
            yield f"{blank}{yaml_text(str(key))}:{behind}"
            yield from _lines(child, indent + 2) if isinstance(child, FileSection) else _items(child, f"{blank}  ")


def _items(value: Value, blank: str) -> Iterator[str]:
    for comments, text in value.items:
        yield from (f"{blank}{line}" for line in comments.above)
        yield f"{blank}- {text}" + (f"  {comments.behind}" if comments.behind else "")


def _item(child: FileSection, indent: int) -> Iterator[str]:
    begun = False
    for line in _lines(child, indent + 2):
        if not begun and line.lstrip().startswith("#"):
            line = line[2:]
        elif not begun:
            line = f"{' ' * indent}- {line[indent + 2 :]}"
            begun = True
        yield line


def left_out(reason: str, lines: Sequence[str]) -> list[str]:
    """Return the remark on keys that were not carried over, with the reason."""
    words = textwrap.wrap(f"Not carried over: {reason}", WIDTH - 14, break_on_hyphens=False, break_long_words=False)
    return [f"# {word}" for word in words] + [f"#     {line}" for line in lines]


def scalar_text(raw: str, *, plain: bool) -> str:
    """Return a scalar as YAML."""
    if not plain or "\n" in raw:
        return yaml_text(raw)
    return raw or "null"


def short(node: Node) -> str:
    """Return a value on one line, roughly as written."""
    if isinstance(node, ScalarNode):
        return scalar_text(node.raw, plain=node.plain)
    if isinstance(node, SequenceNode):
        return f"[{', '.join(map(short, node.items))}]"
    return "{" + ", ".join(f"{entry.key.raw}: {short(entry.value)}" for entry in node.entries) + "}"


def list_value(items: Sequence[tuple[Comments, str]], comments: Comments) -> Value:
    """Return a list of scalars: in brackets if it fits and no item has a comment."""
    inline = f"[{', '.join(text for _, text in items)}]"
    plain = all(_IN_BRACKETS.fullmatch(text) and not any(comments) for comments, text in items)
    if plain and len(inline) <= 80:
        return Value(inline, (), comments)
    return Value("", tuple(items), comments)


def written(conversion: Conversion, added: Sequence[Added]) -> tuple[str, list[KeyOutcome]]:
    """Return the text of the new file, and the outcome for each key."""
    document = FileSection()
    name = os.path.basename(conversion.file.main.name)
    opening = (f"# From `{name}` of {conversion.project}, by `rlinf import`.", *conversion.comments.header)
    document.put(("recipe",), Value(conversion.recipe, (), Comments(opening)))
    names = {
        step.leaf.path: put.path
        for step in conversion.steps
        for put in puts(step.result)
        if put.same and put.path not in conversion.refused
    }
    # The cluster comes first, and other sections follow in the order of the old file.
    sections = [put.path[:1] for step in conversion.steps for put in puts(step.result) if len(put.path) > 1]
    for path in (("cluster",), *sections):
        document.section(path)
    outcomes: list[KeyOutcome] = []
    remarks: dict[tuple[Path, str], list[str]] = {}
    for step in conversion.steps:
        outcome, lines = _one(conversion, step, names, document)
        outcomes.append(outcome)
        if lines and outcome.reason:
            remarks.setdefault((step.section, outcome.reason), []).extend(lines)
    explained: set[str] = set()
    for extra in added:
        if extra.path not in conversion.refused:
            listed = isinstance(extra.value, list)
            text = f"[{', '.join(map(inline, extra.value))}]" if listed else _plain(extra.value)
            above = () if extra.why in explained else (f"# Added: {extra.why}",)
            explained.add(extra.why)
            document.put(extra.path, Value(text, (), Comments(above)))
    for path, comments in conversion.sections.items():
        section, is_there = document.nearest(path)
        if is_there:
            section.comments = comments
        elif any(comments):
            document.remark(path[:-1], [*comments.above, *([comments.behind] if comments.behind else [])])
    for (section, reason), lines in remarks.items():
        document.remark(section, left_out(reason, lines))
    end = conversion.comments.at_end()
    if end:
        document.remark((), end)
    return document.text(), outcomes


def _one(
    conversion: Conversion, step: KeyDecision, names: Mapping[Path, Path], document: FileSection
) -> tuple[KeyOutcome, list[str]]:
    """Write one key; return its outcome, and its lines in the remark if it was omitted."""
    leaf, result = step.leaf, step.result
    if isinstance(result, LeftOut):
        return _lost(step, result.reason, Fate.NOT_NEEDED if result.quiet else Fate.LEFT_OUT)
    notes: list[str] = []
    targets: list[str] = []
    for put in puts(result):
        refused = conversion.refused.get(put.path)
        if refused is not None:
            return _lost(step, refused)
        try:
            value, note = _value(conversion, put, leaf, names)
        except UnresolvableError as error:
            return _lost(step, str(error))
        news = [text for text in (put.note, note) if text]
        changed = tuple(f"# Meaning changed: {text}" for text in news)
        value.comments = step.comments._replace(above=(*step.comments.above, *changed))
        document.put(put.path, value)
        targets.append(format_path(put.path))
        notes += news
    same = targets == [leaf.name]
    fate = Fate.CARRIED if same else Fate.RENAMED
    return KeyOutcome(leaf.name, fate, tuple(targets), None, "; ".join(notes) or None, leaf.place), []


def _lost(step: KeyDecision, reason: str, fate: Fate = Fate.LEFT_OUT) -> tuple[KeyOutcome, list[str]]:
    leaf = step.leaf
    kept = [*step.comments.above, f"{leaf.name}: {short(leaf.node)}"]
    if step.comments.behind:
        kept[-1] += f"  {step.comments.behind}"
    return KeyOutcome(leaf.name, fate, (), reason, None, leaf.place), kept


def _value(conversion: Conversion, put: NewValue, leaf: Leaf, names: Mapping[Path, Path]) -> tuple[Value, str | None]:
    """Return a value as YAML with rlinf references, and a note on any change of meaning."""
    value = put.value
    if isinstance(value, ScalarNode):
        text, note = _scalar(conversion, value, leaf.path, names)
        return Value(text), note
    if isinstance(value, SequenceNode):
        items: list[tuple[Comments, str]] = []
        notes: list[str] = []
        for index, item in enumerate(value.items):
            assert isinstance(item, ScalarNode)
            text, note = _scalar(conversion, item, (*leaf.path, index), names)
            items.append((conversion.comments.of_item(item), text))
            notes += [note] if note else []
        return list_value(items, Comments()), "; ".join(notes) or None
    if isinstance(value, list):
        return Value(f"[{', '.join(map(inline, value))}]"), None
    return Value(_plain(value)), None


def _plain(value: str | int | float | bool | None) -> str:
    return value if isinstance(value, ReferenceText) else inline(value)


def _scalar(conversion: Conversion, node: ScalarNode, path: Path, names: Mapping[Path, Path]) -> tuple[str, str | None]:
    if "${" not in node.raw:
        return scalar_text(node.raw, plain=node.plain), None
    rewritten = conversion.references.rewritten(node, path, names)
    return scalar_text(rewritten.raw, plain=rewritten.plain), rewritten.note
