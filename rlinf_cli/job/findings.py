"""The output of findings (text blocks, JSON, GitHub annotations), and what `rlinf explain` says of codes and fields."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TextIO

from rlinf_cli import console
from rlinf_cli.codes import CLOSE, OPEN, Code, Example, code_names, codes_by_stage, find_code
from rlinf_cli.command import Result
from rlinf_cli.console import paragraphs
from rlinf_cli.interrupts import ExitCode
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity, render_text, visible
from rlinf_core.config.secrets import mask_text
from rlinf_core.config.tree import format_path
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import clipped, near, quoted

if TYPE_CHECKING:
    from rlinf_cli.job.field_docs import FieldDoc, UnknownFieldError


VALIDATE_SCHEMA: Final = "rlinf.validate/1"


def finding_blocks(diagnostics: Sequence[Diagnostic], stream: TextIO) -> Iterator[str]:
    """Yield a text block for each finding, in the color and width of `stream`."""
    # A caret may be one column past the last character.
    color, width = console.colored(stream), console.width(stream) - 1
    for diagnostic in diagnostics:
        yield render_text(diagnostic, color=color, width=width)


def without_effect(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return the findings about keys without effect."""
    from rlinf_cli.job.no_effect import NO_EFFECT

    return [diagnostic for diagnostic in diagnostics if diagnostic.code == NO_EFFECT]


def to_record(diagnostic: Diagnostic) -> dict[str, Any]:
    """Return one finding as a record of `validate --json`.

    Lines and columns count from 1; the end is exclusive.
    """
    span = diagnostic.span
    begin, finish = span.begin, span.finish
    return {
        "code": diagnostic.code,
        "severity": str(diagnostic.severity),
        "message": diagnostic.message,
        "file": span.source.name,
        "line": begin.line,
        "column": begin.column,
        "end_line": finish.line,
        "end_column": finish.column,
        "path": clipped(mask_text(format_path(diagnostic.path))),
        "help": diagnostic.help,
        "related": [
            {"file": place.source.name, "line": place.begin.line, "column": place.begin.column, "message": words}
            for place, words in diagnostic.related
        ],
    }


def to_json(diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """Return the findings of one or more files in the format `rlinf.validate/1`, ready for `json.dumps`."""
    findings = list(diagnostics)
    errors = sum(d.findings for d in findings if d.severity is Severity.ERROR)
    return {
        "schema": VALIDATE_SCHEMA,
        "ok": errors == 0,
        "errors": errors,
        "warnings": sum(d.findings for d in findings if d.severity is Severity.WARNING),
        "diagnostics": [to_record(d) for d in findings],
    }


_GITHUB_DATA: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_GITHUB_PROPERTY: Final = _GITHUB_DATA | str.maketrans({":": "%3A", ",": "%2C"})
_GITHUB_COMMANDS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def to_github(diagnostic: Diagnostic) -> str:
    """Return a finding as a workflow command, which GitHub shows at the line of a pull request.

    A finding on standard input or in an argument has no file, so only its text names the location.
    """
    span = diagnostic.span
    begin, finish = span.begin, span.finish
    properties = {"title": f"rlinf ({diagnostic.code})"}
    if span.source.kind == "file":
        properties |= {"file": span.source.name, "line": str(begin.line), "col": str(begin.column)}
        properties |= {"endLine": str(finish.line), "endColumn": str(finish.column)}
    lines = [f"{span.source.name}:{begin}: {diagnostic.message}", *filter(None, [diagnostic.help])]
    text = "\n".join([*lines, *(f"{words}: {place}" for place, words in diagnostic.related)])
    listed = ",".join(f"{name}={value.translate(_GITHUB_PROPERTY)}" for name, value in properties.items())
    return f"::{_GITHUB_COMMANDS[diagnostic.severity]} {listed}::{text.translate(_GITHUB_DATA)}"


def validated(reports: Sequence[tuple[str, Diagnostics]], *, github: bool) -> Result:
    """Return the result of `rlinf validate`: all findings, and a verdict on each file."""
    findings = [diagnostic for _, diagnostics in reports for diagnostic in diagnostics]
    code = ExitCode.OK if all(diagnostics.ok for _, diagnostics in reports) else ExitCode.INVALID
    verdicts = [f"{_shown(file)}: {_summary(diagnostics)}" for file, diagnostics in reports]
    if github:
        # Every line on standard output is an annotation.
        return Result("\n".join(map(to_github, findings)), code=code, notes=("\n".join(verdicts),))

    def text() -> str:
        shown = "\n\n".join(finding_blocks(findings, sys.stdout))
        return "\n\n".join(part for part in (shown, "" if console.verbosity.quiet else "\n".join(verdicts)) if part)

    return Result(text, lambda: to_json(findings) | {"files": [file for file, _ in reports]}, code)


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file if file.isprintable() else visible(file)


def _summary(diagnostics: Diagnostics) -> str:
    """Return a verdict, as in `2 errors, 1 warning` or `valid, with 1 warning, 2 notes`."""
    counts = [(severity, diagnostics.count(severity)) for severity in Severity]
    listed = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts if count)
    if not diagnostics.ok:
        return listed
    return f"valid, with {listed}" if listed else "valid"


