"""Entry points, secrets that a process knows, and the source of a module."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.job.load import load_job
from rlinf_core.process.import_path import EntryPoint, locate, offered, syntax_tree
from rlinf_core.process.known_secrets import MASK, forget, hidden, hiding_formatter, known, remember

POINTS = """\
[console_scripts]
rlinf.commands = never:main

[rlinf.commands]
# = a comment
greet = its_module:app
 far = its_module : deep.app [extra]
"""


def install(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "entry_points.txt").write_text(text, encoding="utf-8")


def test_points_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "its_package-1.0.dist-info", POINTS)
    install(tmp_path, "its_older.egg-info", "[rlinf.commands]\ngreet = later:app\nold = its_older:app\n")
    install(tmp_path, "no_package", "[rlinf.commands]\nnever = no_package:app\n")
    (tmp_path / "bare-1.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path / "gone"), str(tmp_path)])
    points = offered("rlinf.commands")
    assert {"greet", "far", "old"} == set(points)
    assert points["old"] == EntryPoint("old", "its_older:app")
    assert points["far"].module == "its_module"


def test_package_that_is_installed_twice_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "first", "Its_Package-2.dist-info", "[rlinf.commands]\nnew = its:new\n")
    install(tmp_path / "second", "its.package-1.dist-info", "[rlinf.commands]\nold = its:old\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert offered("rlinf.commands") == {"new": EntryPoint("new", "its:new")}


def test_object_is_loaded_as_it_is_named() -> None:
    assert EntryPoint("a", "os:path.join").load() is os.path.join
    assert EntryPoint("a", "os : path.join [extra]").load() is os.path.join
    assert EntryPoint("a", "os.path").load() is os.path
    with pytest.raises(AttributeError):
        EntryPoint("a", "os:nothing_there").load()


@pytest.mark.parametrize("group", ["rlinf.commands", "rlinf.recipes", "console_scripts", "pytest11"])
def test_installed_packages_offer_what_importlib_metadata_says(group: str) -> None:
    expected: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=group):
        expected.setdefault(point.name, point.value)
    assert {point.name: point.value for point in offered(group).values()} == expected


@pytest.mark.security
@given(st.text(min_size=6, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_value_is_found_in_every_form(value: str, before: str, after: str) -> None:
    forget()
    remember([value])
    value = value.strip()
    if value not in known():
        return
    for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")):
        assert MASK in hidden(f"{before}{form}{after}")
    assert hidden(f"x {value} y").startswith("x ")


@pytest.mark.security
@pytest.mark.parametrize(
    "value", ["", "short", "true", "False", "null", "123456", "1234567.25", "-12345678", "     x   "]
)
def test_values_that_stand_in_innocent_text_are_left(value: str) -> None:
    remember([value])
    assert known() == ()
    assert hidden("true 123456 short") == "true 123456 short"


@pytest.mark.security
def test_longest_value_wins() -> None:
    remember(["secret-value", "secret-value-and-more"])
    assert hidden("a secret-value-and-more b secret-value") == f"a {MASK} b {MASK}"


@pytest.mark.security
def test_lines_of_a_key_are_masked() -> None:
    remember(["-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----\n"])
    assert hidden("bad key: MIIEvQIBADANBgkq") == f"bad key: {MASK}"
    assert hidden("-----BEGIN PRIVATE KEY-----") == "-----BEGIN PRIVATE KEY-----"


@pytest.mark.security
def test_number_of_values_is_bounded() -> None:
    remember(f"value-{number:06}" for number in range(3000))
    assert len(known()) == 1000
    assert hidden("value-002999 value-000000") == f"{MASK} value-000000"


@pytest.mark.security
def test_log_lines_and_tracebacks_are_masked() -> None:
    remember(["secret-value"])
    try:
        raise ValueError("secret-value")
    except ValueError as error:
        record = logging.LogRecord("x", 20, "x", 1, "got %s", ("secret-value",), (type(error), error, None))
    line = hiding_formatter("%(message)s").format(record)
    assert "secret-value" not in line
    assert line.startswith(f"got {MASK}")


MATH = "recipe: math\ncluster:\n  num_nodes: 1\n  component_placement: {'actor,rollout,reward': 0}\n"
AGENT = "recipe: agent\ncluster:\n  num_nodes: 1\n  component_placement: {'actor,rollout,reward,agent': 0}\n"
LAPTOP = "extends: embodied/pick-laptop\n"
RUN = "raise SystemExit('this package was imported')\n"
TARGET = "planted_kit.inner.parts:part"
LONELY = "planted_spaces.inner.parts:part"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages on the path: one whose modules end the process that imports them, and one without `__init__.py`."""
    for package in ("planted_kit", "planted_kit/inner", "planted_spaces/inner"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "parts.py").write_text(f"def part(text): ...\nclass Part: ...\n{RUN}")
        if "kit" in package:
            (tmp_path / package / "__init__.py").write_text(RUN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.security
@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("target", [TARGET, LONELY])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        (MATH, "reward: {reward_type: 'TARGET'}"),
        (AGENT, "agent: {run: 'TARGET'}"),
        (AGENT, "agent: {tools: ['TARGET']}"),
        (LAPTOP, "env: {train: {env_type: 'CLASS'}}"),
        (LAPTOP, "actor: {model: {model_type: 'CLASS'}}"),
        (LAPTOP, "algorithm: {loss_type: 'TARGET'}"),
    ],
)
def test_no_key_has_a_package_imported_when_a_file_is_checked(planted: Path, file: str, text: str, target: str) -> None:
    if "CLASS" in text:
        text, target = text.replace("CLASS", "TARGET"), target.replace(":part", ":Part")
    other = f"{target.partition(':')[0]}:other"
    wrong = load_job("-", stdin=f"{file}{text.replace('TARGET', other)}\n".encode())
    assert f"{planted}" in str([item.message for item in wrong.diagnostics if "defines no `other`" in item.message])
    job = load_job("-", stdin=f"{file}{text.replace('TARGET', target)}\n".encode())
    assert not [item for item in job.diagnostics if target in item.message]
    assert not [name for name in sys.modules if name.startswith("planted_")]


@pytest.mark.security
@pytest.mark.usefixtures("planted")
def test_an_environment_id_with_a_module_is_not_imported() -> None:
    pytest.importorskip("gymnasium")
    text = LAPTOP + "env: {train: {env_type: gymnasium, task: 'planted_kit.inner.parts:Slide-v0'}}\n"
    job = load_job("-", stdin=text.encode())
    assert not [item for item in job.diagnostics if "cannot be made" in item.message]
    assert not [name for name in sys.modules if name.startswith("planted_")]


@pytest.mark.security
@pytest.mark.usefixtures("planted")
def test_what_is_located(planted: Path) -> None:
    spec = locate("planted_spaces.inner.parts")
    assert spec is not None
    assert spec.origin == str(planted / "planted_spaces" / "inner" / "parts.py")
    assert locate("os.path") is not None
    assert [locate(name) for name in ("planted_kit.none", "planted_kit.parts.none", "none.inner", "os.none")] == [
        None
    ] * 4


@pytest.mark.security
@pytest.mark.usefixtures("planted")
def test_a_source_that_cannot_be_read_is_told(planted: Path) -> None:
    for text, why in (
        (b"(" * 5000, "odd.py"),
        (b"x = 1\0\n", "odd.py"),
        (b"def f(:\n", "line 1 of "),
        (b"#" * (5 << 20), "MiB"),
    ):
        (planted / "odd.py").write_bytes(text)
        spec = locate("odd")
        assert spec is not None
        with pytest.raises(ValueError, match=why):
            syntax_tree(spec)
