"""Command-line overrides: the arguments `section.key=value` and `~section.key`.

`references.parse_path` parses the path; the value is YAML, and `key=` sets null. A mapping is merged with an existing
one; other values replace. Missing parents are created. All arguments form one source, one per line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rlinf_core.config.composing.references import Step, has_references, parse_path, to_path
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import COMPONENT_PLACEMENT, read_value, split_components
from rlinf_core.config.tree import (
    OVERRIDES_NAME,
    Entry,
    MappingNode,
    Node,
    NotationError,
    Path,
    ScalarNode,
    SequenceNode,
    SourceText,
    Span,
    format_path,
    is_null,
    merge,
    name_pieces,
)
from rlinf_core.suggest import did_you_mean

# Deeper than any configuration, and shallow enough for recursion in later stages.
_MAX_STEPS: Final = 50
_FORM: Final = "write `section.key=value`, or `~section.key` to delete"


class Override(NamedTuple):
    """One argument, at `span`, that sets `value` at the path `steps` (offsets in the source); None deletes."""

    span: Span
    steps: tuple[Step, ...]
    value: Node | None

    @property
    def path(self) -> Path:
        return to_path(self.steps)

    def step_span(self, index: int) -> Span:
        return Span(self.span.source, self.steps[index].start, self.steps[index].end)


def parse_overrides(arguments: Sequence[str], diagnostics: Diagnostics) -> tuple[SourceText | None, list[Override]]:
    """Parse the arguments. Invalid ones are reported and skipped.

    Returns:
        The source of all spans, None without arguments; and the overrides in order.
    """
    if not arguments:
        return None, []
    lines = ["".join(map(_shown, argument)) for argument in arguments]
    source = SourceText(OVERRIDES_NAME, "\n".join(lines), "overrides")
    overrides: list[Override] = []
    start = 0
    for argument, line in zip(arguments, lines, strict=True):
        override = _parse(argument, Span(source, start, start + len(line)), diagnostics)
        if override is not None:
            overrides.append(override)
        start += len(line) + 1
    _warn_of_shadowed(overrides, diagnostics)
    return source, [single for override in overrides for single in _by_component(override, diagnostics)]


def apply_overrides(tree: MappingNode, overrides: Sequence[Override], diagnostics: Diagnostics) -> MappingNode:
    """Return `tree` with the overrides applied in order. Inapplicable ones are reported and skipped."""
    for override in overrides:
        try:
            changed = _change(tree, override, 0)
        except _RefusedError as refusal:
            diagnostics.add(refusal.args[0])
        else:
            tree = changed if isinstance(changed, MappingNode) else tree
    return tree


def _by_component(override: Override, diagnostics: Diagnostics) -> Iterator[Override]:
    """Yield an override for each component that its path or its value names together, as in `actor,env=0-3`."""
    span, steps, value = override
    value = None if value is None else split_components(value, override.path, diagnostics)
    at = len(COMPONENT_PLACEMENT)
    name = steps[at].segment if override.path[:at] == COMPONENT_PLACEMENT and len(steps) > at else 0
    pieces = name_pieces(name) if isinstance(name, str) else []
    if not all(piece.name for piece in pieces) or len(pieces) < 2:
        yield Override(span, steps, value)
        return
    quote = (steps[at].end - steps[at].start - len(str(name))) // 2
    start = steps[at].start + quote
    for piece in pieces:
        step = Step(piece.name, start + piece.start, start + piece.end)
        yield Override(span, (*steps[:at], step, *steps[at + 1 :]), value)


def _shown(character: str) -> str:
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in ("Cc", "Cs") else character


def _parse(argument: str, span: Span, diagnostics: Diagnostics) -> Override | None:
    def refuse(code: str, message: str, start: int, end: int, help: str | None, path: Path = ()) -> None:
        """Report a mistake; the override is then None."""
        diagnostics.error(code, message, span.part(start, end), path, help)

    for at, character in enumerate(argument):
        if _shown(character) != character:
            kind = "a line end" if character in "\r\n" else "a control character or a byte that is not UTF-8"
            return refuse(
                "override-syntax", f"an override cannot contain {kind}", at, at + 1, "set such a value in the file"
            )
    delete = argument.startswith("~")
    plus = len(argument) - len(argument.lstrip("+"))
    if plus:
        help = f"write `{argument[plus:]}`: keys missing from the file can be set like any other"
        help = help if argument[plus:] else _FORM
        return refuse("override-plus", f"`{argument[:plus]}` is not needed here", 0, plus, help)
    try:
        steps, end = parse_path(argument, int(delete), stop="=")
    except NotationError as error:
        return refuse("override-syntax", error.message, error.start, error.end, error.help or _FORM)
    steps = tuple(Step(step.segment, span.start + step.start, span.start + step.end) for step in steps)
    path = to_path(steps)
    if len(steps) > _MAX_STEPS:
        return refuse(
            "override-path", f"a path has at most {_MAX_STEPS} steps", steps[_MAX_STEPS].start - span.start, end, None
        )
    if delete and end < len(argument):
        help = f"write `{argument[:end]}` to delete it, or `{argument[1:]}` to set it"
        return refuse("override-syntax", "`~` deletes, so no value can follow", end, len(argument), help, path)
    if delete:
        return Override(span, steps, None)
    if end == len(argument):
        return refuse("override-syntax", f"`{argument}` sets nothing: it has no `=`", 0, end, _FORM, path)
    if path[0] == "extends":
        help = "write it in the file, or make a file that extends both"
        return refuse("override-path", "`extends` cannot be overridden", 0, steps[0].end - span.start, help, path[:1])
    value = _read(Span(span.source, span.start + end + 1, span.end), path, diagnostics)
    return None if value is None else Override(span, steps, value)


def _read(span: Span, path: Path, diagnostics: Diagnostics) -> Node | None:
    if not span.text.strip():
        return ScalarNode(Span(span.source, span.start, span.start), "", None)
    value = read_value(span.source, span.start, span.end, diagnostics)
    if value is None:
        return None
    lost = _lost_part(span, value)
    if lost is not None:
        what = "would be dropped as a comment" if lost.text[0] == "#" else "has a meaning in YAML, and would be dropped"
        help = "quote the value inside the quotes of the shell, as in `'key=\"a #1\"'`"
        diagnostics.error("override-value", f"`{lost.text}` {what}", lost, path, help)
        return None
    glued = _glued_key(value)
    if glued is None:
        return value
    name, _, text = glued.raw.partition(":")
    message = f"`{glued.raw}` is one word in YAML, so this sets a key of that name to null"
    help = f"write a space after the colon: `{name}: {text}`"
    diagnostics.error("override-value", message, glued.span, path, help)
    return None


def _lost_part(span: Span, value: Node) -> Span | None:
    """Return the part of an argument's value that YAML drops: a comment, or the sign of an anchor or a block text."""
    sign = re.match(r"\s*([&|>]\S*)", span.text)
    comment = re.compile(r"(?:^|\s)(#.*)").search(span.text, value.span.end - span.start)
    match = sign or comment
    return None if match is None else span.part(*match.span(1))


