"""Small values of the core: addresses, names, arguments, registries, suggestions, statistics, waiting."""

from __future__ import annotations

import ast
import copy
import dataclasses
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import ConfigError, EnvironmentVariableError, InvalidNameError
from rlinf_core.registry import Registry
from rlinf_core.runners.metrics import wilson_interval
from rlinf_core.suggest import as_index, clipped, short_repr
from rlinf_core.waiting import Deadline, Operation, OperationKind, spell_seconds
from tests.clock import Clock

groups = st.text(st.characters(exclude_characters=":", exclude_categories=["C", "Z"]), min_size=1)
addresses = st.builds(WorkerAddress, groups, st.lists(st.integers(0, 10**6), max_size=5))


@given(addresses)
def test_a_name_leads_back_to_its_address(address: WorkerAddress) -> None:
    assert WorkerAddress.from_name(address.get_name()) == address


@given(addresses, st.integers(0, 1000))
def test_a_child_knows_its_parent(address: WorkerAddress, rank: int) -> None:
    child = address.get_child_address(rank)
    assert child.get_parent_address() == address
    assert child.rank == rank
    assert child.get_parent_rank() == (address.rank if address.ranks else None)


@given(addresses, addresses)
def test_it_is_a_value(one: WorkerAddress, other: WorkerAddress) -> None:
    assert (one == other) == (one.get_name() == other.get_name())
    assert hash(copy.deepcopy(one)) == hash(one)
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one < other) + (other < one) + (one == other) == 1


def test_it_is_written_as_group_and_ranks() -> None:
    assert WorkerAddress("Worker_group_MyWorker", (0, 1)).get_name() == "Worker_group_MyWorker:0:1"
    assert str(WorkerAddress("actor", 3)) == "actor:3"
    assert repr(WorkerAddress("actor", 3)) == "WorkerAddress('actor:3')"
    assert WorkerAddress("actor", [1, 2]) == WorkerAddress("actor", (1, 2))
    assert WorkerAddress("actor", Three()) == WorkerAddress("actor", 3)  # pyright: ignore[reportArgumentType]


def test_ranks_order_as_numbers() -> None:
    names = ["b:0", "a:10", "a:2", "a:2:0", "a"]
    assert [a.get_name() for a in sorted(map(WorkerAddress.from_name, names))] == ["a", "a:2", "a:2:0", "a:10", "b:0"]


def test_it_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerAddress("a", 0).ranks = (1,)  # pyright: ignore[reportAttributeAccessIssue]


def test_it_pickles_small() -> None:
    assert len(pickle.dumps(WorkerAddress("actor", 3))) < 80


def test_the_top_has_no_parent_worker() -> None:
    assert WorkerAddress("actor", 3).get_parent_rank() is None
    assert WorkerAddress("actor", 3).get_parent_address() == WorkerAddress("actor")
    assert WorkerAddress("actor").get_parent_address() is None
    with pytest.raises(InvalidNameError, match="a group, not a worker"):
        _ = WorkerAddress("actor").rank


@pytest.mark.parametrize("name", ["", ":0", "a:", "a::0", "a:-1", "a:x", "a:01", "a: 1", "a:1_0", "a:²", "a:٣"])
def test_what_is_no_address_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        WorkerAddress.from_name(name)


@pytest.mark.parametrize(
    ("group", "ranks"),
    [("", 0), ("a:b", 0), ("a\nb", 0), ("\ud800", 0), ("a", -1), ("a", (0, -1)), ("a", True), ("a", None)],
)
def test_what_cannot_be_one_is_refused(group: str, ranks: int | tuple[int, ...]) -> None:
    with pytest.raises(InvalidNameError):
        WorkerAddress(group, ranks)


@pytest.mark.parametrize("rank", [1.0, "1", None, -1, True])
def test_what_is_no_rank_is_refused_though_it_may_equal_one(rank: object) -> None:
    with pytest.raises(InvalidNameError, match="is not a rank of a worker"):
        WorkerAddress("actor").get_child_address(rank)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", [5, None, b"actor:0", WorkerAddress("actor")])
def test_what_is_no_text_is_no_name(name: object) -> None:
    with pytest.raises(InvalidNameError):
        WorkerAddress.from_name(name)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidNameError):
        WorkerAddress(name)  # pyright: ignore[reportArgumentType]


