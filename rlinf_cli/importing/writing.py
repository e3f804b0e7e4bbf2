"""Writing of the new file: values, comments, and remarks on omitted keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rlinf_cli.importing.comments import Comments
from rlinf_cli.importing.decisions import Conversion, KeyDecision, puts
from rlinf_cli.importing.document import FileSection, Value, left_out, list_value, scalar_text, short
from rlinf_cli.importing.outcomes import Added, Fate, KeyOutcome, Leaf, LeftOut, NewValue, ReferenceText
from rlinf_cli.importing.references import UnresolvableError
from rlinf_core.config.composing.origins import inline
from rlinf_core.config.tree import Path, ScalarNode, SequenceNode, format_path


def written(conversion: Conversion, added: Sequence[Added]) -> tuple[str, list[KeyOutcome]]:
    """Return the text of the new file, and the outcome for each key."""
    document = FileSection()
    document.put(("recipe",), Value(conversion.recipe, (), Comments(_opening(conversion))))
    names = {
        step.leaf.path: put.path
        for step in conversion.steps
        for put in puts(step.result)
        if put.same and put.path not in conversion.refused
    }
    for path in _section_order(conversion):
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
        section = find_section(document, path)
        if section is not None:
            section.comments = comments
        elif any(comments):
            document.remark(path[:-1], [*comments.above, *([comments.behind] if comments.behind else [])])
    for (section, reason), lines in remarks.items():
        document.remark(section, left_out(reason, lines))
    end = conversion.comments.at_end()
    if end:
        document.remark((), end)
    return document.text(), outcomes


def _opening(conversion: Conversion) -> tuple[str, ...]:
    """Return the comment at the beginning of the new file."""
    name = os.path.basename(conversion.file.main.name)
    return (f"# From `{name}` of {conversion.project}, by `rlinf import`.", *conversion.comments.header)


def find_section(document: FileSection, path: Path) -> FileSection | None:
    """Return the section at a path, where there is one."""
    here: FileSection | Value = document
    for segment in path:
        below = here.children.get(segment) if isinstance(here, FileSection) else None
        if below is None:
            return None
        here = below
    return here if isinstance(here, FileSection) else None


def _section_order(conversion: Conversion) -> list[Path]:
    """Return the top sections in the order of the new file: machines first, then as in the old one."""
    sections = [put.path[:1] for step in conversion.steps for put in puts(step.result) if len(put.path) > 1]
    return [*dict.fromkeys([("cluster",), *sections])]


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
