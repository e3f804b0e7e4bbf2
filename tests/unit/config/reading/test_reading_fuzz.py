"""Drawn and damaged files, and files that are none."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlinf_core.config import reading, yaml_tree
from rlinf_core.config.diagnostics import Diagnostics, Severity, render_text
from rlinf_core.config.reading import decode, read, read_value
from rlinf_core.config.tree import Node, ScalarNode, SequenceNode, Span, to_data
from rlinf_core.job.load import Job, load_job

SYNTAX = ("yaml-syntax", "tab-indentation")

# Pieces that make structure, and pieces that have made trouble.
PIECES = st.sampled_from(
    (
        *("a", "b", "1", "010", "~", "null", "true", ".inf", "text here", "x:y", "ä", "\U0001f600"),
        *("'", '"', "''", "'q'", '"q"', "\\", "\\u", "\\ud800", "\\UFFFFFFFF", "|", "|\n", ">-\n", "|2\n"),
        *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\n  ", "\n\t"),
        *(":", ": ", ":\n", "- ", "-\t", "\n- ", "? ", "\n? ", "[", "]", "{", "}", "{{", "}}", ",", ", "),
        *("#", " # c", "\n# c\n", "---", "\n---\n", "...\n", "%YAML 1.1\n", "%YAML 1.3\n", "%TAG ! x\n", "%", "@", "`"),
        *("&a ", "&b ", "*a", "*b", "*a : ", "<<: ", "<<: *a\n", "<<"),
        *("! ", "!!str ", "!!int ", "!!map\n", "!x ", "!<y> ", "!e!z "),
        *("\ufeff", "\u2028", "\x85", "\0", "\x1b", "\ufdd0"),
    )
)


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    """Make the limits small, so that passing them is part of what is tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "MOST_BYTES", 100_000)
        patch.setattr(yaml_tree, "MOST_NODES", 2000)
        patch.setattr(yaml_tree, "MOST_DEPTH", 50)
        yield


def check_span(span: Span, parent: Span | None) -> None:
    assert 0 <= span.start <= span.end <= len(span.source.text)
    assert parent is None or (parent.start <= span.start and span.end <= parent.end)


def check_tree(root: Node, *, has_aliases: bool) -> None:
    """Spans lie in the text and, without aliases, in that of the parent; keys are unique; raw text is real text."""
    waiting: list[tuple[Node, Span | None]] = [(root, None)]
    seen: set[int] = set()
    while waiting:
        node, parent = waiting.pop()
        check_span(node.span, None if has_aliases else parent)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, ScalarNode):
            node.raw.encode("utf-8")
            written = node.span.text
            if node.plain and not has_aliases and "\n" not in written and not written.startswith(("'", '"', "|", ">")):
                assert node.raw == written
        elif isinstance(node, SequenceNode):
            waiting += [(item, node.span) for item in node.items]
        else:
            assert len({entry.key.raw for entry in node.entries}) == len(node.entries)
            waiting += [(entry.key, node.span) for entry in node.entries]
            waiting += [(entry.value, node.span) for entry in node.entries]


def check_findings(collected: Diagnostics) -> None:
    for finding in collected:
        check_span(finding.span, None)
        for span, _ in finding.related:
            check_span(span, None)
        assert len(finding.message) < 400
        for said in (finding.message, finding.help or ""):
            said.encode("utf-8")
            assert "\n" not in said


def check_reading(data: bytes) -> None:
    diagnostics = Diagnostics()
    source = decode("fuzz.yaml", data, diagnostics)
    tree = read(source, diagnostics) if source else None
    assert tree is not None or not diagnostics.ok
    check_findings(diagnostics)
    if any(finding.code in SYNTAX for finding in diagnostics):
        errors = [finding.code for finding in diagnostics if finding.severity is Severity.ERROR]
        assert len([code for code in errors if code != "yaml-version"]) == 1
    if source is None:
        return
    if tree is not None:
        check_tree(tree, has_aliases="*" in source.text)
    diagnostics = Diagnostics()
    start = min(2, len(source.text))
    value = read_value(source, start, len(source.text), diagnostics)
    assert value is not None or not diagnostics.ok
    check_findings(diagnostics)
    assert all(finding.span.start >= start for finding in diagnostics)
    if value is not None:
        check_tree(value, has_aliases="*" in source.text)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff\xfe")
@example(b"a: \xc3")
def test_any_bytes(data: bytes) -> None:
    check_reading(data)


# The examples are what long runs of a coverage-guided fuzzer found, while this was written.
@given(st.lists(PIECES, max_size=40).map("".join))
@example("a: %b")
@example("%YAML 1.3\n---\na: 1\n")
@example("a: 1\n...\n%YAML 1.3\n---\nb: 1\n")
@example("%YAML 1.1\n\tb")
@example('a: "a\n\t \\u\n')
@example("*" + "T" * 400 + " : 1\n")
@example('!: "\\ud800"\n')
@example(": \u2028 \u20288 \u2028 \u20288!")
@example("\u2028\r {::{ {{: {{: {{?\n b,{{? -\t\n b,{{? -\ta\n\n")
@example("!- : !!#i\n !- :\n #i")
@example("&ga\x85 a:\r\n: ga:a:\r\n: ga:\r\n: g\r\n: g")
@example("a: " + "[" * 5000)
def test_any_text(text: str) -> None:
    check_reading(text.encode("utf-8"))


