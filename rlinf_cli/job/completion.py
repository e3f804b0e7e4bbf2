"""Completion of job files: their JSON Schema (draft 2020-12) for editors, and keys and values of overrides for shells.

Like `rlinf validate`, the schema accepts numbers for text (`label: 4090`), references for numbers
(`${runner.max_steps}`), and required keys left to a base (`extends`). It does not express relations between values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind, models_json_schema

from rlinf_cli.job.field_docs import fields_below, hardware_models
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.foreign_names import names_at
from rlinf_core.config.sections.cluster import ClusterConfig, HardwareConfig
from rlinf_core.config.tree import MappingNode, NotationError, Path, SequenceNode, find, format_path
from rlinf_core.config.validating.model_fields import fields_at, item_type, model_of, sections, types_at, value_type

if TYPE_CHECKING:
    from rlinf_core.job.load import Job


Schema: TypeAlias = dict[str, Any]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE: Final[Schema] = {"type": "string", "pattern": r"\$\{.+\}", "description": "A reference, ${...}."}
_NULL: Final[Schema] = {"type": "null"}
_EXTENDS: Final[Schema] = {
    "description": "Base files, relative to this one; this file overrides their values.",
    "type": ["string", "array"],
    "items": {"type": "string"},
    "minItems": 1,
}
# Pydantic's names for bounds of a value that one of our validators reads first.
_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
# The fewest characters of a key's schema for which a reference is worthwhile.
_WORTH_SHARING: Final = 100
_BELOW_ALL: Final = ("anyOf", "allOf", "oneOf")
_BELOW_ONE: Final = ("items", "additionalProperties", "if", "then", "else", "not")


class _Generator(GenerateJsonSchema):
    # JSON cannot express one default, a port range, which the description states instead.
    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def json_schema(model: type[BaseModel]) -> Schema:
    """Return the schema of a file whose root is `model`."""
    definitions, references = _definitions({"file": model})
    requirements = _Requirements(definitions)
    job_file = requirements.unless_extended(references["file"])
    requirements.remove()
    _share(definitions)
    return {**_file(f"rlinf: {model.__name__}"), **job_file, "$defs": definitions}


def file_schema(
    recipes: Mapping[str, type[BaseModel]], variants: Mapping[str, Mapping[str, str]] | None = None
) -> Schema:
    """Return the schema of any file: `recipe` selects one of `recipes`; without it only `cluster` is known.

    A file with a base may omit required keys, including `recipe`.

    Args:
        recipes: the models of files, by recipe.
        variants: the variants of recipes, see `Recipe`.
    """
    definitions, references = _definitions({**recipes, "": ClusterConfig})
    cluster: Schema = {"cluster": references.pop("")}
    definitions["ClusterFile"] = {"type": "object", "required": ["cluster"], "properties": cluster}
    requirements = _Requirements(definitions)
    alone = requirements.unless_extended({"$ref": "#/$defs/ClusterFile"})
    inherited = {"if": {"required": ["extends"]}, "then": {"anyOf": [*references.values()]}, "else": alone}
    branches: list[Schema] = [{"if": {"required": ["recipe"]}, "else": inherited}]
    for name, reference in references.items():
        selected: Schema = {"required": ["recipe"], "properties": {"recipe": {"const": name}}}
        chosen = requirements.unless_extended(reference)
        for setting, variant in (variants or {}).get(name, {}).items():
            other = requirements.unless_extended(references[variant])
            chosen = {"if": _has(setting), "then": other, "else": chosen}
        branches.append({"if": selected, "then": chosen})
    requirements.remove()
    _share(definitions)
    names: Schema = {"description": "What is trained: a name that `rlinf train` lists.", "enum": list(recipes)}
    properties = {"extends": _EXTENDS, "recipe": names}
    return {**_file("rlinf configuration"), "properties": properties, "allOf": branches, "$defs": definitions}


def _has(setting: str) -> Schema:
    """Return the schema of files with a value, as in `data.type=chat`, or a text in it, as in `data.paths=*.jsonl`."""
    key, _, value = setting.partition("=")
    schema: Schema = {"const": value}
    if "*" in value:
        text: Schema = {"type": "string", "pattern": f"^{re.escape(value).replace(re.escape('*'), '.*')}$"}
        schema = {"anyOf": [text, {"type": "array", "contains": text}]}
    for name in reversed(key.split(".")):
        schema = {"required": [name], "properties": {name: schema}}
    return schema


def _file(title: str) -> Schema:
    return {"$schema": DIALECT, "title": title, "type": "object"}


def _definitions(models: Mapping[str, type[BaseModel]]) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """Return the definitions of all models, and a reference to each of `models` by its key."""
    robots = hardware_models()
    wanted = {HardwareConfig, *models.values(), *robots.values()}
    schemas, document = models_json_schema(
        sorted(((model, "validation") for model in wanted), key=lambda pair: pair[0].__name__),
        ref_template="#/$defs/{model}",
        schema_generator=_Generator,
    )
    definitions = cast("dict[str, Schema]", document["$defs"])
    references = {key: schemas[model, "validation"] for key, model in models.items()}
    units = {name: schemas[model, "validation"] for name, model in robots.items()}
    _choose_units(_resolve(definitions, schemas[HardwareConfig, "validation"]), units)
    _add_accepted_keys(definitions, models.values())
    for definition in definitions.values():
        _mend(definition)
    for model in models.values():
        if "recipe" in model.model_fields:
            _resolve(definitions, schemas[model, "validation"])["properties"]["extends"] = _EXTENDS
    return definitions, references


def _share(definitions: dict[str, Schema]) -> None:
    """Move the schemas of keys that several sections share, such as the kinds of a section, to shared definitions."""
    sections_with: dict[tuple[str, str], list[Schema]] = {}
    for definition in definitions.values():
        properties: Schema = definition.get("properties", {})
        for name, value in properties.items():
            sections_with.setdefault((name, json.dumps(value)), []).append(properties)
    for (name, text), alike in sections_with.items():
        if len(alike) == 1 or len(text) < _WORTH_SHARING:
            continue
        shared = next(key for key in (f"{name}.{number}" for number in count(1)) if key not in definitions)
        definitions[shared] = alike[0][name]
        for properties in alike:
            properties[name] = {"$ref": f"#/$defs/{shared}"}


def _add_accepted_keys(definitions: Mapping[str, Schema], models: Iterable[type[BaseModel]]) -> None:
    """Add the keys that sections accept although no model has them."""
    for section in {section for model in models for _, section in sections(model)}:
        properties: Schema = definitions.get(section.__name__, {}).get("properties", {})
        for other, values in names_at([section]).accepted.items():
            properties[other] = _accepted(values)


def _accepted(values: Sequence[object]) -> Schema:
    """Return the schema of an accepted key, which is read elsewhere or states our fixed behavior."""
    schema: Schema = {"description": "Accepted where it says what is so anyway; see `rlinf explain`."}
    plain = [value for value in values if not isinstance(value, dict) and not str(value).startswith("${")]
    return {**schema, "enum": [*plain, None]} if plain and len(plain) == len(values) else schema


def _choose_units(hardware: Schema, units: Mapping[str, Schema]) -> None:
    """Select the item schema of `hardware.configs` by `hardware.type`."""
    properties = hardware["properties"]
    properties["type"] = {"description": properties["type"]["description"], "enum": list(units)}
    properties["configs"]["type"] = "array"
    hardware["allOf"] = [
        {
            "if": {"properties": {"type": {"const": name}}},
            "then": {"properties": {"configs": {"items": unit}}},
        }
        for name, unit in units.items()
    ]


def _resolve(definitions: Mapping[str, Schema], schema: Schema) -> Schema:
    reference = schema.get("$ref")
    return definitions[reference.rpartition("/")[2]] if isinstance(reference, str) else schema


def _mend(schema: Schema) -> None:
    """Translate bounds to JSON Schema, and accept a reference for every number, boolean and enum."""
    for ours, theirs in _BOUNDS.items():
        if ours in schema:
            schema[theirs] = schema.pop(ours)
    for below in _BELOW_ALL:
        for branch in schema.get(below, ()):
            _mend(branch)
    for below in _BELOW_ONE:
        if isinstance(schema.get(below), dict):
            _mend(schema[below])
    for name, value in schema.get("properties", {}).items():
        _mend(value)
        value = _or_reference(value)
        # `null` means the default.
        schema["properties"][name] = value if name in schema.get("required", ()) else _or_null(value)
    if "properties" in schema and not schema.get("required") and schema.get("type") == "object":
        schema["type"] = ["object", "null"]
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            schema[below] = _or_reference(schema[below])


def _or_reference(schema: Schema) -> Schema:
    if "anyOf" in schema:
        if any(_refuses_references(choice) for choice in schema["anyOf"]) and _REFERENCE not in schema["anyOf"]:
            schema["anyOf"].append(_REFERENCE)
        return schema
    if not _refuses_references(schema):
        return schema
    kept = {key: schema.pop(key) for key in ("title", "description", "default") if key in schema}
    return {**kept, "anyOf": [schema, _REFERENCE]}


def _or_null(schema: Schema) -> Schema:
    """Return a schema that also accepts `null`."""
    if "anyOf" in schema:
        schema["anyOf"] = [*schema["anyOf"], *([] if _NULL in schema["anyOf"] else [_NULL])]
    elif "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    elif "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        schema["type"] = [*types, *([] if "null" in types else ["null"])]
    return schema


def _refuses_references(schema: Schema) -> bool:
    kind = schema.get("type")
    return "enum" in schema or "const" in schema or "pattern" in schema or kind in ("integer", "number", "boolean")


class _Requirements:
    """The required keys, enforced only in files without `extends`, since a base may provide them.

    List items keep their requirements, since a list replaces the base's list.
    """

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._asked: list[Schema] = []

    def unless_extended(self, reference: Schema) -> Schema:
        """Return `reference` with the keys that it and its nested mappings require."""
        condition = {"if": {"not": {"required": ["extends"]}}, "then": self._of(reference)}
        return {"allOf": [reference, condition]}

    def remove(self) -> None:
        """Remove the requirements from the definitions, after all of them were collected."""
        for schema in self._asked:
            schema.pop("required", None)

    def _of(self, schema: Schema) -> Schema:
        target = _resolve(self._definitions, schema)
        requirements: Schema = {}
        if "required" in target:
            requirements["required"] = target["required"]
            self._asked.append(target)
        properties: Mapping[str, Schema] = target.get("properties", {})
        below = {name: requirement for name, value in properties.items() if (requirement := self._of(value))}
        if below:
            requirements["properties"] = below
        entries: Schema | bool = target.get("additionalProperties", False)
        if isinstance(entries, dict) and (entry_requirement := self._of(entries)):
            requirements["additionalProperties"] = entry_requirement
        return requirements


def override_candidates(job: Job, incomplete: str, *, values_only: bool = False) -> list[str]:
    """Return the completions of an override, `key=value` or `~key`.

    Args:
        values_only: whether to return only the part after `=`, for shells that split words there.
    """
    model = _model(job)
    key, equals, value = incomplete.partition("=")
    if equals:
        try:
            path = to_path(parse_path(key)[0])
        except NotationError:
            return []
        values = [text for text in _values(model, path) if text.startswith(value)]
        return values if values_only else [f"{key}={text}" for text in values]
    sign = "~" if incomplete.startswith("~") else ""
    paths = _below(model, job.tree, incomplete.removeprefix("~"))
    return [f"{sign}{name}" if sign else name for name in _spelled(paths, model, job.tree, deletes=bool(sign))]


def documented_fields(incomplete: str, recipe: str | None) -> list[str]:
    """Return the fields that `rlinf explain` knows one level down, or two if the first level has only one."""
    from rlinf_core.job.find_recipe import find_recipe, recipe_names
    from rlinf_core.job.load import ClusterFile

    names = [recipe] if recipe else recipe_names()
    models: list[type[BaseModel]] = [ClusterFile, *(find_recipe(name).config_model() for name in names)]

    def below(path: str) -> set[str]:
        return {field.path.replace("[]", "") for model in models for field in fields_below(model, path)}

    fields = {path for path in below(incomplete.rpartition(".")[0]) if path.startswith(incomplete)}
    if len(fields) == 1:
        fields |= below(next(iter(fields)))
    return sorted(fields)


def _model(job: Job) -> type[BaseModel]:
    from rlinf_core.job.load import ClusterFile

    return ClusterFile if job.recipe is None else job.recipe.config_model()


def _below(model: type[BaseModel], tree: MappingNode | None, incomplete: str) -> list[Path]:
    """Return the paths one level below the completed part of a path, and descend while there is only one."""
    cut = max(incomplete.rfind("."), incomplete.rfind("["))
    try:
        parent: Path = to_path(parse_path(incomplete[:cut])[0]) if cut > 0 else ()
    except NotationError:
        return []
    children = [path for path in _children(model, tree, parent) if format_path(path).startswith(incomplete)]
    while len(children) == 1 and (deeper := list(_children(model, tree, children[0]))):
        children = deeper
    return children


def _children(model: type[BaseModel], tree: MappingNode | None, parent: Path) -> Iterator[Path]:
    node = find(tree, parent) if tree is not None else None
    if isinstance(node, SequenceNode):
        yield from ((*parent, index) for index in range(len(node.items)))
        return
    names = dict.fromkeys(fields_at(model, parent))
    if isinstance(node, MappingNode):
        names |= dict.fromkeys(node.keys())
    yield from ((*parent, name) for name in names)


def _spelled(paths: list[Path], model: type[BaseModel], tree: MappingNode | None, *, deletes: bool) -> list[str]:
    texts: list[str] = []
    for path in paths:
        text = format_path(path)
        node = find(tree, path) if tree is not None else None
        branch = isinstance(node, MappingNode | SequenceNode) or _is_branch(model, path)
        texts.append(
            text
            if deletes
            else f"{text}."
            if branch and not isinstance(node, SequenceNode)
            else text
            if branch
            else f"{text}="
        )
    if len(texts) == 1 and texts[0].endswith("="):
        examples = _values(model, paths[0]) or [_current(tree, paths[0])]
        texts += [f"{texts[0]}{example}" for example in examples]
    return texts


def _is_branch(model: type[BaseModel], path: Path) -> bool:
    return any(
        model_of(annotation) or value_type(annotation) or item_type(annotation) for annotation in types_at(model, path)
    )


def _values(model: type[BaseModel], path: Path) -> list[str]:
    """Return the values of a boolean or a field with listed values; empty for others."""
    values: dict[str, None] = {}
    for annotation in types_at(model, path):
        if annotation is bool:
            values |= {"true": None, "false": None}
        elif get_origin(annotation) is Literal:
            values |= {str(value): None for value in get_args(annotation)}
    return list(values)


def _current(tree: MappingNode | None, path: Path) -> str:
    node = find(tree, path) if tree is not None else None
    raw = getattr(node, "raw", None)
    return raw if isinstance(raw, str) and raw else "VALUE"