class Three:
    def __index__(self) -> int:
        return 3


def test_whole_numbers_of_any_kind() -> None:
    assert (as_index(0), as_index(-2), as_index(Three())) == (0, -2, 3)


def test_what_only_equals_a_whole_number_is_none() -> None:
    assert [as_index(value) for value in (True, 1.0, "1", None, [1])] == [None] * 5


def test_what_was_given_is_one_short_line() -> None:
    assert short_repr("1") == "'1'"
    assert short_repr(Text("a\n  b")) == "a b"
    assert len(short_repr("x" * 1000)) == 80
    assert short_repr(10**10000) == "a very large int"


class Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


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
def _texts() -> dict[Path, str]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


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
    for path, text in _texts().items():
        for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            diagnostics[name].append(str(path))
    assert len(diagnostics) > 500
    assert {name: places for name, places in diagnostics.items() if len(places) > 1} == {}


def test_no_two_contracts_of_json_share_a_name() -> None:
    results = [
        name for text in _texts().values() for name in re.findall(r'^\w*SCHEMA\b[^=]*= "(.+)"', text, re.MULTILINE)
    ]
    assert len(results) > 15
    assert sorted(results) == sorted(set(results))


def test_no_name_is_one_that_the_glossary_replaced() -> None:
    old = [f"{path}: {path.stem}" for path in _texts() if path.stem in REPLACED]
    suspects = [
        (path, text) for path, text in _texts().items() if not REPLACED.keys().isdisjoint(re.findall(r"\w+", text))
    ]
    used = {(path, name) for path, text in suspects for name in _names(ast.parse(text))}
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


def registry() -> Registry[object]:
    return Registry("number", {"pi": "math:prod"})


class Root:
    """A base of classes that a registry asks for."""


def test_names_stand_for_what_is_brought_registered_or_imported() -> None:
    numbers = registry()
    numbers.register("two")(math.gcd)
    assert numbers.names() == ["pi", "two"]
    assert numbers.get("pi") is math.prod
    assert numbers.get("two") is math.gcd
    assert numbers.get("math:sqrt") is math.sqrt


@pytest.mark.parametrize(
    ("name", "bases", "message"),
    [
        ("math:pi", [], "number `math:pi` is an object of type `float`, not a class or a function"),
        ("math:sqrt", [f"{__name__}:Root"], "`math:sqrt` is a function, not a class that extends `Root` of `"),
        ("fractions:Fraction", [f"{__name__}:Root", "absent:Root"], "is a class that does not extend `Root` of `"),
        ("three", [f"{__name__}:Root"], "number `three` is an object of type `int`"),
    ],
)
def test_a_name_of_something_else(name: str, bases: list[str], message: str) -> None:
    numbers: Registry[object] = Registry("number", {"pi": "math:pi"}, bases)
    numbers.register("three")(3)
    with pytest.raises(ConfigError, match=message):
        numbers.get(name)


def test_a_class_of_ones_own_that_extends_a_base() -> None:
    numbers: Registry[object] = Registry("number", {}, ["absent:Root", f"{__name__}:Root"])
    assert numbers.get(f"{__name__}:Root") is Root


def test_a_name_is_given_once() -> None:
    numbers = registry()
    three = [3]
    numbers.register("three")(three)
    numbers.register("three")(three)  # a module that is imported again says the same
    with pytest.raises(ConfigError, match="registered twice"):
        numbers.register("three")([3])
    with pytest.raises(ConfigError, match="`pi` comes with rlinf already"):
        numbers.register("pi")(3)


@pytest.mark.parametrize("name", ["", "a:b", math.gcd])  # the last is a decorator without brackets
def test_what_cannot_be_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="is not a valid number name"):
        registry().register(name)


def test_remedy_of_a_name_taken_within_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_pi.py").write_text(
        "from rlinf_core.errors import ConfigError\nraise ConfigError('no', help='do')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded: no") as caught:
        registry().get("takes_pi:pi")
    assert caught.value.help == "do"


def test_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="unknown number `po`"):
        registry().get("po")
    with pytest.raises(ConfigError, match="cannot be loaded: AttributeError"):
        registry().get("math:no_such_name")


