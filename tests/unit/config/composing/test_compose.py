"""A file, its bases, the overrides and the references together; every code of this stage; relative paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from rlinf_cli.codes import CLOSE, OPEN, Code, Example, codes_by_stage
from rlinf_core.config.composing.compose import MAX_CHAIN, compose, with_bases
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.reading import decode, load_source
from rlinf_core.config.tree import Composed, find, to_data
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import config_text_of


def unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def findings(folder: Path, example: Example) -> tuple[Composed | None, Diagnostics]:
    for name, text in (("job.yaml", example.text), *example.files):
        (folder / name).write_text(unmarked(text), encoding="utf-8")
    diagnostics = Diagnostics()
    source = load_source(str(folder / "job.yaml"), diagnostics)
    assert source is not None
    overrides = [unmarked(argument) for argument in example.overrides]
    return compose(source, overrides, diagnostics, environ=dict(example.environ), without_recipe="cluster"), diagnostics


def marked(example: Example) -> tuple[str, int, int]:
    """Return the last part of the source's name, and the offsets, of what stands between the markers."""
    texts = [("job.yaml", example.text), *example.files, ("<overrides>", "\n".join(example.overrides))]
    ((name, text),) = [(name, text) for name, text in texts if OPEN in text]
    return name, text.index(OPEN), text.index(CLOSE) - len(OPEN)


def place(problem: Diagnostic) -> tuple[str, int, int]:
    return Path(problem.span.source.name).name, problem.span.start, problem.span.end


@pytest.mark.parametrize("code", codes_by_stage()["composing"], ids=lambda code: code.name)
def test_the_wrong_example_is_reported_at_its_marker(tmp_path: Path, code: Code) -> None:
    _, diagnostics = findings(tmp_path, code.wrong)
    (problem,) = diagnostics
    assert (problem.code, problem.severity) == (code.name, code.severity)
    assert place(problem) == marked(code.wrong)


@pytest.mark.parametrize("code", codes_by_stage()["composing"], ids=lambda code: code.name)
def test_the_right_example_composes(tmp_path: Path, code: Code) -> None:
    composed, diagnostics = findings(tmp_path, code.right)
    assert composed is not None
    assert not list(diagnostics)


def test_the_order_is_base_file_overrides_references(tmp_path: Path) -> None:
    example = Example(
        "extends: base.yaml\nx: file\nfrom_base: ${y}\n",
        overrides=("y=override", "z=${x}"),
        files=(("base.yaml", "x: base\ny: base\nshown: ${x}-${y}\n"),),
    )
    composed, diagnostics = findings(tmp_path, example)
    assert composed is not None
    assert diagnostics.ok
    assert to_data(composed.tree) == {
        "x": "file",
        "y": "override",
        "shown": "file-override",
        "from_base": "override",
        "z": "file",
    }
    assert [Path(source.name).name for source in composed.sources] == ["job.yaml", "base.yaml", "<overrides>"]


def test_all_mistakes_are_found_in_one_pass(tmp_path: Path) -> None:
    example = Example(
        "extends: base.yaml\nrecipe: x\na: ${gone}\n",
        overrides=("+b=1", "c", "d.e=2"),
        files=(("base.yaml", "d: ${env:NONE}\n"),),
    )
    _, diagnostics = findings(tmp_path, example)
    assert {problem.code for problem in diagnostics} == {
        "override-plus",
        "override-syntax",
        "override-path",
        "unknown-reference",
        "unknown-variable",
    }


def test_overrides_are_judged_when_a_base_is_missing(tmp_path: Path) -> None:
    composed, diagnostics = findings(tmp_path, Example("extends: gone.yaml\n", overrides=("+a=1",)))
    assert composed is None
    assert {problem.code for problem in diagnostics} == {"base-unreadable", "override-plus"}


