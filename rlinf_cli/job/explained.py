"""The entries of `rlinf explain`: a diagnostic code with its examples, or a field of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rlinf_cli import console
from rlinf_cli.codes import CLOSE, OPEN, Code, Example, code_names, codes_by_stage, find_code
from rlinf_cli.command import Result
from rlinf_cli.console import paragraphs
from rlinf_core.config.diagnostics import Severity
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import near, quoted

if TYPE_CHECKING:
    from rlinf_cli.job.field_docs import FieldDoc, UnknownFieldError

SCHEMA: Final = "rlinf.explain/1"

_COLORS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def schema(recipe: str | None) -> Result:
    """Return the JSON Schema of all job files, or of a recipe's."""
    from rlinf_cli.job.json_schema import file_schema, json_schema
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
