"""Model folders with mistakes by seed: validation says what is wrong, or nothing; no rule of ours fails on them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from recipes.training.tensor_files import stored_tensors
from rlinf_cli.job.job_file import load_with_lint
from tests.mistakes import HOSTILE, garbled, mutated
from tests.unit.recipes.agent.conversation.byte_level import write_byte_level

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole folder of a model, with an index of its weights."""
    parts = tmp_path_factory.mktemp("parts")
    write_byte_level(parts)
    folder = parts / "whole"
    for part in ("model", "tokenizer"):
        shutil.copytree(parts / part, folder, dirs_exist_ok=True)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys("ab", "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def with_mistakes(draw: random.Random, content: bytes) -> bytes:
    kinds = (json.dumps(mutated(draw, json.loads(content))).encode(), garbled(draw, content), draw.choice(HOSTILE))
    return draw.choices(kinds, (8, 1, 1))[0]


@pytest.mark.parametrize(("first", "mistakes"), [(0, 60), pytest.param(60, 2000, marks=pytest.mark.nightly)])
def test_folders_with_mistakes_are_judged(folder: Path, tmp_path: Path, first: int, mistakes: int) -> None:
    files = sorted(file.name for file in folder.glob("*.json"))
    refused = 0
    for seed in range(first, first + mistakes):
        draw = random.Random(seed)
        name = draw.choice(files)
        content = with_mistakes(draw, (folder / name).read_bytes())
        copy = shutil.copytree(folder, tmp_path / str(seed), copy_function=lambda a, b: Path(b).symlink_to(a))
        (copy / name).unlink()
        (copy / name).write_bytes(content)
        job = load_with_lint("math_laptop", [f"actor.model.model_path={copy}"], environ={})
        codes = {finding.code for finding in job.diagnostics}
        assert codes <= {"unusable-path"}, (seed, name, content, list(job.diagnostics))
        refused += bool(codes)
    assert 0 < refused < mistakes


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": ["model.safetensors"]}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": ""}}',
        "[]",
    ],
)
def test_an_index_that_names_no_files_beside_it_is_refused(folder: Path, tmp_path: Path, index: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "model.safetensors").rename(tmp_path / "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(index)
    assert stored_tensors(copy) is None
    job = load_with_lint("math_laptop", [f"actor.model.model_path={copy}"], environ={})
    assert ["has no `weight_map`" in finding.message for finding in job.diagnostics] == [True]
