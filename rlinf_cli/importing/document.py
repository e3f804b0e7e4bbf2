"""The file being written: sections, values and comments, in order of insertion."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlinf_cli.importing.comments import NO_COMMENTS, Comments
from rlinf_core.config.composing.origins import yaml_text
from rlinf_core.config.tree import Node, Path, ScalarNode, SequenceNode

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
        children: its content by key.
        order: its keys, and remarks (lines of comments) between them.
    """

    children: dict[str | int, FileSection | Value] = field(default_factory=dict[str | int, "FileSection | Value"])
    order: list[str | int | tuple[str, ...]] = field(default_factory=list[str | int | tuple[str, ...]])
    comments: Comments = NO_COMMENTS

    def put(self, path: Path, value: Value) -> None:
        """Set the value at a path; create missing sections."""
        holder = self.section(path[:-1])
        if path[-1] not in holder.children:
            holder.order.append(path[-1])
        holder.children[path[-1]] = value

    def section(self, path: Path) -> FileSection:
        """Return the section at a path; create it if missing."""
        here = self
        for segment in path:
            below = here.children.get(segment)
            if not isinstance(below, FileSection):
                below = FileSection()
                if segment not in here.children:
                    here.order.append(segment)
                here.children[segment] = below
            here = below
        return here

    def remark(self, path: Path, lines: Sequence[str]) -> None:
        """Add a standalone comment at the end of the section at a path, or of its nearest existing parent."""
        here = self
        for segment in path:
            below = here.children.get(segment)
            if not isinstance(below, FileSection):
                break
            here = below
        here.order.append(tuple(lines))

    def has_values(self) -> bool:
        """Return whether it holds anything but comments."""
        return any(isinstance(child, Value) or child.has_values() for child in self.children.values())

    def text(self) -> str:
        """Return the whole file."""
        return "\n".join(_lines(self, 0)) + "\n"


def _lines(section: FileSection, indent: int) -> Iterator[str]:
    blank = " " * indent
    first = True
    for key in section.order:
        if isinstance(key, tuple):
            yield from (f"{blank}{line}" for line in key)
            continue
        child = section.children[key]
        if indent == 0 and not first:
            yield ""
        first = False
        yield from (f"{blank}{line}" for line in child.comments.above)
        if isinstance(child, FileSection) and not child.has_values():
            yield from (f"{blank}{line}" for line in (child.comments.behind,) if line)
            yield from _lines(child, indent)
        elif isinstance(key, int):
            yield from _item(child, indent)
        else:
            yield from _entry(yaml_text(key), child, indent)


def _entry(key: str, child: FileSection | Value, indent: int) -> Iterator[str]:
    blank, behind = " " * indent, f"  {child.comments.behind}" if child.comments.behind else ""
    if isinstance(child, FileSection):
        yield f"{blank}{key}:{behind}"
        yield from _lines(child, indent + 2)
    elif child.items:
        yield f"{blank}{key}:{behind}"
        for comments, text in child.items:
            yield from (f"{blank}  {line}" for line in comments.above)
            yield f"{blank}  - {text}" + (f"  {comments.behind}" if comments.behind else "")
    else:
        yield f"{blank}{key}: {child.text}{behind}"


def _item(child: FileSection | Value, indent: int) -> Iterator[str]:
    blank = " " * indent
    if isinstance(child, Value):
        yield f"{blank}- {child.text}" + (f"  {child.comments.behind}" if child.comments.behind else "")
        return
    begun = False
    for line in _lines(child, indent + 2):
        if not begun and line.lstrip().startswith("#"):
            line = line[2:]
        elif not begun:
            line = f"{blank}- {line[indent + 2 :]}"
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
        text = scalar_text(node.raw, plain=node.plain)
    elif isinstance(node, SequenceNode):
        text = f"[{', '.join(map(short, node.items))}]"
    else:
        text = "{" + ", ".join(f"{entry.key.raw}: {short(entry.value)}" for entry in node.entries) + "}"
    return text


def list_value(items: Sequence[tuple[Comments, str]], comments: Comments) -> Value:
    """Return a list of scalars: in brackets if it fits and no item has a comment."""
    inline = f"[{', '.join(text for _, text in items)}]"
    plain = all(_IN_BRACKETS.fullmatch(text) and not any(comments) for comments, text in items)
    if plain and len(inline) <= 80:
        return Value(inline, (), comments)
    return Value("", tuple(items), comments)