def test_a_composed_configuration_is_saved_and_loads_back(tmp_path: Path) -> None:
    example = Example(
        "extends: base.yaml\ncluster:\n  num_nodes: ${env:N}\n  component_placement:\n    actor: 0-3\nv: $${x}\n",
        overrides=("w=2.50",),
        files=(("base.yaml", "cluster:\n  component_placement:\n    actor,env: 0-7\n"),),
        environ=(("N", "2"),),
    )
    composed, diagnostics = findings(tmp_path, example)
    assert composed is not None
    assert diagnostics.ok
    (tmp_path / "saved").mkdir()
    again, diagnostics = findings(tmp_path / "saved", Example(resolved_text(composed.tree)))
    assert again is not None
    assert diagnostics.ok
    assert resolved_text(again.tree) == resolved_text(composed.tree)
    assert to_data(again.tree) == to_data(composed.tree)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def load(folder: Path) -> tuple[Any, Diagnostics, list[str]]:
    diagnostics = Diagnostics()
    source = load_source(str(folder / "main.yaml"), diagnostics)
    assert source is not None
    read = with_bases(source, diagnostics)
    if read is None:
        return None, diagnostics, []
    tree, sources = read
    return to_data(tree), diagnostics, [Path(source.name).name for source in sources]


def test_a_file_overrides_its_base_deeply(tmp_path: Path) -> None:
    write(tmp_path, main="extends: base.yaml\na: {x: 1}\nl: [3]\n", base="a: {x: 0, y: 0}\nl: [1, 2]\nb: 5\n")
    data, loaded, sources = load(tmp_path)
    assert data == {"a": {"x": 1, "y": 0}, "l": [3], "b": 5}
    assert loaded.ok
    assert sources == ["main.yaml", "base.yaml"]


def test_of_a_list_the_later_base_wins_and_the_file_over_all(tmp_path: Path) -> None:
    write(tmp_path, main="extends: [a.yaml, b.yaml]\nz: main\n", a="x: a\ny: a\nz: a\n", b="y: b\nz: b\n")
    assert load(tmp_path)[0] == {"x": "a", "y": "b", "z": "main"}


def test_a_base_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, main="extends: sub/one.yaml\n")
    write(tmp_path / "sub", one="extends: two.yaml\nx: 1\n", two="x: 0\ny: 2\n")
    assert load(tmp_path)[0] == {"x": 1, "y": 2}


def test_a_base_shared_by_two_is_read_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        main="extends: [a.yaml, b.yaml]\n",
        a="extends: c.yaml\nx: a\n",
        b="extends: c.yaml\n",
        c="x: c\ny: c\n",
    )
    data, loaded, sources = load(tmp_path)
    # b brings c's x again, over a's.
    assert data == {"x": "c", "y": "c"}
    assert loaded.ok
    assert sources.count("c.yaml") == 1


def test_many_diamonds_cost_no_more_than_their_files(tmp_path: Path) -> None:
    write(tmp_path, main="extends: [f0.yaml, f0.yaml]\n")
    for level in range(25):
        write(tmp_path, **{f"f{level}": f"extends: [f{level + 1}.yaml, f{level + 1}.yaml]\nx{level}: 1\n"})
    write(tmp_path, f25="last: 1\n")
    data, loaded, _ = load(tmp_path)
    assert len(data) == 26
    assert loaded.ok


def test_spans_tell_the_file(tmp_path: Path) -> None:
    write(tmp_path, main="extends: base.yaml\na: 1\n", base="\nb: 2\n")
    diagnostics = Diagnostics()
    source = load_source(str(tmp_path / "main.yaml"), diagnostics)
    assert source is not None
    read = with_bases(source, diagnostics)
    assert read is not None
    node = find(read[0], ("b",))
    assert node is not None
    assert str(node.span) == f"{tmp_path / 'base.yaml'}:2:4"


def test_a_nested_extends_is_an_ordinary_key(tmp_path: Path) -> None:
    write(tmp_path, main="a:\n  extends: nothing.yaml\n")
    assert load(tmp_path)[0] == {"a": {"extends": "nothing.yaml"}}


def test_shipped_bases_are_asked_for_last(tmp_path: Path) -> None:
    write(tmp_path, main="extends: [laptop, near.yaml, collocated.yaml]\n", near="y: near\n", collocated="z: mine\n")
    data, loaded, sources = load(tmp_path)
    assert loaded.ok
    assert (data["recipe"], data["y"], data["z"]) == ("embodied", "near", "mine")
    assert "laptop.yaml" in sources


@pytest.mark.parametrize(
    ("main", "underlined"),
    [
        ("extends: 4\n", "4"),
        ("extends:\na: 1\n", "extends"),
        ("extends: [base.yaml, {a: 1}]\n", "{a: 1"),
        ("extends: ''\n", "''"),
        ("extends: ${name}.yaml\n", "${name}.yaml"),
        ("extends: [base.yaml, [base.yaml]]\n", "[base.yaml"),
        ('extends: "a\\0b"\n', '"a\\0b"'),
    ],
)
def test_what_names_no_file(tmp_path: Path, main: str, underlined: str) -> None:
    write(tmp_path, main=main, base="x: 1\n")
    data, loaded, _ = load(tmp_path)
    assert data is None
    (problem,) = loaded
    assert problem.code == "extends-form"
    assert problem.span.text.startswith(underlined)