def _glued_key(node: Node) -> ScalarNode | None:
    """Return the first key like `a:1` without a value, which Hydra reads as `a: 1` but YAML does not."""
    if isinstance(node, SequenceNode):
        return next((glued for item in node.items if (glued := _glued_key(item))), None)
    if isinstance(node, MappingNode):
        for key, value in ((entry.key, entry.value) for entry in node.entries):
            empty = isinstance(value, ScalarNode) and value.value is None and not value.raw
            glued = key if empty and key.plain and ":" in key.raw.rstrip(":") else _glued_key(value)
            if glued is not None:
                return glued
    return None


def _warn_of_shadowed(overrides: Sequence[Override], diagnostics: Diagnostics) -> None:
    for index, later in enumerate(overrides):
        if isinstance(later.value, MappingNode):
            continue
        for earlier in overrides[:index]:
            if earlier.value is not None and earlier.path[: len(later.path)] == later.path:
                message = f"`{earlier.span.text}` has no effect: `{later.span.text}` comes after it"
                help = "remove one of them"
                diagnostics.add(
                    Diagnostic("override-shadowed", Severity.WARNING, message, earlier.span, earlier.path, help)
                )


class _RefusedError(Exception):
    """An override that does not match the tree, with the finding."""


def _refused(
    override: Override, index: int, message: str, help: str | None, related: tuple[tuple[Span, str], ...] = ()
) -> _RefusedError:
    """Return the error for an override that does not match the tree at step `index` of its path."""
    span, path = override.step_span(index), override.path[: index + 1]
    return _RefusedError(Diagnostic("override-path", Severity.ERROR, message, span, path, help, related))


