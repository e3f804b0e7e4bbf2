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


def test_variables_are_expanded_as_docker_does(tmp_path: Path) -> None:
    known = {"A": "1", "EMPTY": ""}
    text = "$A ${A} ${B:-two} ${EMPTY:-three} ${A:+four} ${B:+five} \\$A $B"
    assert expand(text, known) == "1 1 two three four  $A "
    path = tmp_path / "Dockerfile"
    path.write_text('FROM base\nENV A=1 B="two words"\nENV C three four\nARG D\n')
    assert [assignments(step) for step in read_dockerfile(path)[1:]] == [
        {"A": "1", "B": "two words"},
        {"C": "three four"},
        {"D": ""},
    ]
