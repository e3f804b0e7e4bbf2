"""Dockerfiles: which instructions are read, and which are refused by their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.agent.images.dockerfile import assignments, expand, read_dockerfile
from rlinf_core import ConfigError


def steps_of(folder: Path, text: str) -> list[tuple[str, str, int]]:
    path = folder / "Dockerfile"
    path.write_text(text)
    return [(step.word, step.text, step.line) for step in read_dockerfile(path)]


def test_lines_are_joined_and_comments_left_out(tmp_path: Path) -> None:
    text = '# syntax\nARG V=1\nFROM base:$V\n\nrun one && \\\n # a comment\n    two \\\n    three\nCMD ["x"]\n'
    assert steps_of(tmp_path, text) == [
        ("ARG", "V=1", 2),
        ("FROM", "base:$V", 3),
        ("RUN", "one && two three", 5),
        ("CMD", '["x"]', 9),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("FROM other", "several stages"),
        ("RUN --mount=type=cache,target=/x true", "RUN --mount"),
        ("COPY --from=other /a /b", "COPY --from"),
        ("ADD https://example.org/a.tar /", "no network"),
        ("RUN <<EOF", "a text within the Dockerfile"),
        ("ONBUILD RUN true", "ONBUILD"),
        ("INSTALL x", "INSTALL"),
        ("ENV A='one two", "`'one two`, which has no end,"),
        ("ENV A=${B%%.*}", "the variable"),
        ("COPY --chmod=u+x a /a", r"COPY --chmod=u\+x"),
    ],
)
def test_what_is_not_built_here_is_refused_by_its_line(line: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        steps_of(tmp_path, f"FROM base\n{line}\n")
    assert "Dockerfile:2:" in error.value.message
    assert "rlinf tasks load" in (error.value.help or "")


def test_a_file_without_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not begin with FROM"):
        steps_of(tmp_path, "RUN true\n")


def test_variables_are_expanded_as_docker_does() -> None:
    known = {"A": "1", "EMPTY": ""}
    text = "$A ${A} ${B:-two} ${EMPTY:-three} ${A:+four} ${B:+five} \\$A $B"
    assert expand(text, known) == "1 1 two three four  $A "
    assert expand("${EMPTY-a}${B-b}${EMPTY+c}${B+d}$", known) == "bc$"
    assert expand("""'$A'"$A \\$A \\n"x\\ y""", known) == "$A1 $A \\nx y"


def test_values_with_blanks_are_one_word(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        "FROM base\nENV A=1 B=\"two words\"\nENV C three 'f our'\nARG D E=\nENV F=$X G=a\\ b H='$X'\n"
        'COPY $X [$X] /$X/\nCOPY ["$X", "a b"]\n'
    )
    known = {"X": "x y"}
    *variables, copy, listed = read_dockerfile(path)[1:]
    assert [assignments(step, known) for step in variables] == [
        {"A": "1", "B": "two words"},
        {"C": "three f our"},
        {"D": None, "E": ""},
        {"F": "x y", "G": "a b", "H": "$X"},
    ]
    assert copy.words(known) == ["x y", "[x y]", "/x y/"]
    assert listed.words(known) == ["x y", "a b"]