def _change(node: Node | None, override: Override, depth: int) -> Node | None:
    """Return `node`, `depth` steps down (None if missing), with the override applied; None if that deletes it."""
    if depth == len(override.steps):
        value = override.value
        return value if node is None or value is None else merge(node, value)
    segment = override.steps[depth].segment
    if isinstance(segment, int):
        return _change_item(node, segment, override, depth)
    if node is None or is_null(node):
        # A missing or empty value becomes a mapping.
        start = override.steps[depth].start
        node = MappingNode(Span(override.span.source, start, override.span.end), ())
    if not isinstance(node, MappingNode):
        raise _no_mapping(node, override, depth)
    return _change_entry(node, segment, override, depth)


def _no_mapping(node: ScalarNode | SequenceNode, override: Override, depth: int) -> _RefusedError:
    above = format_path(override.path[:depth])
    if isinstance(node, SequenceNode):
        kind, help = "a list", f"its items are `{above}[0]`, ..."
    elif has_references(node.raw):
        kind, help = f"the reference `{node.raw}`", f"override its target, or write `{above}={{...}}`"
    else:
        kind, help = "a single value", f"`{above}=...` replaces it"
    message = f"`{above}` is {kind}, it has no key `{format_path((override.path[depth],))}`"
    return _refused(override, depth, message, help, ((node.span, f"`{above}` is set at"),))


def _change_item(node: Node | None, index: int, override: Override, depth: int) -> Node:
    above = format_path(override.path[:depth])
    if not isinstance(node, SequenceNode):
        message = f"`{above}` {'is not set' if node is None else 'is not a list'}, it has no item `[{index}]`"
        raise _refused(override, depth, message, f"`{above}=[...]` sets a whole list")
    if index >= len(node.items):
        last = len(node.items) - 1
        holds = "is empty" if last < 0 else f"has the items `[0]` to `[{last}]`" if last else "has one item, `[0]`"
        message = f"`{above}` {holds}, none is `[{index}]`"
        help = f"items cannot be added; `{above}=[...]` sets the whole list"
        raise _refused(override, depth, message, help, ((node.span.part(0, 1), f"`{above}` is set at"),))
    changed = _change(node.items[index], override, depth + 1)
    items = (*node.items[:index], *(() if changed is None else (changed,)), *node.items[index + 1 :])
    return SequenceNode(node.span, items)


def _change_entry(node: MappingNode, name: str, override: Override, depth: int) -> MappingNode:
    known = node.entry(name)
    last = depth + 1 == len(override.steps)
    if known is None and override.value is None:
        message = f"there is no `{format_path(override.path[: depth + 1])}` to delete"
        raise _refused(override, depth, message, did_you_mean(name, node.keys()))
    changed = _change(known.value if known else None, override, depth + 1)
    if changed is None:
        return MappingNode(node.span, tuple(entry for entry in node.entries if entry is not known))
    key = known.key if known and not last else ScalarNode(override.step_span(depth), name, name, plain=False)
    new = Entry(key, changed, () if known is None else (known, *known.replaced))
    if known is None:
        return MappingNode(node.span, (*node.entries, new))
    return MappingNode(node.span, tuple(new if entry is known else entry for entry in node.entries))
