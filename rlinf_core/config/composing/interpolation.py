"""Resolution of references in a composed tree (`references.py` has their syntax).

A value that is a single reference becomes a copy of its target; a reference inside a text is replaced by the text of a
scalar. A variable's text is parsed as a plain YAML scalar if it is the whole value. Keys are not resolved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from rlinf_core.config.composing.references import (
    Reference,
    has_references,
    split_references,
    to_path,
)
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.secrets import is_secret
from rlinf_core.config.tree import (
    Composed,
    MappingNode,
    Node,
    NotationError,
    Path,
    ScalarNode,
    SequenceNode,
    Span,
    child,
    children,
    first_line,
    format_path,
    part,
    resolve_plain,
    scalars,
)
from rlinf_core.suggest import did_you_mean

# Limits on the nodes and characters that references may copy in total, and on their depth: far above real files, and
# low enough to stop malicious ones.
MAX_COPIED: Final = 1_000_000
MAX_DEPTH: Final = 120
# Number of references that a note lists.
_LISTED: Final = 4


def interpolate(
    composed: Composed, diagnostics: Diagnostics, environ: Mapping[str, str], only: str | None = None
) -> Composed:
    """Resolve every reference of a tree; unresolvable ones are reported and left unchanged.

    With `only`, just this section and its targets are used: unresolvable references elsewhere become a single note.
    """
    tree = composed.tree
    resolver = _Resolver(tree, diagnostics, environ)
    if only is not None:
        used = tree.entry(only)
        if used is not None:
            resolver.resolve(used.value, (only,), 1)
        resolver.diagnostics = Diagnostics()
    resolved = resolver.resolve(tree, (), 0)
    if only is not None and len(resolver.diagnostics):
        diagnostics.add(_note(resolver.diagnostics, only))
    if not isinstance(resolved, MappingNode):
        return composed
    failed, hidden = _marked(resolved, resolver.failed), _marked(resolved, resolver.secret)
    secret = frozenset(inner for path, node in hidden for inner, _ in scalars(node, path))
    return composed._replace(
        tree=resolved,
        unresolved=composed.unresolved.union(path for path, _ in failed),
        secret=secret,
        referred=frozenset(resolver.referred),
    )


def _note(reports: Diagnostics, section: str) -> Diagnostic:
    first = next(iter(reports))
    texts = list(dict.fromkeys(diagnostic.span.text for diagnostic in reports))
    listed = ", ".join(f"`{text}`" for text in texts[:_LISTED]) + (", …" if len(texts) > _LISTED else "")
    message = f"without `recipe` only `{section}` is read; unresolved references elsewhere: {listed}"
    return Diagnostic("reference-not-checked", Severity.NOTE, message, first.span, first.path, first.message)


class _Use(NamedTuple):
    scalar: ScalarNode
    path: Path
    reference: Reference

    @property
    def text(self) -> str:
        return self.scalar.raw[self.reference.start : self.reference.end]

    @property
    def span(self) -> Span:
        return _piece(self.scalar, self.reference.start, self.reference.end)


class _Resolver:
    """A resolver that visits each node once. Nodes are compared by identity."""

    def __init__(self, tree: MappingNode, diagnostics: Diagnostics, environ: Mapping[str, str]) -> None:
        self.tree = tree
        self.diagnostics = diagnostics
        self.environ = environ
        self.done: dict[Node, Node] = {}
        self.active: dict[ScalarNode, _Use] = {}
        self.failed: set[Node] = set()
        self.secret: set[Node] = set()
        self.referred: set[Path] = set()
        self.sizes: dict[Node, tuple[int, int]] = {}
        self.copied = 0
        self.exploded = False

    def resolve(self, node: Node, path: Path, depth: int) -> Node:
        """Return `node` at `path` without references; `depth` is the current recursion depth."""
        if node in self.done:
            return self.done[node]
        if isinstance(node, ScalarNode):
            result = self._scalar(node, path, depth) if has_references(node.raw) else node
            if node in self.failed:
                return node
        elif isinstance(node, SequenceNode):
            items = tuple([self.resolve(item, (*path, i), depth + 1) for i, item in enumerate(node.items)])
            result = node if items == node.items else SequenceNode(node.span, items)
        else:
            values = [self.resolve(entry.value, (*path, entry.key.raw), depth + 1) for entry in node.entries]
            if all(value is entry.value for value, entry in zip(values, node.entries, strict=True)):
                result = node
            else:
                pairs = zip(node.entries, values, strict=True)
                result = MappingNode(node.span, tuple(replace(entry, value=value) for entry, value in pairs))
        self._finish(node, result)
        return result

    def _finish(self, node: Node, result: Node) -> None:
        self.done[node] = result
        # A result may contain an unescaped `${`, so it must not be resolved again.
        self.done[result] = result

    def _scalar(self, scalar: ScalarNode, path: Path, depth: int) -> Node:
        if scalar in self.failed:
            return scalar
        if scalar in self.active:
            self._report_cycle(scalar)
            return scalar
        try:
            pieces = split_references(scalar.raw)
        except NotationError as error:
            span = _piece(scalar, error.start, error.end)
            self.diagnostics.error("reference-syntax", error.message, span, path, error.help)
            return self._fail(scalar)
        if len(pieces) == 1 and isinstance(pieces[0], Reference):
            use = _Use(scalar, path, pieces[0])
            target = self._target(use, depth)
            return self._fail(scalar) if target is None else self._copy(target, use)
        return self._text(scalar, path, pieces, depth)

    def _text(self, scalar: ScalarNode, path: Path, pieces: list[str | Reference], depth: int) -> ScalarNode:
        text = ""
        secret = False
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            use = _Use(scalar, path, piece)
            target = self._target(use, depth)
            is_null = isinstance(target, ScalarNode) and target.value is None and target.raw and not piece.variable
            if target is not None and (is_null or not isinstance(target, ScalarNode)):
                what = "null" if is_null else "a list" if isinstance(target, SequenceNode) else "a mapping"
                help = 'write `""` there for an empty text' if is_null else "refer to a scalar in it"
                message = f"`{use.text}` is {what}, which cannot be part of a text"
                self.diagnostics.error("reference-in-text", message, use.span, use.path, help)
                return self._fail(scalar)
            if target is None or not self._afford(use, 1 + len(target.raw)):
                return self._fail(scalar)
            text += target.raw
            secret = secret or target in self.secret
        result = ScalarNode(scalar.span, text, text, plain=False)
        if secret:
            self.secret.add(result)
        return result

    def _target(self, use: _Use, depth: int) -> Node | None:
        """Return the resolved target of a reference; None after reporting an error."""
        if depth >= MAX_DEPTH:
            self._too_large(use)
            return None
        self.active[use.scalar] = use
        if use.reference.variable is not None:
            value = self._variable(use, use.reference.variable)
        else:
            value = self._look_up(use, depth)
        self.active.pop(use.scalar)
        return None if value is None or value in self.failed or use.scalar in self.failed else value

    def _variable(self, use: _Use, name: str) -> ScalarNode | None:
        text = self.environ.get(name)
        default = use.reference.default
        if text is None and default is None:
            help = did_you_mean(name, self.environ) or "set it, or add a default before the brace: `:-VALUE`"
            self.diagnostics.error(
                "unknown-variable", f"the environment has no variable `{name}`", use.span, use.path, help
            )
            return None
        raw = text or default or ""
        if any("\ud800" <= character <= "\udfff" for character in raw):
            self.diagnostics.error("not-utf8", f"the variable `{name}` is not UTF-8", use.span, use.path, "correct it")
            return None
        node = ScalarNode(use.scalar.span, raw, resolve_plain(raw))
        self._finish(node, node)
        if is_secret(name, raw):
            self.secret.add(node)
        return node

    def _look_up(self, use: _Use, depth: int) -> Node | None:
        path = to_path(use.reference.steps)
        self.referred.add(path)
        current: Node = self.tree
        for index, segment in enumerate(path):
            # A node on the path may be a reference itself.
            if isinstance(current, ScalarNode):
                current = self.resolve(current, path[:index], depth + 1)
                if current in self.failed:
                    return None
            below = _below(current, segment)
            if below is None:
                self._report_unknown(use, current, path, index)
                return None
            current = below
        resolved = self.resolve(current, path, depth + 1)
        raw = resolved.raw if isinstance(resolved, ScalarNode) else None
        if any(isinstance(segment, str) and is_secret(segment, raw) for segment in path):
            self.secret.add(resolved)
        return resolved

    def _copy(self, target: Node, use: _Use) -> Node:
        """Return a copy of `target` with the span of the reference; its children keep their own spans."""
        size, height = self._measure(target)
        if not self._afford(use, size):
            return self._fail(use.scalar)
        if len(use.path) + height > MAX_DEPTH:
            self._too_large(use)
            return self._fail(use.scalar)
        span = use.scalar.span
        if isinstance(target, ScalarNode):
            copy: Node = ScalarNode(span, target.raw, target.value, target.plain)
        elif isinstance(target, SequenceNode):
            copy = SequenceNode(span, target.items)
        else:
            copy = MappingNode(span, target.entries)
        if target in self.secret:
            self.secret.add(copy)
        return copy

    def _measure(self, node: Node) -> tuple[int, int]:
        if isinstance(node, ScalarNode):
            return 1 + len(node.raw), 0
        measured = self.sizes.get(node)
        if measured is None:
            inner = [self._measure(value) for _, value in children(node)]
            measured = 1 + sum(size for size, _ in inner), 1 + max((height for _, height in inner), default=0)
            if node in self.done:
                self.sizes[node] = measured
        return measured

    def _afford(self, use: _Use, size: int) -> bool:
        self.copied += size
        if self.copied > MAX_COPIED:
            self._too_large(use)
        return self.copied <= MAX_COPIED

    def _fail(self, scalar: ScalarNode) -> ScalarNode:
        self.failed.add(scalar)
        return scalar

    def _report_cycle(self, scalar: ScalarNode) -> None:
        uses = list(self.active.values())
        start = next(i for i, use in enumerate(uses) if use.scalar is scalar)
        circle = uses[start:]
        for use in circle:
            self._fail(use.scalar)
        names = " -> ".join(f"`{format_path(use.path)}`" for use in (*circle, circle[0]))
        related = tuple((use.span, f"`{format_path(use.path)}` refers further") for use in circle[1:])
        first = circle[0]
        message = f"this reference forms a cycle: {names}"
        self.diagnostics.error(
            "reference-cycle", message, first.span, first.path, "set one of them to a literal value", related
        )

    def _report_unknown(self, use: _Use, nearest: Node, path: Path, index: int) -> None:
        segment = path[index]
        above = f"`{format_path(path[:index])}`" if index else "the file"
        help = None
        if isinstance(segment, int):
            if isinstance(nearest, SequenceNode):
                why = f"{above} has {len(nearest.items)} item{'s' * (len(nearest.items) != 1)}, counted from `[0]`"
            else:
                why = f"{above} is not a list"
        elif isinstance(nearest, MappingNode):
            why = f"{above} sets no `{format_path((segment,))}`"
            help = (
                did_you_mean(segment, nearest.keys()) or "a reference can only name what the file or an override sets"
            )
        elif isinstance(nearest, SequenceNode):
            why, help = f"{above} is a list", f"its items are `{format_path(path[:index])}[0]`, ..."
        else:
            why = f"{above} is a single value"
        self.diagnostics.error("unknown-reference", f"`{use.text}` refers to nothing: {why}", use.span, use.path, help)

    def _too_large(self, use: _Use) -> None:
        """Report the first excess only: later ones have the same cause."""
        if self.exploded:
            return
        self.exploded = True
        message = "the references of this file expand to too many values"
        help = f"the limits are {MAX_COPIED:,} values and characters in total, and depth {MAX_DEPTH}"
        self.diagnostics.error("reference-too-large", message, use.span, use.path, help)


def _below(node: Node, segment: str | int) -> Node | None:
    fits = isinstance(segment, int) if isinstance(node, SequenceNode) else isinstance(segment, str)
    return child(node, segment) if fits else None


def _piece(scalar: ScalarNode, start: int, end: int) -> Span:
    """Return the span of a part of a scalar's text, searched for in the file if escapes or folding moved it."""
    exact = part(scalar, start, end)
    if exact is not None:
        return exact
    text = scalar.raw[start:end]
    written = scalar.span.text
    at = -1
    for _ in range(scalar.raw.count(text, 0, start) + 1):
        at = written.find(text, at + 1)
        if at < 0:
            return first_line(scalar)
    return scalar.span.part(at, at + len(text))


def _marked(node: Node, nodes: set[Node], path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield the topmost members of `nodes` at or below `node`, with their paths."""
    if not nodes:
        return
    if node in nodes:
        yield path, node
    else:
        for segment, value in children(node):
            yield from _marked(value, nodes, (*path, segment))
