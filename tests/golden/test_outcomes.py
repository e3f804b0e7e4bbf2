"""What the command line and the front doors answer, frozen without its words.

Free to change: words of messages, descriptions of keys, docstrings, and the modules and classes that stand behind a
key or a name.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from rlinf_cli.codes import CLOSE, OPEN, STAGES, Code, Example, codes_by_stage
from rlinf_core.config.shipped import shipped_configs
from tests.golden.command_line import REPOSITORY, rlinf
from tests.golden.frozen import check_frozen, check_names, json_of, leaves

DOORS: Final = ("rlinf_core", "recipes.agent", "recipes.demonstrations", "recipes.embodied", "recipes.language")
# What a forecast says of the machine that it is made on, and in words.
_UNFROZEN: Final = re.compile(r"_measured|_available|is_this_machine|fits$|notes$")
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
# The forecast of a language model that is not on this machine is made from the configuration of this one.
_MODEL: Final = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
# Of the schema: what only a reader sees, and what is walked through to further keys.
_PROSE: Final = frozenset({"description", "title", "examples", "$ref"})
_NESTED: Final = frozenset({"properties", "anyOf", "allOf", "if", "then", "else"})


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_is_laid_out_as_before(name: str) -> None:
    parts = {
        "finding": _findings(rlinf("validate", name, "--json")),
        "placement": _placement(rlinf("inspect", "placement", name, "--json")),
        "memory": _memory(name),
        "value": _values(rlinf("inspect", "config", "--all", name, "--json")),
    }
    check_frozen(f"configs/{name}", [f"{part} {line}" for part, lines in parts.items() for line in lines])


def test_no_config_is_gone() -> None:
    check_names("configs", shipped_configs())


@pytest.mark.parametrize("stage", STAGES)
def test_examples_of_codes_report_what_they_did(stage: str) -> None:
    check_frozen(f"codes/{stage}", [line for code in codes_by_stage()[stage] for line in _reported(code)])


def test_keys_have_the_types_and_defaults_they_had() -> None:
    _, schema = rlinf("explain", "--schema")
    recipes: dict[str, dict[str, None]] = {}
    for recipe, model in _recipe_schemas(schema).items():
        for line in _keys(model, "", schema["$defs"]):
            recipes.setdefault(line, {})[recipe] = None
    shared = [f"{line}  # {', '.join(names)}" for line, names in recipes.items()]
    check_frozen("keys", sorted(shared))


@pytest.mark.parametrize("door", DOORS)
def test_public_names_have_the_signatures_they_had(door: str) -> None:
    stub = Path(REPOSITORY, *door.split("."), "__init__.pyi").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"^from \S+ import \w+ as (\w+)$", stub, re.M)))
    module = importlib.import_module(door)
    public = {name: getattr(module, name) for name in names}
    frozen = [line for name, thing in public.items() for line in _signatures(name, thing, list(public.values()))]
    check_frozen(f"names/{door}", frozen)


def _findings(answer: tuple[int, Any]) -> list[str]:
    """Severity, code, place and key of each finding."""
    code, report = answer
    if report is None:
        return [f"exit {code}"]
    return [
        "{severity} {code} {file}:{line}:{column}-{end_line}:{end_column} {path}".format(**finding)
        for finding in report["diagnostics"]
    ]


def _placement(answer: tuple[int, Any]) -> Iterator[str]:
    """For each component the facts that its processes share, then a line for each process."""
    code, report = answer
    if report is None:
        yield f"exit {code}"
        return
    for component, facts in report.pop("components").items():
        rows = [_process(process) for process in facts.pop("processes")]
        shared = dict(item for item in rows[0].items() if all(item in row.items() for row in rows))
        yield f"{component}: {_line({**dict(leaves(facts)), **shared})}"
        own = [{key: row[key] for key in row.keys() - shared.keys()} for row in rows]
        yield from (f"{component}[{rank}]: {_line(facts)}" for rank, facts in enumerate(own) if facts)
    yield from _pairs(report)


def _process(facts: dict[str, Any]) -> dict[str, str]:
    layers = facts.pop("env_layers")
    variables = {f"${name}": f"{value} ({layers.pop(name)})" for name, value in facts.pop("env").items()}
    removed = {f"${name}": f"unset ({layer})" for name, layer in layers.items()}
    return dict(leaves(facts)) | variables | removed


def _memory(name: str) -> list[str]:
    words = ("inspect", "memory", name, "--json")
    code, report = rlinf(*words, environ=_OFFLINE)
    if code == 2:
        Path("model").mkdir()
        Path("model/config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        code, report = rlinf(*words, "actor.model.model_path=model", environ=_OFFLINE)
    return sorted(_pairs(report)) if report is not None else [f"exit {code}"]


def _values(answer: tuple[int, Any]) -> Iterator[str]:
    """Every resolved value with its origin."""
    _, report = answer
    for entry in report["values"]:
        place = "{file}:{line}:{column}".format(**entry) if entry["file"] else entry["origin"]
        yield f"{entry['path']} = {json_of(entry['value'])}  # {place}"


def _reported(code: Code) -> Iterator[str]:
    for kind, example in (("wrong", code.wrong), ("right", code.right)):
        # What accelerators a machine has, bytes that are no text, and names of files are asked elsewhere.
        if example.found is None and example.data is None and not example.name:
            findings = _findings(_validated(example))
            yield from (f"{code.name} {kind}: {finding}" for finding in findings or ["none"])


def _validated(example: Example) -> tuple[int, Any]:
    folder = Path("example")
    folder.mkdir(exist_ok=True)
    for file, text in (("job.yaml", example.text), *example.files):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(_plain(text), encoding="utf-8")
    assumed = [word for value in example.assume for word in ("--assume", _plain(value))]
    words = ["validate", "job.yaml", *map(_plain, example.overrides), *assumed, "--json"]
    return rlinf(*words, environ=dict(example.environ))


def _plain(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def _recipe_schemas(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a file of each recipe, and that of a file without one."""
    bare, *entries = schema["allOf"]
    recipes = {entry["if"]["properties"]["recipe"]["const"]: entry["then"] for entry in entries}
    return {"no recipe": bare["else"]["else"], **recipes}


