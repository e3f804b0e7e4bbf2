"""Modules found and read without an import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlinf_core.job.load import load_job
from rlinf_core.process.import_path import locate, syntax_tree

pytestmark = pytest.mark.security
MATH = "recipe: math\ncluster:\n  num_nodes: 1\n  component_placement: {'actor,rollout,reward': 0}\n"
AGENT = "recipe: agent\ncluster:\n  num_nodes: 1\n  component_placement: {'actor,rollout,reward,agent': 0}\n"
LAPTOP = "extends: laptop\n"
RUN = "raise SystemExit('this package was imported')\n"
TARGET = "planted_kit.inner.parts:part"
LONELY = "planted_spaces.inner.parts:part"


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages on the path: one whose modules end the process that imports them, and one without `__init__.py`."""
    for package in ("planted_kit", "planted_kit/inner", "planted_spaces/inner"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "parts.py").write_text(f"def part(text): ...\n{RUN}")
        if "kit" in package:
            (tmp_path / package / "__init__.py").write_text(RUN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", [TARGET, LONELY])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        (MATH, "reward: {reward_type: 'TARGET'}"),
        (AGENT, "agent: {run: 'TARGET'}"),
        (AGENT, "agent: {tools: ['TARGET']}"),
        (LAPTOP, "env: {train: {env_type: 'TARGET'}}"),
        (LAPTOP, "actor: {model: {model_type: 'TARGET'}}"),
        (LAPTOP, "algorithm: {loss_type: 'TARGET'}"),
    ],
)
def test_no_key_has_a_package_imported_when_a_file_is_checked(planted: Path, file: str, text: str, target: str) -> None:
    wrong = load_job("-", stdin=f"{file}{text.replace('TARGET', target.replace(':part', ':other'))}\n".encode())
    assert f"{planted}" in str([item.message for item in wrong.diagnostics if "defines no `other`" in item.message])
    job = load_job("-", stdin=f"{file}{text.replace('TARGET', target)}\n".encode())
    assert not [item for item in job.diagnostics if target in item.message]
    assert not [name for name in sys.modules if name.startswith("planted_")]


def test_an_environment_id_with_a_module_is_not_imported() -> None:
    pytest.importorskip("gymnasium")
    text = LAPTOP + "env: {train: {env_type: gymnasium, task: 'planted_kit.inner.parts:Slide-v0'}}\n"
    job = load_job("-", stdin=text.encode())
    assert not [item for item in job.diagnostics if "cannot be made" in item.message]
    assert not [name for name in sys.modules if name.startswith("planted_")]


def test_what_is_located(planted: Path) -> None:
    spec = locate("planted_spaces.inner.parts")
    assert spec is not None
    assert spec.origin == str(planted / "planted_spaces" / "inner" / "parts.py")
    assert locate("os.path") is not None
    assert [locate(name) for name in ("planted_kit.none", "planted_kit.parts.none", "none.inner", "os.none")] == [
        None
    ] * 4


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
