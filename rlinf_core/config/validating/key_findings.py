"""Findings about unknown and missing keys, with a guess of the intended key."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.foreign_names import foreign_names, names_at
from rlinf_core.config.tree import Entry, MappingNode, Path, ScalarNode, find, format_path, key_span, naming
from rlinf_core.config.validating.kinds import key_of_others
from rlinf_core.config.validating.model_fields import (
    fields_at,
    item_type,
    join,
    model_of,
    places_of,
    types_at,
    value_type,
    written_fields,
)
from rlinf_core.hardware.robots import UNKNOWN_TYPE, hardware_model, hardware_types
from rlinf_core.suggest import near, quoted

_LISTED = 12
_RENAMES: Final = "`rlinf import` renames the keys of a file of RLinf or verl"
# Characters of other scripts that look like YAML's punctuation.
_LOOK_ALIKES: Final = "：“”‘’，｛｝"
# Common words for our keys that have no similar spelling.
_SYNONYMS = {
    "per_node": ("gpus", "gpu", "num_gpus", "gpus_per_node", "count", "number", "num"),
    "memory_gib": ("memory", "memory_gb", "vram", "vram_gb", "ram", "ram_gb"),
    "identity_file": ("key", "key_file", "ssh_key", "private_key", "identity", "pem"),
    "user": ("login", "name"),
    "connect_timeout": ("timeout",),
    "hosts": ("host", "ip", "ips", "addresses", "nodes"),
    "python_interpreter_path": ("python", "interpreter", "python_path", "conda_env", "conda", "venv", "virtualenv"),
}
# Synonyms whose key may be in a section further down, with the key and an example.
_DEEPER = {
    ("gpus", "gpu", "num_gpus", "gpus_per_node"): ("per_node", "8"),
    _SYNONYMS["python_interpreter_path"]: ("python_interpreter_path", "/opt/venv/bin/python"),
}


def foreign_character(text: str) -> str | None:
    """Return the code and name of a key's first look-alike or invisible character, or None."""
    for character in text:
        if character in _LOOK_ALIKES or (character != " " and unicodedata.category(character) in ("Zs", "Cf")):
            return f"U+{ord(character):04X} ({unicodedata.name(character, 'no name').lower()})"
    return None


def unknown_key(model: type[BaseModel], tree: MappingNode, path: Path) -> Diagnostic:
    """Return the finding for a key that is unknown at its path."""
    name, span = str(path[-1]), key_span(tree, path) or naming(tree, path)
    known = names_at(types_at(model, path[:-1]))
    instead = known.unavailable.get(name)
    if instead is not None:
        message = f"`{format_path(path)}` is not available"
        return Diagnostic("not-available", Severity.ERROR, message, span, path, instead)
    here = list(keys_at(model, tree, path[:-1]))
    meant = meant_key(model, tree, path)
    elsewhere = _other_places(model, path)
    before_colon, colon, after_colon = name.partition(":")
    named = {**known.moved, **known.names}
    hint: str | None = None
    if foreign := foreign_character(name):
        hint = f"it contains {foreign}: write it with plain characters"
    elif colon and before_colon in here:
        hint = f"write a space after the `:`, as in `{before_colon}: {after_colon or '...'}`"
    elif name in named:
        hint = f"write `{named[name]}`; {_RENAMES}"
    elif of_others := key_of_others(model, tree, path):
        hint = of_others
    elif name in known.former:
        now = to_path(parse_path(known.former[name])[0])
        hint = key_of_others(model, tree, now) or f"another kind of this section has it, as `{known.former[name]}`"
    elif meant:
        hint = f"did you mean `{meant}`?"
    elif deeper := _further_down(model, tree, path):
        hint = deeper
    elif torn := _torn_value(tree, path):
        hint = f"inside braces a comma ends a value: write {torn}"
    elif elsewhere:
        hint = f"`{name}` belongs {_where(elsewhere[0])}"
    elif moved := _moved_to(model, path):
        hint = f"write `{moved}`; {_RENAMES}"
    elif here:
        hint = f"known keys: {quoted(here[:_LISTED])}{', …' if len(here) > _LISTED else ''}"
        namesakes = [place for place in places_of(model, name) if place.isidentifier()]
        if namesakes:
            hint = f"{hint}; `{namesakes[0]}` has a key `{name}`"
    message = f"unknown key `{name}` {_where(format_path(path[:-1]))}"
    return Diagnostic("unknown-key", Severity.ERROR, message, span, path, hint)