SCHEMA: Final = "rlinf.explain/1"


_COLORS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def schema(recipe: str | None) -> Result:
    """Return the JSON Schema of all job files, or of a recipe's."""
    from rlinf_cli.job.completion import file_schema, json_schema
    from rlinf_core.job.find_recipe import find_recipe, recipe_names

    if recipe is not None:
        made = json_schema(find_recipe(recipe).config_model())
    else:
        recipes = {name: find_recipe(name) for name in recipe_names()}
        models = {name: recipe.config_model() for name, recipe in recipes.items()}
        made = file_schema(models, {name: recipe.variants for name, recipe in recipes.items()})
    return Result(partial(console.json_text, made), made)


def codes() -> Result:
    """Return the list of all codes."""
    stages = codes_by_stage()
    listed = [
        {"code": code.name, "severity": str(code.severity), "stage": stage, "title": code.title}
        for stage, group in stages.items()
        for code in group
    ]

    def text() -> str:
        tables = [
            console.style(stage, "bold")
            + "\n"
            + console.table(
                ("", "", ""), [(f"  {code.name}", str(code.severity), code.title) for code in group], keep=(0, 1)
            )
            for stage, group in stages.items()
            if group
        ]
        return "\n\n".join(tables)

    return Result(text, {"schema": SCHEMA, "codes": listed}, notes=("\nRun `rlinf explain CODE` for details.",))


def topic(name: str, recipe: str | None) -> Result:
    """Return the entry of a code, or the different entries of a key in the recipes that have it.

    Raises:
        ConfigError: there is no such code or key.
    """
    name = _bare(name)
    code = find_code(name)
    if code is not None:
        return Result(partial(code_text, code), lambda: {"schema": SCHEMA, "code": code_record(code)})
    from rlinf_cli.job.field_docs import UnknownFieldError, describe
    from rlinf_core.job.find_recipe import find_recipe, recipe_names
    from rlinf_core.job.load import ClusterFile

    names = [recipe] if recipe else recipe_names()
    models = {name: find_recipe(name).config_model() for name in names} or {"": ClusterFile}
    recipes_by_doc: dict[FieldDoc, list[str]] = {}
    failures: list[UnknownFieldError] = []
    for owner, model in models.items():
        try:
            recipes_by_doc.setdefault(describe(model, name), []).append(owner)
        except UnknownFieldError as error:
            failures.append(error)
    if not recipes_by_doc:
        raise _unknown(name, failures)
    entries = [(doc, () if len(recipes) == len(models) else tuple(recipes)) for doc, recipes in recipes_by_doc.items()]
    return Result(
        lambda: "\n\n".join(field_text(doc, recipes) for doc, recipes in entries),
        lambda: {"schema": SCHEMA, "fields": [field_record(doc, recipes) for doc, recipes in entries]},
    )


def code_text(code: Code) -> str:
    """Return the entry of a code as text."""
    color = _COLORS[code.severity]
    blocks = [
        f"{console.style(f'{code.severity}[{code.name}]', color)}\n{paragraphs(code.title)}",
        paragraphs(code.meaning),
        f"{console.style('Wrong', 'red')}\n{_example(code.wrong, color)}",
        f"{console.style('Right', 'green')}\n{_example(code.right, color)}",
    ]
    return "\n\n".join(blocks)


def code_record(code: Code) -> dict[str, Any]:
    """Return the entry of a code as data, with examples without markers."""
    examples = {"wrong": _record(code.wrong), "right": _record(code.right)}
    return {**asdict(code), "severity": str(code.severity), **examples}


def _record(example: Example) -> dict[str, Any]:
    return {
        "text": _unmarked(example.text),
        "overrides": [_unmarked(override) for override in example.overrides],
        "files": {name: _unmarked(text) for name, text in example.files},
        "environ": dict(example.environ),
        "assume": list(example.assume),
        "found": example.found,
    }


