"""The keys and values that an override can take, and the fields that can be explained, from the models and the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.source import NotationError
from rlinf_core.config.tree import MappingNode, Path, SequenceNode, find, format_path
from rlinf_core.config.validating.model_fields import fields_at, item_type, model_of, types_at, value_type

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.job.load import Job


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
    from rlinf_cli.job.field_docs import fields_below
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