def _further_down(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return a hint on the section further down that has a key's meaning, with an example; None for other keys."""
    names = next((names for names in _DEEPER if str(path[-1]).lower() in names), None)
    if names is None:
        return None
    key, example = _DEEPER[names]
    here = _pattern(path[:-1])
    below = [place.removeprefix(here).lstrip(".") for place in places_of(model, key) if place.startswith(here)]
    value = find(tree, path)
    if key == "per_node" and isinstance(value, ScalarNode) and value.raw.isdecimal():
        example = value.raw
    if not below:
        return None
    section, entry = below[0], f"{key}: {example}"
    text = f"[{{node_ranks: all, {entry}}}]" if section.endswith("[]") else f"{{{entry}}}"
    return f"write `{section.removesuffix('[]')}: {text}`" if "." not in section else f"`{key}` of `{section}` sets it"


def _other_places(model: type[BaseModel], path: Path) -> list[str]:
    """Return other sections that have a key of this name with the same meaning.

    A single word (`type`, `model`, `seed`) has different meanings in different sections; several words rarely do.
    """
    name, here = str(path[-1]), _pattern(path[:-1])
    top = str(path[0])
    places = [place for place in places_of(model, name) if place != here]
    return [place for place in places if "_" in name or place.partition(".")[0] == top or len(path) == 1]


def _moved_to(model: type[BaseModel], path: Path) -> str | None:
    """Return our full path for a key of a related project that belongs to another section here."""
    name, top = str(path[-1]), str(path[0])
    source = foreign_names()
    places = [join(place, ours) for place, ours in source.places_of_other_name(model, name)] if source else []
    places = [place for place in places if "_" in name or place.partition(".")[0] == top or len(path) == 1]
    return next((place for place in places if place.partition(".")[0] == top), next(iter(places), None))


def meant_key(model: type[BaseModel], tree: MappingNode, path: Path) -> str | None:
    """Return the sibling key, not set yet, that an unknown key was probably meant to be.

    Keys of a base may be set again by the extending file, and keys of the file by an override.
    """
    parent = find(tree, path[:-1])
    source = naming(tree, path).source

    def is_set(key: str) -> bool:
        entry = parent.entry(key) if isinstance(parent, MappingNode) else None
        return entry is not None and entry.key.span.source is source and source.kind != "overrides"

    name = str(path[-1]).lower().replace("-", "_")
    known = [key for key in keys_at(model, tree, path[:-1]) if not is_set(key)]
    other = names_at(types_at(model, path[:-1])).names.get(str(path[-1]))
    # A name without its first word, as `robot_ip` for `left_robot_ip`, is not similar by spelling.
    synonyms = [key for key in known if name in _SYNONYMS.get(key, ())]
    longer = [key for key in known if "_" in name and key.endswith(f"_{name}")]
    return next(iter([other] if other in known else synonyms or longer or near(name, known)), None)


def _torn_value(tree: MappingNode, path: Path) -> str | None:
    """Return the intended entry if an unquoted comma made a key, as `8` in `{placement: 0-3,8}`; else None."""
    parent = find(tree, path[:-1])
    entries = parent.entries if isinstance(parent, MappingNode) and parent.span.text.startswith("{") else ()
    value_entry: Entry | None = None
    pieces: list[str] = []
    met = False
    for entry in entries:
        value = entry.value
        if value_entry and _is_bare(entry):
            met = met or entry.key.raw == path[-1]
            pieces.append(entry.key.raw)
        elif met:
            break
        else:
            value_entry = entry if isinstance(value, ScalarNode) and value.plain and value.raw else None
            pieces = [value.raw] if isinstance(value, ScalarNode) else []
    return f'`{value_entry.key.raw}: "{",".join(pieces)}"`' if value_entry and met else None


def torn_key(tree: MappingNode, path: Path) -> str | None:
    """Return the hint on a key without a value, as `actor` in `{actor,rollout: 0-3}`; None for other keys."""
    parent = find(tree, path[:-1])
    entries = parent.entries if isinstance(parent, MappingNode) and parent.span.text.startswith("{") else ()
    pieces: list[str] = []
    for entry in entries:
        pieces.append(entry.key.raw)
        if _is_bare(entry):
            continue
        if path[-1] in pieces[:-1]:
            return f'inside braces a comma ends a key: write `"{",".join(pieces)}": ...`'
        pieces.clear()
    return None


def _is_bare(entry: Entry) -> bool:
    """Return whether an entry is a word between two commas."""
    value, span = entry.value, entry.key.span
    is_empty = isinstance(value, ScalarNode) and value.plain and not value.raw
    return is_empty and not span.source.text[span.end :].lstrip().startswith(":")


def missing_key(model: type[BaseModel], tree: MappingNode, path: Path) -> Diagnostic:
    """Return the finding for a missing required key, located at its section."""
    name, section = str(path[-1]), path[:-1]
    if isinstance(path[-1], int):
        message = f"`{format_path(section)}` has too few items"
        return Diagnostic("bad-value", Severity.ERROR, message, naming(tree, section), section)
    example = _example(keys_at(model, tree, section).get(name))
    help = f"add the section `{name}:`"
    if example:
        entry = f"{name}: {example}"
        help = f"add `{entry}`" if find(tree, section) is not None else f"add `{path[-2]}: {{{entry}}}`"
    message = f"{f'`{format_path(section)}`' if section else 'the file'} needs `{name}`"
    return Diagnostic("missing-key", Severity.ERROR, message, naming(tree, section), path, help)


def keys_at(model: type[BaseModel], tree: MappingNode, path: Path) -> dict[str, FieldInfo]:
    """Return the fields allowed at `path`. A robot's keys depend on the `type` beside its list."""
    if path[-2:-1] == ("configs",) and path[-3:-2] == ("hardware",):
        kind = find(tree, (*path[:-2], "type"))
        name = kind.raw if isinstance(kind, ScalarNode) else ""
        types = hardware_types()
        meant = name if name in types else next(iter(near(name, types)), UNKNOWN_TYPE)
        try:
            return written_fields(hardware_model(meant))
        except PydanticCustomError:
            return {}  # its package cannot be loaded, which is reported separately
    return fields_at(model, path, tree)


def _where(place: str) -> str:
    return f"in `{place}`" if place else "at the top of the file"


def _pattern(path: Path) -> str:
    """Return `path` in the notation of `places_of`."""
    text = ""
    for segment in path:
        text += "[]" if isinstance(segment, int) else f".{segment}" if text else segment
    return text


def _example(field: FieldInfo | None) -> str | None:
    """Return an example value for the field, from its examples or type; None for a section."""
    if field is None:
        return "..."
    if field.examples:
        return str(field.examples[0])
    annotation: Any = field.annotation
    if model_of(annotation) is not None or value_type(annotation) is not None:
        return None
    if item_type(annotation) is not None:
        return "[...]"
    return {int: "1", float: "1.0", bool: "true"}.get(annotation, "...")
