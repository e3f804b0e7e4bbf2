"""Conversion of every job file in tests/data/import: no key is lost, comments stay, and the result is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.importing.convert import Converted, convert
from rlinf_cli.importing.rules.shared import Fate
from rlinf_cli.importing.sources import HydraFile, job_files, read_job
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.composing.compose import compose
from rlinf_core.config.diagnostics import Diagnostics, Severity, render_text
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import MappingNode, Node, ScalarNode, SequenceNode, format_path

DATA = Path(__file__).parents[3] / "data" / "import"
JOBS = [file for kind in ("embodied", "reasoning", "verl") for file in job_files(DATA / kind)[0]]
# What would train something else stays wrong until somebody decides.
UNDECIDED = {
    "behavior_unsupported": {"env.train.env_type", "env.eval.env_type"},
    "turns_multi_node": {"algorithm.adv_type"},
}
ENVIRON = {"SHARED_CONFIGS": str(DATA / "shared")}


@cache
def composed(file: Path) -> HydraFile:
    job = read_job(str(file), [], [], ENVIRON)
    assert job.file is not None, [render_text(diagnostic) for diagnostic in job.diagnostics]
    return job.file


@cache
def converted(file: Path) -> Converted:
    return convert(composed(file), ENVIRON)


def leaves(node: Node, path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Yield the paths of single values, and of lists of such."""
    if isinstance(node, MappingNode) and node.entries:
        for entry in node.entries:
            yield from leaves(entry.value, (*path, entry.key.raw))
    elif isinstance(node, SequenceNode) and not all(isinstance(item, ScalarNode) for item in node.items):
        for index, item in enumerate(node.items):
            yield from leaves(item, (*path, index))
    else:
        yield format_path(path)


by_name = pytest.mark.parametrize("file", JOBS, ids=[f"{file.parent.name}/{file.stem}" for file in JOBS])


def test_there_are_files_of_many_kinds() -> None:
    assert len(JOBS) >= 25


@by_name
def test_the_result_validates(file: Path) -> None:
    result = converted(file)
    # `validate` reads it anew: what the summary says must be what it says.
    job = load_with_lint("-", stdin=result.text.encode(), environ=ENVIRON)
    errors = [diagnostic for diagnostic in job.diagnostics if diagnostic.severity is Severity.ERROR]
    messages = {format_path(item.path) for item in (*result.errors, *result.lacking)}
    assert {format_path(error.path) for error in errors} == messages
    wrong = {format_path(error.path) for error in result.errors}
    assert wrong == UNDECIDED.get(file.stem, set()), [render_text(error) for error in result.errors]


@by_name
def test_every_key_is_accounted_for(file: Path) -> None:
    result = converted(file)
    sources = [outcome.source for outcome in result.outcomes]
    assert len(sources) == len(set(sources))
    keys = set(leaves(composed(file).tree))
    # A reference to a whole section stands for the keys of that section.
    assert {
        key for key in keys if not any(message == key or message.startswith(f"{key}.") for message in sources)
    } == set()
    job = load_with_lint("-", stdin=result.text.encode(), environ=ENVIRON)
    assert job.tree is not None
    # As it is in the text: what another `loss_type` has is not read where it is the default.
    text = compose(SourceText("-", result.text), (), Diagnostics(), environ=ENVIRON)
    assert text is not None
    written = set(leaves(text.tree))
    for entry in result.outcomes:
        if entry.fate in (Fate.CARRIED, Fate.RENAMED):
            assert set(entry.targets) <= written, entry
        else:
            assert entry.reason, entry
            # As a comment of the new file, with its value.
            assert re.search(rf"^ *# +{re.escape(entry.source)}: ", result.text, re.MULTILINE), entry
    assert written <= {
        *(target for outcome in result.outcomes for target in outcome.targets),
        *(format_path(item.path) for item in result.added),
        "recipe",
    }


def test_arithmetic_of_references_is_computed() -> None:
    text = converted(DATA / "reasoning" / "reinpp_vllm.yaml").text
    # 28_672 is a number in the files of OmegaConf.
    assert "max_new_tokens: 27648" in text
    assert "seq_length: 28672" in text


@by_name
def test_comments_stay(file: Path) -> None:
    result = converted(file)
    for comment in comments(file):
        assert comment in result.text, comment


def comments(file: Path) -> list[str]:
    """Return the comments of a file, but for those in its defaults list, of which nothing is left."""
    result: list[str] = []
    in_defaults = False
    for line in file.read_text().splitlines():
        if line and not line[0].isspace() and not line.startswith(("#", "-")):
            in_defaults = line.startswith("defaults")
        match = re.search(r"(?:^|\s)(#.*)$", re.sub(r"\"[^\"]*\"", "", line))
        if match and not in_defaults and "Not a comment" not in line:
            result.append(match[1].strip())
    return result


@by_name
def test_what_was_converted_is_no_longer_of_another_project(file: Path) -> None:
    """The text holds no reference in a form that only OmegaConf reads."""
    values = "\n".join(line.partition(" #")[0] for line in converted(file).text.splitlines() if "# " not in line[:12])
    assert not re.search(r"\$\{(?:\.|oc\.|now:|hydra:|[a-z_]+:(?!-))", values.replace("${env:", ""))


def plain(node: Any) -> Any:
    """Return a tree as OmegaConf gives it: numbers by their value, references as text."""
    if isinstance(node, MappingNode):
        return {entry.key.raw: plain(entry.value) for entry in node.entries}
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return node.value if node.plain else node.raw


@pytest.mark.parametrize(
    "file", [file for file in JOBS if file.suffix == ".yaml"], ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_a_file_is_composed_as_hydra_composes_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    monkeypatch.setenv("EMBODIED_CONFIGS", "/nowhere")
    monkeypatch.setenv("SHARED_CONFIGS", ENVIRON["SHARED_CONFIGS"])
    with hydra.initialize_config_dir(str(file.parent), version_base="1.3"):
        theirs = OmegaConf.to_container(hydra.compose(file.stem), resolve=False)
    ours = plain(composed(file).tree)
    ours.pop("hydra", None)
    # A component that is placed alone leaves the group that a base has placed; Hydra would place it twice.
    for item in (ours, theirs):
        item.get("cluster", {}).pop("component_placement", None)
    assert ours == theirs