# The loader to compare with still takes the line ends of YAML 1.1 for line ends, and `.0e0` for text.
PLAIN_TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x85\u2028\u2029"), max_size=12
).filter(lambda text: not re.fullmatch(r"[-+]?\.[0-9]+[eE][-+0-9]+", text))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | PLAIN_TEXT
    | st.from_regex(r"[-+.:0-9xo_]{1,6}", fullmatch=True)
)
DOCUMENTS = st.dictionaries(
    PLAIN_TEXT,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PLAIN_TEXT, inner, max_size=4),
        max_leaves=12,
    ),
    min_size=1,
    max_size=4,
)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float) and math.isnan(theirs):
        return math.isnan(ours)
    if theirs is None or isinstance(theirs, str):
        return ours == theirs and type(ours) is type(theirs)
    return ours == theirs and not isinstance(ours, str)


def keys_are_text(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and keys_are_text(inner) for key, inner in value.items())
    return not isinstance(value, list) or all(map(keys_are_text, value))


@example(document={"?0": None}, flow=True, width=20)
@given(document=DOCUMENTS, flow=st.sampled_from([True, False, None]), width=st.sampled_from([20, 80, 4096]))
def test_agreement_with_a_full_loader(document: dict[str, Any], flow: bool | None, width: int) -> None:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = flow
    yaml.width = width
    yaml.sort_base_mapping_type_on_output = False
    stream = io.StringIO()
    yaml.dump(document, stream)
    text = stream.getvalue()
    try:
        theirs = yaml.load(text)
    except YAMLError:
        reject()  # it does not always quote what it must: `{:0: 1}`
    if not keys_are_text(theirs):
        reject()  # the same: in `{?0: 1}` the key is a number, which is refused here

    diagnostics = Diagnostics()
    source = decode("dumped.yaml", text.encode("utf-8"), diagnostics)
    assert source is not None, list(diagnostics)
    tree = read(source, diagnostics)
    assert not len(diagnostics), list(diagnostics)
    assert tree is not None
    check_tree(tree, has_aliases=False)
    ours = to_data(tree)
    # The loader takes `?` in braces for a key's mark, whatever follows.
    assert same(ours, theirs) or same(ours, document)


CLUSTER = "cluster:\n  num_nodes: 1\n"


def output(job: Job) -> str:
    return "\n".join(map(render_text, job.diagnostics))


@pytest.mark.security
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("text", [None, "extends: base.yaml\n", "extends: [./base.yaml]\n"])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, make: object, text: str | None) -> None:
    assert callable(make)
    make(tmp_path / "base.yaml")
    file = tmp_path / ("base.yaml" if text is None else "job.yaml")
    if text is not None:
        file.write_text(text)
    (finding,) = load_job(str(file)).diagnostics
    assert finding.code == ("unreadable-file" if text is None else "base-unreadable")
    assert "not a regular file" in finding.message


@pytest.mark.security
def test_a_base_is_not_read_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("extends: /dev/stdin\n")
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "validate", str(tmp_path / "job.yaml")],
        capture_output=True, text=True, check=False, timeout=60, input=CLUSTER,
    )  # fmt: skip
    assert done.returncode == 2
    assert "base-unreadable" in done.stdout + done.stderr


@pytest.mark.security
@pytest.mark.parametrize("name", ["/dev/stdin", "-", "/dev/fd/0"])
def test_standard_input_stays(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "validate", name],
        input=CLUSTER, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "num_nodes" not in done.stderr
    assert done.returncode == 0


@pytest.mark.security
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shadow", "".join(f"user{n}:$6$hash-{n}:19000:0:99999:7:::\n" for n in range(5))),
        ("shadow.yaml", "".join(f"user{n}:$6$hash-{n}:19000:0:99999:7:::\n" for n in range(5))),
        ("group", "".join(f"group{n}:x:{n}:\n" for n in range(5))),
        ("accounts", "".join(f"user{n}: hash-{n}\n" for n in range(5))),
        ("key", "-----BEGIN KEY-----\n" + "hash-0\n" * 5),
        ("htpasswd", "".join(f"user{n}:$apr1$hash-{n}\n" for n in range(5))),
    ],
)
def test_a_base_that_is_no_configuration_is_not_shown(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "job.yaml").write_text(f"extends: {name}\nrecipe: embodied\n{CLUSTER}")
    shown = output(load_job(str(tmp_path / "job.yaml")))
    assert "hash-" not in shown
    assert name in shown


@pytest.mark.security
def test_a_table_of_passwords_is_not_shown_as_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("".join(f"user{n}:$6$hash-{n}:19000:0:99999:7:::\n" for n in range(5)))
    shown = output(load_job(str(tmp_path / "shadow")))
    assert "hash-" not in shown
    assert "`user0:$6`" in shown


@pytest.mark.security
def test_a_base_of_another_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "base").write_text(CLUSTER)
    (tmp_path / "job.yaml").write_text("extends: base\n")
    assert not list(load_job(str(tmp_path / "job.yaml")).diagnostics)
