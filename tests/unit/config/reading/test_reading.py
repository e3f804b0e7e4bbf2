"""Files, bytes and documents: what is read, what is refused, and where the caret is."""

from __future__ import annotations

import json
from pathlib import Path as FilePath

import pytest

from rlinf_core.config import reading, yaml_tree
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import decode, load_source, read, read_value
from rlinf_core.config.tree import ScalarNode, SourceText, Value, find, to_data
from tests.unit.config.texts import read_text, tree_of


def data(text: str) -> Value:
    """Return the data of a text that must read without any finding."""
    return to_data(tree_of(text))


def report(text: str) -> list[tuple[str, str, str]]:
    """Code, position and underlined text of every finding."""
    return [(d.code, str(d.span.begin), d.span.text) for d in read_text(text)[1]]


# Texts without a mistake, and what they mean.
MEANINGS: list[tuple[str, Value]] = [
    ("a: 1\r\nb: |\r\n  x\r\n  y\r\n", {"a": 1, "b": "x\ny\n"}),
    ("a: 1\rb: 2\r", {"a": 1, "b": 2}),
    ("%YAML 1.2\n---\na: 1\n...\n", {"a": 1}),
    ("a: |\n  %YAML 1.1\n", {"a": "%YAML 1.1\n"}),
    # Tabs that do not indent, and within text; an indentation that not all lines share.
    ("a:\t1\t# c\n\t\nb: [\t1,\t\n\t2\t]\t\n\t# d\n'c'\t: x\nd: {e\t: 1\t}\ne: 1\n \t \n",
     {"a": 1, "b": [1, 2], "c": "x", "d": {"e": 1}, "e": 1}),
    ("b: 'x\ty'\nc: |\n  x\n  \ty\n", {"b": "x\ty", "c": "x\n\ty\n"}),
    ("# c\n  a: 1\n  b: 2\n", {"a": 1, "b": 2}),
    # Keys are what was written.
    ('010: a\n1.50: b\ntrue: c\n"x y": d\nactor,env: e\n? f\n: g\n',
     {"010": "a", "1.50": "b", "true": "c", "x y": "d", "actor,env": "e", "f": "g"}),
    ("'~': 2\n'null': 2\n'NULL': 2\n'<<': 1\n", {"~": 2, "null": 2, "NULL": 2, "<<": 1}),
    ("a: !!str 3\nb: ! 3\nc: !<tag:yaml.org,2002:str> 3\nd: !!str\n", {"a": "3", "b": "3", "c": "3", "d": ""}),
    ("a: !!int \"3\"\nb: !!float 2.5\nc: !!bool 'true'\nd: !!null ''\n", {"a": 3, "b": 2.5, "c": True, "d": None}),
    ("a: !!map {b: 1}\nb: !!seq [1]\nc: ! {b: 1}\n", {"a": {"b": 1}, "b": [1], "c": {"b": 1}}),
    ("a: &x 1\nb: *x\nc: &x 2\nd: *x\n", {"a": 1, "b": 1, "c": 2, "d": 2}),
    ("x: &x {a: 1}\ny: &y {<<: *x, b: 2}\nz: {<<: *y}\n",
     {"x": {"a": 1}, "y": {"a": 1, "b": 2}, "z": {"a": 1, "b": 2}}),
    (f"a: {'9' * 5000}\n", {"a": "9" * 5000}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), MEANINGS, ids=range(len(MEANINGS)))
def test_meaning(text: str, value: Value) -> None:
    assert data(text) == value


def test_float_tag_makes_a_float() -> None:
    assert repr(data("a: !!float 3\n")) == "{'a': 3.0}"


