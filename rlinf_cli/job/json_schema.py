"""JSON Schema (draft 2020-12) of the job file, for completion and checks in editors.

Like `rlinf validate`, it accepts numbers for text (`label: 4090`), references for numbers (`${runner.max_steps}`), and
required keys left to a base (`extends`). It does not express relations between values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final, TypeAlias, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind, models_json_schema

from rlinf_cli.job.field_docs import hardware_models
from rlinf_core.config.machines.cluster import ClusterConfig, HardwareConfig
from rlinf_core.config.validating.foreign_names import names_at
from rlinf_core.config.validating.model_fields import sections

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
