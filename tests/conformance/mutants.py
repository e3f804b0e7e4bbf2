"""Shipped files with one mistake each, judged by the JSON Schema and by `rlinf validate`.

`python -m tests.conformance.mutants` prints the counts, and the mutants that the schema alone refuses; `--write` stores
the counts.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

import rlinf_cli
from rlinf_cli.importing.convert import OF_THIS_MACHINE
from rlinf_cli.job.completion import file_schema
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import load_job

assert rlinf_cli  # it makes the keys of related projects known
COUNTS = Path(__file__).with_name("mutant_counts.json")
PER_FILE = 2
_WRONG: tuple[Any, ...] = (None, True, -1, 0, 1.5, "", "some text", [], ["a"], {}, {"a": 1}, 10**12)


def mutants() -> Iterator[tuple[str, Any]]:
    """Yield each mutant with what was changed; the same in every run."""
    rng = random.Random(0)
    for name, file in sorted(shipped_configs().items()):
        whole: Any = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
        places = list(_places(whole))
        for _ in range(PER_FILE):
            mutant, path = copy.deepcopy(whole), rng.choice(places)
            parent = mutant
            for key in path[:-1]:
                parent = parent[key]
            kind = rng.choice(("remove", "replace", "replace", "rename"))
            if kind == "remove":
                del parent[path[-1]]
            elif kind == "replace":
                parent[path[-1]] = rng.choice(_WRONG)
            elif isinstance(parent, dict):
                parent[f"{path[-1]}_"] = parent.pop(path[-1])
            yield f"{name}: {kind} {'.'.join(map(str, path))}, which gives {parent!r:.80}", mutant


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(child, (*path, key))


def judged() -> tuple[Counter[str], list[str]]:
    """Return the counts by who refuses, and the mutants that the schema alone refuses."""
    models = {name: find_recipe(name).config_model() for name in recipe_names()}
    schema = file_schema(models, {"sft": find_recipe("sft").variants})
    validator = Draft202012Validator(schema)
    counts, alone = Counter({"both": 0, "neither": 0, "schema": 0, "validate": 0}), list[str]()
    for what, mutant in mutants():
        by_schema = not validator.is_valid(mutant)
        job = load_job("-", stdin=json.dumps(mutant).encode(), environ={})
        errors = [finding for finding in job.diagnostics if finding.severity is Severity.ERROR]
        by_us = any(error.code not in OF_THIS_MACHINE for error in errors)
        counts["both" if by_schema and by_us else "schema" if by_schema else "validate" if by_us else "neither"] += 1
        if by_schema and not by_us:
            alone.append(what)
    return counts, alone


def stored() -> dict[str, int]:
    """Return the counts by who refuses: `both`, `neither`, `schema` alone or `validate` alone."""
    counts: dict[str, int] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return counts


def main(arguments: list[str]) -> None:
    """Print the counts; see the module."""
    counts, alone = judged()
    print(*alone, dict(counts), sep="\n")
    if "--write" in arguments:
        COUNTS.write_text(json.dumps(dict(sorted(counts.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