BOMB = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 20))])
# Texts, and of each finding the code, the place and the underlined text.
FINDINGS: list[tuple[str, list[tuple[str, str, str]]]] = [
    ("a: 1\rb: *c\r", [("undefined-alias", "2:4", "*c")]),
    *((f"a: 1\nb: 'x{sign}'\n", [("control-character", "2:6", sign)])
      for sign in "\0\x01\x1b\x7f\x80\ufffe\x85\u2028\u2029"),
    ('a: ["\ufffd\\ud83d", "\ufffd"]\n', [("lone-surrogate", "1:5", '"\ufffd\\ud83d"')]),
    *((text, [("empty-file", "1:1", "")])
      for text in ("", "\n\n", "  \n\t\n", "# only this\n", "---\n", "---\n...\n", "# a\n---\n# b\n")),
    ("a: 1\n---\nb: 2\n", [("several-documents", "2:1", "---")]),
    ("a: 1\n---\n", [("several-documents", "2:1", "---")]),
    ("a: 1\n...\nb: 2\n", [("several-documents", "3:1", "b: 2")]),
    ("a: 1\n--- # c\nb: [\n", [("several-documents", "2:1", "---")]),
    # A mistake of syntax is reported alone, everything else at once.
    ("a: 1\na: *x\nb: {{ c }}/d\n", [("yaml-syntax", "3:11", "/d")]),
    ("a: *x\na: !env y\n? [k]\n: 1\n~: 2\nb: {<<: 1}\nc: &c [*c]\n",
     [("undefined-alias", "1:4", "*x"), ("duplicate-key", "2:1", "a"), ("unknown-tag", "2:4", "!env"),
      ("complex-key", "3:3", "[k]"), ("null-key", "5:1", "~"), ("bad-merge", "6:9", "1"),
      ("recursive-alias", "7:8", "*c")]),
    ("\ta:\n\t\tb: 1\n", [("indented-file", "1:1", "\t"), ("tab-indentation", "2:1", "\t\t")]),
    *((f"a: 1\n{key}: 2\n", [("null-key", "2:1", key)]) for key in ("~", "null", "NULL", "")),
    *((f"a: {tag} {value}\n", [("unknown-tag", "1:4", tag)])
      for tag in ("!env", "!Foo", "!<tag:x>", "!!binary", "!!set", "!!omap", "!!timestamp",
                  "!!python/object/apply:os.system")
      for value in ("x", "[x]", "{x: 1}")),
    ("a: &b !c d\n", [("unknown-tag", "1:7", "!c")]),
    *((f"a: {value}\n", [("tag-mismatch", "1:4", value.split()[0])])
      for value in ("!!int x", "!!int true", "!!float x", "!!bool 1", "!!null 0", "!!map 3", "!!seq {}", "!!str []",
                    f"!!float {'9' * 900}")),
    ("a: &x [1, {b: *x}]\n", [("recursive-alias", "1:15", "*x")]),
    ("a: &x {*x : 1}\n", [("recursive-alias", "1:8", "*x")]),
    ("a: {<<: [1, {b: 1}, []]}\n", [("bad-merge", "1:10", "1"), ("bad-merge", "1:21", "[]")]),
    ("a: {<<: *b}\n", [("undefined-alias", "1:9", "*b")]),
    ("a: {<<: {}, <<: {}}\n", [("duplicate-key", "1:13", "<<")]),
    # The deepest that is read, and one more.
    ("a: " + "[" * 99 + "]" * 99, []),
    ("a: " + "[" * 100 + "]" * 100, [("too-deep", "1:103", "[")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "findings"), FINDINGS, ids=range(len(FINDINGS)))
def test_findings(text: str, findings: list[tuple[str, str, str]]) -> None:
    assert report(text) == findings


def test_a_bomb_of_merges() -> None:
    assert [code for code, _, _ in report(BOMB)] == ["too-many-nodes"]


# Values of overrides: what they mean, or the code and the underlined text.
VALUES: list[tuple[str, Value | tuple[str, str]]] = [
    ("", None), ("3", 3), ("0-7", "0-7"), ("[0, 1]", [0, 1]), ("{a: b}", {"a": "b"}), ("a: b", {"a": "b"}),
    ("'x'", "x"), ("~", None), (" 1 ", 1), ("---", "---"), ("# c", None),
    ("[1, 2", ("yaml-syntax", "[")), ("%x y", ("yaml-syntax", "%x y")), ("a: b: c", ("yaml-syntax", ":")),
    ("*x", ("undefined-alias", "*x")), ("!env x", ("unknown-tag", "!env")),
    ("x\x07y", ("control-character", "\x07")), ("x\udc80", ("control-character", "\udc80")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), VALUES, ids=range(len(VALUES)))
def test_value_of_an_override(text: str, expected: Value | tuple[str, str]) -> None:
    diagnostics = Diagnostics()
    node = read_value(SourceText("<overrides>", f"key={text}\nother=1", "overrides"), 4, 4 + len(text), diagnostics)
    if isinstance(expected, tuple):
        assert [(finding.code, finding.span.text) for finding in diagnostics] == [expected]
        assert node is None  # no later stage judges what could not be read
    else:
        assert node is not None
        assert (list(diagnostics), to_data(node)) == ([], expected)


class TestFiles:
    def test_standard_input_that_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", None)
        source = load_source("-", Diagnostics())
        assert source is not None
        assert source.text == ""

    def test_standard_input_that_is_a_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Unreadable:
            def isatty(self) -> bool:
                return False

            def read(self, size: int) -> bytes:
                raise IsADirectoryError(21, "Is a directory")

        class Stdin:
            buffer = Unreadable()

        monkeypatch.setattr("sys.stdin", Stdin())
        diagnostics = Diagnostics()
        assert load_source("-", diagnostics) is None
        assert [(d.code, str(d.span)) for d in diagnostics] == [("is-directory", "<stdin>:1:1")]

    def failure(self, name: str) -> Diagnostic:
        diagnostics = Diagnostics()
        assert load_source(name, diagnostics) is None
        (finding,) = diagnostics
        assert (finding.span.source.name, finding.span.start, finding.span.end) == (name, 0, 0)
        assert finding.severity is Severity.ERROR
        return finding

    @pytest.mark.parametrize(
        ("there", "asked", "code", "help"),
        [
            ("hetero.yaml", "heterro.yaml", "missing-file", "hetero.yaml"),
            ("job.py job.yaml", "job.yml", "missing-file", "job.yaml"),
            ("enc.yaml", "nosuch.yaml", "missing-file", None),
            ("f", "f/a.yaml", "missing-file", None),
            ("", "", "is-directory", None),
            ("", "a\0b.yaml", "unreadable-file", None),
            ("", "a" * 5000, "unreadable-file", None),
            ("", "loop", "unreadable-file", None),
        ],
    )
    def test_a_file_that_is_none(self, tmp_path: FilePath, there: str, asked: str, code: str, help: str | None) -> None:
        (tmp_path / "loop").symlink_to("loop")
        for name in there.split():
            (tmp_path / name).write_text("")
        finding = self.failure(str(tmp_path / asked))
        assert finding.code == code
        if code == "missing-file" and "/" not in asked:
            assert finding.help == (help and f"did you mean `{tmp_path / help}`?")

    def test_a_missing_directory(self, tmp_path: FilePath) -> None:
        finding = self.failure(str(tmp_path / "no" / "a.yaml"))
        assert (finding.code, finding.help) == ("missing-file", f"there is no directory `{tmp_path / 'no'}`")

    def test_no_permission(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("os.stat", refuse)
        finding = self.failure(str(tmp_path / "a.yaml"))
        assert finding.code == "unreadable-file"
        assert finding.message == "the file cannot be read: permission denied"

    def test_a_file_that_is_too_large(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("a: 12345\n")
        diagnostics = Diagnostics()
        monkeypatch.setattr(reading, "MOST_BYTES", 8)
        assert load_source(str(file), diagnostics) is None
        assert [d.code for d in diagnostics] == ["file-too-large"]
        monkeypatch.setattr(reading, "MOST_BYTES", 9)
        assert load_source(str(file), Diagnostics()) is not None


class TestBytes:
    @pytest.mark.parametrize("marks", [1, 2])
    def test_a_byte_order_mark_counts_no_column(self, marks: int) -> None:
        source = decode("a", b"\xef\xbb\xbf" * marks + b"a: *b\n", diagnostics := Diagnostics())
        assert source is not None
        read(source, diagnostics)
        assert [str(d.span.begin) for d in diagnostics] == ["1:4"]

    @pytest.mark.parametrize(
        ("content", "place", "offset"),
        [
            (b"a: 1\nb: \xff\n", "2:4", 8),
            (b"\xef\xbb\xbfa: \xe9\n", "1:4", 6),
            ("ä: ".encode() + b"\xe4", "1:4", 4),
            (b"a: \xed\xa0\x80", "1:4", 3),
        ],
    )
    def test_not_utf8(self, content: bytes, place: str, offset: int) -> None:
        diagnostics = Diagnostics()
        assert decode("a", content, diagnostics) is None
        (finding,) = diagnostics
        assert (finding.code, str(finding.span.begin)) == ("not-utf8", place)
        assert f"0x{content[offset]:02x} at offset {offset}" in finding.message

    @pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
    @pytest.mark.parametrize("order", ["-le", "-be"])
    def test_wide_text_is_refused_by_its_name(self, encoding: str, order: str) -> None:
        content = "\ufeffa: 1\n".encode(encoding + order)
        diagnostics = Diagnostics()
        assert decode("a", content, diagnostics) is None
        (finding,) = diagnostics
        assert (finding.code, finding.message) == ("not-utf8", f"the file is {encoding}, but a configuration is UTF-8")

    def test_a_binary_file_is_called_one(self) -> None:
        _, (finding,) = read_text("\x7fELF"[1:] + "\0")
        assert "looks like a binary file" in finding.message
        diagnostics = Diagnostics()
        assert decode("a", b"\x7fELF\0\0\xd0", diagnostics) is None
        assert [(diagnostic.code, diagnostic.message) for diagnostic in diagnostics] == [
            ("not-utf8", "this is a binary file, not text")
        ]

    def test_json_is_yaml_with_its_pairs_of_halves(self) -> None:
        value = {"a": [1, 2.5, None, True, "x\ud83d\ude00\n\x1b"], "b": {"c": {}}}
        assert data(json.dumps(value)) == {"a": [1, 2.5, None, True, "x\U0001f600\n\x1b"], "b": {"c": {}}}


class TestDocuments:
    @pytest.mark.parametrize(
        ("text", "place", "underlined", "kind"),
        [
            ("# c\n- a\n- b\n", "2:1", "- a", "a list"),
            ("[a,\n b]", "1:1", "[a,", "a list"),
            ("just text\n", "1:1", "just text", "a single value"),
            ("null\n", "1:1", "null", "a single value"),
            ("'' \n", "1:1", "''", "a single value"),
        ],
    )
    def test_not_a_mapping(self, text: str, place: str, underlined: str, kind: str) -> None:
        tree, (finding,) = read_text(text)
        assert tree is None
        assert (finding.code, str(finding.span.begin), finding.span.text) == ("not-a-mapping", place, underlined)
        assert finding.message.endswith(kind)

    @pytest.mark.parametrize("version", ["1.1", "1.3", "2.0", "x", "1." + "9" * 5000])
    @pytest.mark.parametrize("before", ["# c\n", "\r\n"])
    def test_another_version_changes_nothing(self, before: str, version: str) -> None:
        tree, (finding,) = read_text(f"{before}%YAML {version} \n---\na: on\nb: 1:20\nc: 010\n")
        assert (finding.code, finding.span.text) == ("yaml-version", f"%YAML {version}")
        assert len(finding.message) < 100
        assert tree is not None
        assert to_data(tree) == {"a": "on", "b": "1:20", "c": 10}


class TestTabs:
    @pytest.mark.parametrize("prefix", ["\t", "\t\t", "  ", " \t "])
    def test_a_shared_prefix(self, prefix: str) -> None:
        text = "a: 1\n\nb:\n  - x\n  - |\n    y\n# c\nd: *e\n"
        indented = "".join(prefix + line if line.strip() else line for line in text.splitlines(keepends=True))
        tree, (warning, error) = read_text(indented)
        assert (warning.code, warning.severity) == ("indented-file", Severity.WARNING)
        assert (str(warning.span.begin), warning.span.text) == ("1:1", prefix)
        assert (error.code, str(error.span.begin), error.span.text) == ("undefined-alias", f"8:{len(prefix) + 4}", "*e")
        assert tree is not None
        assert to_data(tree) == {"a": 1, "b": ["x", "y\n"], "d": None}
        item = find(tree, ("b", 1))
        assert item is not None
        assert item.span.text == f"|\n{prefix}    y"

    @pytest.mark.parametrize("blank", ["", " ", "\t", "\t\t\t", "\r"])
    def test_blank_lines_do_not_share_the_prefix(self, blank: str) -> None:
        tree, (warning,) = read_text(f"{blank}\n\ta: 1\n{blank}\n\tb: 2\n{blank}")
        assert warning.code == "indented-file"
        assert tree is not None
        assert to_data(tree) == {"a": 1, "b": 2}


class TestKeys:
    def test_duplicates_are_all_found_with_both_places(self) -> None:
        tree, diagnostics = read_text('a: 1\n4090: x\nb: {c: 1, c: 2, "c": 3}\n"4090": y\na: 2\n')
        assert [(d.code, d.span.text, str(d.span.begin), str(d.related[0][0].begin), d.path) for d in diagnostics] == [
            ("duplicate-key", "c", "3:11", "3:5", ("b", "c")),
            ("duplicate-key", '"c"', "3:17", "3:5", ("b", "c")),
            ("duplicate-key", '"4090"', "4:1", "2:1", ("4090",)),
            ("duplicate-key", "a", "5:1", "1:1", ("a",)),
        ]
        assert tree is not None
        assert to_data(tree) == {"a": 1, "4090": "x", "b": {"c": 1}}

    def test_long_duplicate_keys_make_short_messages(self) -> None:
        _, (finding,) = read_text(f"? {'k' * 5000}\n: 1\n? {'k' * 5000}\n: 2\n")
        assert finding.code == "duplicate-key"
        assert len(finding.message) < 150


class TestHelp:
    @pytest.mark.parametrize(
        ("text", "code", "underlined", "words"),
        [
            ("a:1\nb:2\n", "not-a-mapping", "a:1", "write a space after each `:`"),
            ("a: {{ b }}\nc: 1\n", "complex-key", "{ b }", "quote the whole value if `{{ ... }}` is meant as text"),
            ("a: !ENV HOME\n", "unknown-tag", "!ENV", "${env:NAME}"),
            ("a: !include c.yaml\n", "unknown-tag", "!include", "extends"),
            ("a: &nodes 1\nb: *node\n", "undefined-alias", "*node", "did you mean `nodes`?"),
        ],
    )
    def test_what_was_meant(self, text: str, code: str, underlined: str, words: str) -> None:
        _, (finding,) = read_text(text)
        assert (finding.code, finding.span.text) == (code, underlined)
        assert words in (finding.help or "")

    def test_a_tag_before_an_anchor_is_named(self) -> None:
        _, (finding,) = read_text("a: !b &c d\n")
        assert "`!b`" in finding.message


class TestAliases:
    def test_an_alias_is_the_node_it_names(self) -> None:
        tree, text = read_text("a: &x {b: [1]}\nc: *x\nd: [*x, *x]\n")
        assert not text
        assert tree is not None
        assert find(tree, ("c",)) is find(tree, ("a",))
        assert to_data(tree) == {"a": {"b": [1]}, "c": {"b": [1]}, "d": [{"b": [1]}, {"b": [1]}]}

    def test_an_alias_as_key_stands_where_it_is_used(self) -> None:
        tree, text = read_text("a: &x k\n*x : 1\n")
        assert not text
        assert tree is not None
        entry = tree.entry("k")
        assert entry is not None
        assert entry.key.span.text == "*x"

    def test_all_undefined_aliases_are_found_quickly(self) -> None:
        text = "".join(f"a{n}: &x{n} 1\nb{n}: *y{n}\n" for n in range(2000))
        _, diagnostics = read_text(text)
        assert sum(diagnostic.findings for diagnostic in diagnostics) == 2000

    def test_a_bomb(self) -> None:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
        tree, diagnostics = read_text("\n".join(lines))
        assert tree is None
        assert [d.code for d in diagnostics] == ["too-many-nodes"]
        assert "aliases" in diagnostics[0].message

    def test_nodes_are_counted_after_expansion(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "a: &x [1, 2]\nb: *x\n"  # the mapping, two lists, four numbers
        monkeypatch.setattr(yaml_tree, "MOST_NODES", 7)
        assert not report(text)
        monkeypatch.setattr(yaml_tree, "MOST_NODES", 6)
        assert report(text) == [("too-many-nodes", "2:4", "*x")]

    def test_depth_is_counted_after_expansion(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "a: &x [[1]]\nb: [*x]\n"
        monkeypatch.setattr(yaml_tree, "MOST_DEPTH", 4)
        assert not report(text)
        monkeypatch.setattr(yaml_tree, "MOST_DEPTH", 3)
        assert report(text) == [("too-deep", "2:5", "*x")]


class TestMergeKeys:
    def test_own_keys_win_and_the_first_of_a_list(self) -> None:
        text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  first: 0\n  <<: [*x, *y]\n  c: 3\n  last: 4\n"
        result = data(text)
        assert isinstance(result, dict)
        assert result["z"] == {"first": 0, "a": 1, "b": 1, "c": 3, "last": 4}
        assert list(result["z"]) == ["first", "a", "b", "c", "last"]


class TestSize:
    @pytest.mark.parametrize(
        "text",
        [
            "a: " + "[" * 5000,
            "a: " + "{a: " * 5000,
            "".join("  " * n + "a:\n" for n in range(500)),
            "- " * 5000,
            "a: " + "[" * 500 + "]" * 500,
        ],
    )
    def test_depth(self, text: str) -> None:
        tree, diagnostics = read_text(text)
        assert tree is None
        assert [d.code for d in diagnostics] == ["too-deep"]

    @pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.nightly)])
    def test_many_values_are_read(self, count: int) -> None:
        diagnostics = Diagnostics()
        source = SourceText("big.yaml", "a: [" + "1, " * count + "]\n")
        assert read(source, diagnostics) is not None
        assert not len(diagnostics)


def test_nothing_beyond_the_value_of_an_override_is_looked_at() -> None:
    source = SourceText("<overrides>", "a= 0-7\x00\nb=[", "overrides")
    diagnostics = Diagnostics()
    node = read_value(source, 2, 6, diagnostics)
    assert isinstance(node, ScalarNode)
    assert (list(diagnostics), node.span.start, node.span.end, node.span.text) == ([], 3, 6, "0-7")
