"""A file, its bases, the overrides and the references together; relative paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config.composing.compose import MAX_CHAIN, compose, with_bases
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import decode, load_source
from rlinf_core.config.tree import Composed, find, to_data
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import config_text_of


@pytest.fixture(autouse=True)
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(folder: str = ".", **files: str) -> None:
    for name, text in files.items():
        path = Path(folder, f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def composed_of(*overrides: str, **environ: str) -> tuple[Composed | None, Diagnostics]:
    diagnostics = Diagnostics()
    source = load_source("main.yaml", diagnostics)
    assert source is not None
    return compose(source, overrides, diagnostics, environ=environ, without_recipe="cluster"), diagnostics


def load() -> tuple[Any, Diagnostics, list[str]]:
    """Return what `main.yaml` is over its bases, what was found, and the files that were read."""
    diagnostics = Diagnostics()
    source = load_source("main.yaml", diagnostics)
    assert source is not None
    read = with_bases(source, diagnostics)
    if read is None:
        return None, diagnostics, []
    return to_data(read[0]), diagnostics, [Path(source.name).name for source in read[1]]


def test_the_order_is_base_file_overrides_references() -> None:
    write(
        main="extends: base.yaml\nx: file\nfrom_base: ${y}\n",
        base="x: base\ny: base\nshown: ${x}-${y}\nlast: 1\n",
    )
    composed, diagnostics = composed_of("y=override", "z=${x}")
    assert composed is not None
    assert diagnostics.ok
    data = {"x": "file", "y": "override", "shown": "file-override", "from_base": "override", "z": "file", "last": 1}
    assert to_data(composed.tree) == data
    assert [Path(source.name).name for source in composed.sources] == ["main.yaml", "base.yaml", "<overrides>"]
    node = find(composed.tree, ("last",))
    assert node is not None
    assert str(node.span) == "base.yaml:4:7"


def test_all_mistakes_are_found_in_one_pass() -> None:
    write(main="extends: base.yaml\nrecipe: x\na: ${gone}\n", base="d: ${env:NONE}\n")
    _, diagnostics = composed_of("+b=1", "c", "d.e=2")
    codes = {"override-plus", "override-syntax", "override-path", "unknown-reference", "unknown-variable"}
    assert {problem.code for problem in diagnostics} == codes


def test_a_composed_configuration_is_saved_and_loads_back() -> None:
    write(
        main="extends: base.yaml\ncluster:\n  num_nodes: ${env:N}\n  component_placement:\n    actor: 0-3\nv: $${x}\n",
        base="cluster:\n  component_placement:\n    actor,env: 0-7\n",
    )
    composed, diagnostics = composed_of("w=2.50", N="2")
    assert composed is not None
    assert diagnostics.ok
    write(main=resolved_text(composed.tree))
    again, diagnostics = composed_of()
    assert again is not None
    assert diagnostics.ok
    assert resolved_text(again.tree) == resolved_text(composed.tree)
    assert to_data(again.tree) == to_data(composed.tree)


@pytest.mark.parametrize(
    ("files", "data", "read"),
    [
        pytest.param(
            {"main": "extends: base.yaml\na: {x: 1}\nl: [3]\n", "base": "a: {x: 0, y: 0}\nl: [1, 2]\nb: 5\n"},
            {"a": {"x": 1, "y": 0}, "l": [3], "b": 5}, "main base", id="a-file-overrides-its-base-deeply",
        ),
        pytest.param(
            {"main": "extends: [a.yaml, b.yaml]\nz: main\n", "a": "x: a\ny: a\nz: a\n", "b": "y: b\nz: b\n"},
            {"x": "a", "y": "b", "z": "main"}, "main a b", id="the-later-base-wins-and-the-file-over-all",
        ),
        pytest.param(
            {"main": "extends: sub/one.yaml\n", "sub/one": "extends: two.yaml\nx: 1\n", "sub/two": "x: 0\ny: 2\n"},
            {"x": 1, "y": 2}, "main one two", id="relative-to-the-file-that-names-it",
        ),
        pytest.param(
            {"main": "extends: [a.yaml, b.yaml]\n", "a": "extends: c.yaml\nx: a\n", "b": "extends: c.yaml\n",
             "c": "x: c\ny: c\n"},
            {"x": "c", "y": "c"}, "main a c b", id="shared-by-two-is-read-once-and-laid-over-again",
        ),
        pytest.param(
            {"main": "a:\n  extends: none.yaml\n"}, {"a": {"extends": "none.yaml"}}, "main", id="a-nested-extends",
        ),
    ],
)  # fmt: skip
def test_bases(files: dict[str, str], data: dict[str, Any], read: str) -> None:
    write(**files)
    result, diagnostics, sources = load()
    assert (result, list(diagnostics)) == (data, [])
    assert sorted(sources) == sorted(f"{name}.yaml" for name in read.split())


def test_many_diamonds_cost_no_more_than_their_files() -> None:
    write(main="extends: [f0.yaml, f0.yaml]\n", f25="last: 1\n")
    for level in range(25):
        write(**{f"f{level}": f"extends: [f{level + 1}.yaml, f{level + 1}.yaml]\nx{level}: 1\n"})
    data, loaded, _ = load()
    assert len(data) == 26
    assert loaded.ok


def test_shipped_bases_are_asked_for_last() -> None:
    write(main="extends: [embodied/pick-laptop, near.yaml, hetero18.yaml]\n", near="y: near\n", hetero18="z: mine\n")
    data, loaded, sources = load()
    assert loaded.ok
    assert (data["recipe"], data["y"], data["z"]) == ("embodied", "near", "mine")
    assert "pick-laptop.yaml" in sources


@pytest.mark.parametrize(
    ("main", "underlined"),
    [
        ("extends: 4\n", "4"),
        ("extends:\na: 1\n", "extends"),
        ("extends: [base.yaml, {a: 1}]\n", "{a: 1"),
        ("extends: ''\n", "''"),
        ("extends: []\n", "[]"),
        ("extends: ${name}.yaml\n", "${name}.yaml"),
        ("extends: [base.yaml, [base.yaml]]\n", "[base.yaml"),
        ('extends: "a\\0b"\n', '"a\\0b"'),
    ],
)
def test_what_names_no_file(main: str, underlined: str) -> None:
    write(main=main, base="x: 1\n")
    data, (problem,), _ = load()
    assert data is None
    assert problem.code == "extends-form"
    assert problem.span.text.startswith(underlined)


def test_a_missing_base_is_reported_where_it_is_named() -> None:
    write(main="a: 1\nextends: [bsae.yaml, gone/x.yaml, .]\n", base="x: 1\n")
    composed, diagnostics = composed_of("+a=1")
    assert composed is None
    assert [(d.code, d.span.text, d.path) for d in diagnostics] == [
        ("base-unreadable", "bsae.yaml", ("extends", 0)),
        ("base-unreadable", "gone/x.yaml", ("extends", 1)),
        ("base-unreadable", ".", ("extends", 2)),
        ("override-plus", "+", ()),
    ]
    assert "did you mean `base.yaml`?" in [d.help for d in diagnostics]


def test_a_mistake_in_a_base_is_reported_in_the_base() -> None:
    write(main="extends: base.yaml\n", base="a: [1\n")
    data, diagnostics, _ = load()
    assert data is None
    assert {d.span.source.name for d in diagnostics} == {"base.yaml"}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_is_reported_at_the_extends_that_closes_it(length: int) -> None:
    names = ["main", *(f"f{index}" for index in range(1, length))]
    for name, after in zip(names, [*names[1:], "main"], strict=True):
        write(**{name: f"extends: ./{after}.yaml\n"})
    data, (problem,), _ = load()
    assert data is None
    assert problem.code == "extends-cycle"
    assert (Path(problem.span.source.name).stem, problem.span.text) == (names[-1], "./main.yaml")


def test_a_chain_without_end_is_refused() -> None:
    write(main="extends: f0.yaml\n")
    for index in range(MAX_CHAIN + 5):
        write(**{f"f{index}": f"extends: f{index + 1}.yaml\n"})
    data, diagnostics, _ = load()
    assert data is None
    assert [d.code for d in diagnostics] == ["extends-cycle"]


def test_standard_input_extends_files_of_the_current_folder() -> None:
    write(base="x: 1\n")
    diagnostics = Diagnostics()
    source = decode("<stdin>", b"extends: base.yaml\n", diagnostics, "stdin")
    assert source is not None
    read = with_bases(source, diagnostics)
    assert read is not None
    assert to_data(read[0]) == {"x": 1}


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in another folder than the one that the command runs in."""
    write(
        "files",
        job="extends: math/sums-laptop.yaml\n"
        "data: {type: math, train_data_paths: train.jsonl, val_data_paths: [a/../val.jsonl, /data/val.jsonl]}\n"
        "actor: {model: {model_path: models/small}}\n",
    )
    (tmp_path / "here/models/small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "files/job.yaml"


def test_path_in_a_file_or_override_means_the_working_folder(job_file: Path) -> None:
    here = os.getcwd()
    for overrides in ([], ["data.train_data_paths=train.jsonl", "actor.model.model_path=models/small"]):
        config: Any = load_job(str(job_file), overrides).config
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
    config: Any = load_job(str(job_file), ["runner.resume_dir=auto", "runner.logger.log_path=r"]).config
    assert (config.runner.resume_dir, config.runner.logger.log_path) == ("auto", "r")
