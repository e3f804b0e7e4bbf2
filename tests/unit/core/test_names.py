"""The names of the house: one class a name, the glossary's words, and none of those that it replaced."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("rlinf_core", "rlinf_cli", "recipes")

# Metaphors that the glossary's terms replaced, as names of modules, classes, functions and attributes.
REPLACED = {
    "AddressCard": "EndpointInfo",
    "Alone": "SingleProcess",
    "Autopsy": "Postmortem",
    "Boxes": "ShmMailbox",
    "Cargo": "EncodedBody",
    "Farewell": "ClosedNotice",
    "Holding": "ParallelStrategy",
    "Judgement": "ActionEval",
    "Lane": "PutPipeline",
    "LastWords": "ExitReason",
    "OperationBoard": "InflightOps",
    "Parcel": "ReceivedMessage",
    "Party": "Peer",
    "PostOffice": "ShmMailbox",
    "_mourn": "fail_pending",
    "concede": "release_lease",
    "courier": "sender",
    "fragments": "sections",
    "keep_house": "run_maintenance",
    "last_words": "exit_reason",
    "looking": "probing",
    "operation_board": "inflight_ops",
    "see_to_dropped": "start_reaper",
    "strand": "task_key",
    "wakers": "waits_for",
}


@cache
def _trees() -> tuple[tuple[Path, ast.Module], ...]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple((path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


def _names(tree: ast.Module) -> Iterator[str]:
    """Every name that a module defines or binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_no_two_public_classes_share_a_name() -> None:
    diagnostics: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                diagnostics[node.name].append(f"{path}:{node.lineno}")
    assert {name: places for name, places in diagnostics.items() if len(places) > 1} == {}


def test_no_two_contracts_of_json_share_a_name() -> None:
    results = [
        name
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for name in re.findall(r'^\w*SCHEMA\b[^=]*= "(.+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(results) > 15
    assert sorted(results) == sorted(set(results))


def test_no_name_is_one_that_the_glossary_replaced() -> None:
    old = [f"{path}: {path.stem}" for path, _ in _trees() if path.stem in REPLACED]
    used = {(path, name) for path, tree in _trees() for name in _names(tree)}
    old += [f"{path}: {name}, now {REPLACED[name]}" for path, name in sorted(used) if name in REPLACED]
    assert old == []


def _glossary() -> list[tuple[str, str]]:
    text = (ROOT / "docs/dev/glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|[^|]+\| `([^`]+)` \|$", text, re.MULTILINE)
    return [(term, file) for term, file in rows]


def test_each_term_of_the_glossary_is_found_where_it_says() -> None:
    terms = _glossary()
    assert 35 <= len(terms) <= 50
    missing: list[str] = []
    for term, file in terms:
        path = ROOT / file if (ROOT / file).exists() else ROOT / "rlinf_core" / file
        # A term is a word or two of the file's name, of its prose, or of a name in it.
        words = [word.lower().removesuffix("s") for word in re.findall(r"\w+", term.partition("(")[0])]
        text = (str(path.relative_to(ROOT)) + path.read_text(encoding="utf-8")).lower() if path.exists() else ""
        if not all(word in text for word in words):
            missing.append(f"{term}: {file}")
    assert missing == []
