"""Versions, code, input files and machine of a run."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from rlinf_cli.runs.documents import ENVIRONMENT, Provenance, collect, read_provenance, write_provenance
from rlinf_core.errors import RunError


def test_versions_are_those_that_are_installed() -> None:
    versions = collect(packages=["rlinf_core"]).versions

    assert {name: versions[name] for name in ("torch", "ray", "pydantic")} == {
        name: version(name) for name in ("torch", "ray", "pydantic")
    }
    assert versions["python"].count(".") == 2


def test_code_and_inputs_are_told_apart_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_lab"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    data = tmp_path / "sums.jsonl"
    data.write_text("1+1=\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def taken() -> Provenance:
        return collect(packages=["my_lab"], inputs=[data, package, tmp_path / "nothing"])

    before = taken()
    assert taken() == before
    assert set(before.inputs) == {str(data), str(package)}
    data.write_text("2+2=\n")
    assert taken().inputs[str(data)] != before.inputs[str(data)]
    (package / "__init__.py").write_text("x = 2\n")
    after = taken()
    assert after.code["my_lab"] != before.code["my_lab"]
    assert after.inputs[str(package)] != before.inputs[str(package)]


def test_a_large_file_is_told_apart_by_its_size_and_its_ends(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = bytearray(3 << 20)
    digests: set[str] = set()
    for place in (None, 0, len(content) - 1):
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        digests.add(collect(packages=[], inputs=[file]).inputs[str(file)])
    file.write_bytes(content + b"x")
    digests.add(collect(packages=[], inputs=[file]).inputs[str(file)])
    assert len(digests) == 4


def test_the_working_folders_commit_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in collect(packages=[]).code

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    git("init")
    Path("train.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "Begin")
    clean = collect(packages=[]).code
    assert (len(clean["commit"]), clean["uncommitted"]) == (40, "")
    Path("train.py").write_text("2\n")
    assert collect(packages=[]).code["uncommitted"]


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) is None
    result = Provenance({"python": "3.11.7"}, {"recipes": "aa"}, {}, {"host": "one"})
    write_provenance(tmp_path, result)
    assert read_provenance(tmp_path) == result


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "rlinf.environment/9"}', '{"schema": "rlinf.environment/1"}'])
def test_a_broken_one_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / ENVIRONMENT).write_text(text)
    with pytest.raises(RunError, match="the provenance of a run cannot be read"):
        read_provenance(tmp_path)
