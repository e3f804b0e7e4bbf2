"""`rlinf explain`: documentation of a diagnostic code or a field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from rlinf_cli.file.field_docs import UnknownFieldError
    from rlinf_core.errors import ConfigError

SCHEMA = "rlinf.explain/1"


def explain(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="CODE|FIELD", hidden=True, autocompletion=completion.topics),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="Look up a field in this recipe's files only.",
            autocompletion=completion.recipes,
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Explain a diagnostic code, or a field of the file.

    CODE is the word in brackets of a finding, as in `rlinf explain unknown-key`; FIELD is a path such as
    `cluster.node_groups.label`. Without either, all codes are listed.
    """
    if topic is None:
        _list_codes(output)
        return
    from rlinf_cli.codes import find_code

    name = _bare(topic)
    code = find_code(name)
    if code is not None:
        from rlinf_cli.render.explained import code_record, code_text

        if output is Output.JSON:
            console.result_json({"schema": SCHEMA, "code": code_record(code)})
        else:
            console.result(code_text(code))
        return
    _explain_field(name, recipe, output)


app = command(explain, examples=("rlinf explain unknown-key", "rlinf explain cluster.node_groups.label"))


def _bare(topic: str) -> str:
    """Return `unknown-key` also for `error[unknown-key]` and `[unknown-key]`."""
    topic = topic.strip().rstrip(":")
    if topic.endswith("]") and "[" in topic:
        head, _, code = topic[:-1].partition("[")
        if head in ("", "error", "warning", "note"):
            return code
    return topic


def _list_codes(output: Output) -> None:
    from rlinf_cli.codes import codes_by_stage

    stages = codes_by_stage()
    if output is Output.JSON:
        codes = [
            {"code": code.name, "severity": str(code.severity), "stage": stage, "title": code.title}
            for stage, group in stages.items()
            for code in group
        ]
        console.result_json({"schema": SCHEMA, "codes": codes})
        return
    for index, (stage, group) in enumerate(stages.items()):
        if not group:
            continue
        console.result(("\n" if index else "") + console.style(stage, "bold"))
        rows = [(f"  {code.name}", str(code.severity), code.title) for code in group]
        console.result(console.table(("", "", ""), rows, keep=(0, 1)))
    console.message("\nRun `rlinf explain CODE` for details.")


def _explain_field(path: str, recipe: str | None, output: Output) -> None:
    """Print the documentation of a field for every recipe that has it, once for recipes that agree."""
    from rlinf_cli.file.field_docs import FieldDoc, UnknownFieldError, describe
    from rlinf_core.job.find_recipe import find_recipe, recipe_names
    from rlinf_core.job.load import ClusterFile

    names = [recipe] if recipe else recipe_names()
    models = {name: find_recipe(name).config_model() for name in names} or {"": ClusterFile}
    recipes_by_doc: dict[FieldDoc, list[str]] = {}
    failures: list[UnknownFieldError] = []
    for name, model in models.items():
        try:
            recipes_by_doc.setdefault(describe(model, path), []).append(name)
        except UnknownFieldError as error:
            failures.append(error)
    if not recipes_by_doc:
        raise _unknown(path, failures)
    from rlinf_cli.render.explained import field_record, field_text

    entries = [(doc, () if len(recipes) == len(models) else tuple(recipes)) for doc, recipes in recipes_by_doc.items()]
    if output is Output.JSON:
        console.result_json({"schema": SCHEMA, "fields": [field_record(doc, recipes) for doc, recipes in entries]})
    else:
        console.results((field_text(doc, recipes) for doc, recipes in entries), gap=True)


def _unknown(topic: str, failures: list[UnknownFieldError]) -> ConfigError:
    """Return the error for an unknown topic, with the nearest code or field."""
    from rlinf_cli.codes import code_names
    from rlinf_core.errors import ConfigError
    from rlinf_core.suggest import near, quoted

    # A recipe in which more of the path exists says more about the rest of it.
    deepest = max((error.depth for error in failures), default=0)
    failures = [error for error in failures if error.depth == deepest]
    hints = dict.fromkeys(error.help for error in failures if error.help)
    if len(hints) > 1 and all(error.known for error in failures):
        # Recipes differ: each key once.
        hints = {f"known keys: {quoted(dict.fromkeys(key for error in failures for key in error.known))}": None}
    # A word without a dash is more likely a key: only a nearly equal code is meant.
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