def _example(example: Example, color: str) -> str:
    blocks: list[str] = []
    if example.text:
        blocks.append(_numbered(example.text, color))
    for name, text in example.files:
        blocks.append(f"    {name}:\n{_numbered(text, color)}")
    settings = [f"{name}={value}" for name, value in example.environ]
    arguments = [*example.overrides, *(f"--assume {value}" for value in example.assume)]
    if example.found is not None:
        arguments.append(f"--live    # each node has {example.found} accelerators")
    if settings or arguments:
        command = " ".join([*settings, "rlinf validate FILE", *arguments])
        blocks.append("\n".join(f"    {line}" for line in _with_caret(f"$ {command}", color)))
    return "\n".join(blocks)


def _numbered(text: str, color: str) -> str:
    lines: list[str] = []
    for number, line in enumerate(text.rstrip("\n").split("\n"), start=1):
        shown, *caret = _with_caret(line, color)
        lines.append(f"{console.style(f'{number:>5} |', 'dim')} {shown}".rstrip())
        lines.extend(f"{console.style('      |', 'dim')} {mark}" for mark in caret)
    return "\n".join(lines)


def _with_caret(line: str, color: str) -> list[str]:
    """Return the line without markers and, if it had any, a line of carets beneath the marked text."""
    start = line.find(OPEN)
    shown = _unmarked(line)
    if start < 0:
        return [shown]
    end = line.find(CLOSE, start)
    length = (end if end >= 0 else len(line)) - start - len(OPEN)
    before = "".join(c if c == "\t" else " " for c in line[:start])
    return [shown, before + console.style("^" * max(1, length), color)]


def _unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def field_text(doc: FieldDoc, recipes: Sequence[str] = ()) -> str:
    """Return the entry of a field as text.

    Args:
        doc: the field.
        recipes: the recipes to which the entry applies; empty for all.
    """
    head = f"{console.style(doc.path or 'the file', 'bold')}: {doc.type}"
    if recipes:
        head += console.style(f"  (recipe {', '.join(recipes)})", "dim")
    blocks = [f"{head}\n{_holds(doc)}", paragraphs(doc.description), *map(_child, doc.children)]
    return "\n\n".join(block for block in blocks if block)


def _child(doc: FieldDoc) -> str:
    head = f"  {console.style(doc.name, 'bold')}: {doc.type} ({_holds(doc)})"
    return f"{head}\n{paragraphs(doc.description, '      ')}" if doc.description else head


def _holds(doc: FieldDoc) -> str:
    if doc.required:
        return "required"
    return "optional" if doc.default is None else f"default: {doc.default}"


def field_record(doc: FieldDoc, recipes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entry of a field as data."""
    record = {name: getattr(doc, name) for name in ("path", "type", "required", "default", "description")}
    return {**record, "recipes": list(recipes), "children": [field_record(child) for child in doc.children]}


def _bare(topic: str) -> str:
    """Return the code of `error[unknown-key]` or `[unknown-key]`; any other topic unchanged."""
    topic = topic.strip().rstrip(":")
    if topic.endswith("]") and "[" in topic:
        head, _, code = topic[:-1].partition("[")
        if head in ("", "error", "warning", "note"):
            return code
    return topic


def _unknown(topic: str, failures: list[UnknownFieldError]) -> ConfigError:
    """Return the error for an unknown topic, with the nearest code or field."""
    # Prefer the recipes in which the most of the path exists, and then those with a specific hint.
    deepest = max((error.depth for error in failures), default=0)
    failures = [error for error in failures if error.depth == deepest]
    failures = [error for error in failures if not error.known] or failures
    hints = dict.fromkeys(error.help for error in failures if error.help)
    if len(hints) > 1 and all(error.known for error in failures):
        # The recipes have different keys, so list each once.
        hints = {f"known keys: {quoted(dict.fromkeys(key for error in failures for key in error.known))}": None}
    # A word without a dash is more likely a key, so only a nearly equal code is suggested.
    codes = near(topic, code_names()) if "-" in topic else near(topic, code_names(), least=0.8)
    if codes:
        return ConfigError(f"there is no code `{topic}`", help=f"did you mean `{codes[0]}`?")
    if "." not in topic and "-" in topic:
        return ConfigError(f"there is no code `{topic}`", help="`rlinf explain` lists them all")
    message = failures[0].message if failures else f"there is no field `{topic}`"
    if deepest == 0 and "." not in topic:
        message = f"`{topic}` is neither a code nor a key at the top of a file"
        if all(error.known for error in failures):
            hints["`rlinf explain` lists the codes"] = None
    return ConfigError(message, help="\n".join(hints) or None)