def test_the_interval_of_a_share_is_wilsons() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (1, 29, 0.0061, 0.1718)):
        assert wilson_interval(right, count) == pytest.approx((low, high), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_long_text_is_clipped_in_the_middle_at_blanks() -> None:
    assert clipped("short") == "short"
    text = clipped(f"`{'x' * 100_000}` is no name")
    assert text.startswith("`xxx")
    assert text.endswith("is no name")
    assert len(text) < 1_100
    secret = "s" * 90
    assert secret[:20] not in clipped("a" * 600 + f" {secret} " + "b" * 5_000)
    lines = clipped("\n".join(["y" * 2_000] * 1_000))
    assert len(lines) < 60_000
    assert max(map(len, lines.splitlines())) < 1_100


def test_errors_clip_what_they_quote() -> None:
    error = ConfigError("m" * 9_999, where="w" * 9_999, why="y" * 9_999, help="h" * 9_999)
    assert len(str(error)) < 5_000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_deadline_runs_out(clock: Clock) -> None:
    deadline = Deadline.after(2)
    clock.now += 1.5
    assert deadline.remaining() == 0.5
    assert not deadline.expired
    clock.now += 1
    assert deadline.remaining() == 0
    assert deadline.expired
    assert deadline.seconds == 2


def test_the_default_deadline_is_the_declared_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLINF_TIMEOUT", raising=False)
    assert Deadline.after().at == 1900
    monkeypatch.setenv("RLINF_TIMEOUT", "7")
    assert Deadline.after(None).seconds == 7
    monkeypatch.setenv("RLINF_TIMEOUT", "never")
    with pytest.raises(EnvironmentVariableError):
        Deadline.after()


def test_a_timeout_of_nothing_has_passed_at_once(clock: Clock) -> None:
    assert Deadline.after(0).expired


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), 10**400, Decimal(3), "3"])
def test_no_wait_is_unbounded(seconds: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Deadline.after(seconds)


def test_a_step_of_a_wait_ends_with_it(clock: Clock) -> None:
    deadline = Deadline.after(10)
    assert deadline.sooner(3).at == 103
    assert deadline.sooner(30) is deadline


@pytest.mark.parametrize(
    ("kind", "target", "key", "title", "words"),
    [
        (OperationKind.RECV, "actor:0", None, "recv from actor:0", "waits in recv from actor:0 for 12 s"),
        (OperationKind.SEND_TENSOR, "env:1", None, "send_tensor to env:1", "waits in send_tensor to env:1 for 12 s"),
        (
            OperationKind.QUERY,
            "a",
            "k",
            "query on channel `a`, key `k`",
            "waits for the state of channel `a`, key `k` for 12 s",
        ),
        (OperationKind.CLOSE, "a", "default", "close on channel `a`", "waits until channel `a` is closed for 12 s"),
        (OperationKind.GET, "a", "default", "get on channel `a`", "waits on channel `a` for 12 s"),
        (
            OperationKind.GET_BATCH,
            "a",
            "k",
            "get_batch on channel `a`, key `k`",
            "waits for a batch on channel `a`, key `k` for 12 s",
        ),
        (OperationKind.PUT, "a", None, "put on channel `a`", "waits for room on channel `a` for 12 s"),
        (OperationKind.CALL, "actor.train", None, "call `actor.train`", "waits for `actor.train` for 12 s"),
        (OperationKind.METHOD, "train", None, "method `train`", "runs `train` for 12 s"),
        (OperationKind.IDLE, "", None, "idle", "is idle: no method of it has been called for 12 s"),
        (OperationKind.IDLE, "its `f` returned", None, "idle", "is idle since its `f` returned, 12 s ago"),
    ],
)
def test_an_operation_says_what_it_is(
    kind: OperationKind, target: str, key: str | None, title: str, words: str
) -> None:
    operation = Operation(kind, target, key, 12.3, serial=1)
    assert operation.title == title
    assert operation.waits() == words


def test_an_operation_says_what_it_finds() -> None:
    operation = Operation(OperationKind.GET, "action", None, 3, serial=1)
    assert operation.waits("empty") == "waits on channel `action`, empty, for 3.0 s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (12.3, "12 s"), (599, "599 s"), (1800, "30 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert spell_seconds(seconds) == words