def _keys(schema: Mapping[str, Any], path: str, models: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key: its path, its default, and the bounds of each kind of value that it takes."""
    alternatives = list(_alternatives(schema, models))
    bounds = dict.fromkeys(json_of(bound) for bound in map(_bounds, alternatives) if bound)
    yield f"{path or '.'} {' | '.join(bounds)}".rstrip()
    for alternative in alternatives:
        for name, inner in alternative.get("properties", {}).items():
            yield from _keys(inner, f"{path}.{name}".lstrip("."), models)
        for key, mark in (("additionalProperties", ".*"), ("items", "[]")):
            if isinstance(inner := alternative.get(key), dict):
                yield from _keys(inner, path + mark, models)


def _alternatives(schema: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield `schema` and all that it refers to for the same value."""
    while "$ref" in schema:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**models[schema["$ref"].rpartition("/")[2]], **beside}
    yield schema
    branches = [
        *schema.get("anyOf", ()),
        *schema.get("allOf", ()),
        *(schema[k] for k in ("then", "else") if k in schema),
    ]
    for branch in branches:
        yield from _alternatives(branch, models)


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _PROSE | _NESTED and not isinstance(value, dict)}


def _signatures(name: str, thing: Any, public: Sequence[Any]) -> Iterator[str]:
    """Yield the signature of a function; of a class its own and those of its public methods.

    Methods of a base of the same package count as the class's own, but for bases that are public themselves.
    """
    if not callable(thing):
        yield f"{name}: {type(thing).__name__}"
        return
    # The keys of a model are frozen as keys; its signature depends on what was asked of it before.
    yield name + ("(keys)" if hasattr(thing, "model_fields") else _signature(thing))
    if inspect.isclass(thing):
        package = thing.__module__.partition(".")[0]
        own = [base for base in thing.__mro__ if base is thing or (base not in public and _is_of(package, base))]
        for member, value in sorted({key: vars(base)[key] for base in reversed(own) for key in vars(base)}.items()):
            if not member.startswith("_"):
                yield f"{name}.{member}" + (_signature(value) if callable(value) else f": {type(value).__name__}")


def _is_of(package: str, thing: Any) -> bool:
    return thing.__module__.partition(".")[0] == package


def _signature(thing: Any) -> str:
    try:
        return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", str(inspect.signature(thing)))
    except (TypeError, ValueError):
        return f": {type(thing).__name__}"


def _pairs(value: Any) -> Iterator[str]:
    return (f"{path} = {text}" for path, text in leaves(value) if not _UNFROZEN.search(path))


def _line(facts: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(facts.items()))