def test_a_missing_base_is_reported_where_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, main="a: 1\nextends: [bsae.yaml, gone/x.yaml]\n", base="x: 1\n")
    data, diagnostics, _ = load(tmp_path)
    assert data is None
    assert [(d.code, d.span.text, d.path) for d in diagnostics] == [
        ("base-unreadable", "bsae.yaml", ("extends", 0)),
        ("base-unreadable", "gone/x.yaml", ("extends", 1)),
    ]
    assert next(iter(diagnostics)).help == "did you mean `base.yaml`?"


def test_a_base_that_is_a_folder_is_reported_where_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, main="extends: .\n")
    (problem,) = load(tmp_path)[1]
    assert (problem.code, problem.span.text) == ("base-unreadable", ".")
    assert "directory" in problem.message


def test_a_mistake_in_a_base_is_reported_in_the_base(tmp_path: Path) -> None:
    write(tmp_path, main="extends: base.yaml\n", base="a: [1\n")
    data, diagnostics, _ = load(tmp_path)
    assert data is None
    assert {d.span.source.name for d in diagnostics} == {str(tmp_path / "base.yaml")}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_is_reported_at_the_extends_that_closes_it(tmp_path: Path, length: int) -> None:
    names = ["main", *(f"f{index}" for index in range(1, length))]
    for name, after in zip(names, [*names[1:], "main"], strict=True):
        write(tmp_path, **{name: f"extends: ./{after}.yaml\n"})
    data, loaded, _ = load(tmp_path)
    assert data is None
    (problem,) = loaded
    assert problem.code == "extends-cycle"
    assert (problem.span.source.name, problem.span.text) == (str(tmp_path / f"{names[-1]}.yaml"), "./main.yaml")


def test_a_chain_without_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path, main="extends: f0.yaml\n")
    for index in range(MAX_CHAIN + 5):
        write(tmp_path, **{f"f{index}": f"extends: f{index + 1}.yaml\n"})
    data, diagnostics, _ = load(tmp_path)
    assert data is None
    assert [d.code for d in diagnostics] == ["extends-cycle"]


def test_standard_input_extends_files_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, base="x: 1\n")
    monkeypatch.chdir(tmp_path)
    diagnostics = Diagnostics()
    source = decode("<stdin>", b"extends: base.yaml\n", diagnostics, "stdin")
    assert source is not None
    read = with_bases(source, diagnostics)
    assert read is not None
    assert to_data(read[0]) == {"x": 1}


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in another folder than the one that the command runs in."""
    (tmp_path / "files").mkdir()
    (tmp_path / "here/models/small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "files" / "job.yaml"
    file.write_text(
        "extends: math_laptop.yaml\n"
        "data: {type: math, train_data_paths: train.jsonl, val_data_paths: [a/../val.jsonl, /data/val.jsonl]}\n"
        "actor: {model: {model_path: models/small}}\n"
    )
    return file


def test_path_in_a_file_or_override_means_the_working_folder(job_file: Path) -> None:
    here = os.getcwd()
    for overrides in ([], ["data.train_data_paths=train.jsonl", "actor.model.model_path=models/small"]):
        config: Any = cast("Any", load_job(str(job_file), overrides).config)
        assert config.data.train_data_paths == (f"{here}/train.jsonl",)
        assert config.data.val_data_paths == (f"{here}/val.jsonl", "/data/val.jsonl")
        assert config.actor.model.model_path == f"{here}/models/small"


def test_the_kept_configuration_means_the_same_elsewhere(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(str(job_file))
    kept = job_file.with_name("config.yaml")
    kept.write_text(config_text_of(job))
    monkeypatch.chdir("/")
    again = load_job(str(kept))
    assert again.config == job.config
    assert "train.jsonl" in kept.read_text()


def test_folders_of_the_run_stay_as_they_are_written(job_file: Path) -> None:
    config: Any = cast("Any", load_job(str(job_file), ["runner.resume_dir=auto", "runner.logger.log_path=r"]).config)
    assert (config.runner.resume_dir, config.runner.logger.log_path) == ("auto", "r")
