"""Recipes that a file selects by a value, `Recipe.variants`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_cli.job.json_schema import file_schema
from rlinf_core.job.find_recipe import find_recipe, find_variant, recipe_of
from rlinf_core.job.load import load_job


def test_value_of_the_file_selects_the_variant() -> None:
    assert find_variant("sft", {"data.type": "chat"}.get).name == "sft_chat"
    assert find_variant("sft", {}.get).name == "sft"


@pytest.mark.parametrize(
    ("data", "recipe"),
    [
        ("train_data_paths: chat.jsonl", "sft_chat"),
        ("train_data_paths: [one.parquet, two.parquet]", "sft_chat"),
        ("train_data_paths: rows.json.gz", "sft_chat"),
        ("train_data_paths: '${env:CHATS}'", "sft_chat"),
        ("messages_key: turns", "sft_chat"),
        ("train_data_paths: demonstrations", "sft"),
        ("train_data_paths: [lift.hdf5]", "sft"),
        ("train_data_paths: [{dataset_path: jsonl, weight: 1}]", "sft"),
    ],
)
def test_files_of_rows_are_conversations(tmp_path: Path, data: str, recipe: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"recipe: sft\ncluster: {{num_nodes: 1}}\ndata:\n  {data}\n")
    job = load_job(file, environ={"CHATS": "all.jsonl"})
    assert job.recipe is not None
    assert job.recipe.name == recipe
    assert not [finding for finding in job.diagnostics if finding.code == "unknown-key"]


def test_start_of_a_recipe_follows_the_files_of_an_override() -> None:
    for paths in ("chat.jsonl", "[a.jsonl, b.jsonl]"):
        job = load_job("recipe=sft", [f"data.train_data_paths={paths}"], environ={})
        assert job.recipe is not None
        assert job.recipe.name == "sft_chat"


def test_start_of_a_recipe_follows_the_override() -> None:
    chat = load_job("recipe=sft", ["data.type=sums"], environ={})
    assert chat.ok
    assert chat.recipe is not None
    assert chat.recipe.name == "sft_chat"
    robots = load_job("recipe=sft", environ={})
    assert robots.recipe is not None
    assert robots.recipe.name == "sft"


def test_file_selects_the_variant(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: sft\ndata: {type: chat, train_data_paths: a.jsonl}\ncluster: {num_nodes: 1}\n")
    job = load_job(file, environ={})
    assert job.recipe is not None
    assert job.recipe.name == "sft_chat"
    assert not [finding for finding in job.diagnostics if finding.code == "unknown-key"]


def test_validated_file_tells_its_variant() -> None:
    config = SimpleNamespace(recipe="sft", data=SimpleNamespace(type="chat"))
    assert recipe_of(config).name == "sft_chat"
    assert recipe_of(SimpleNamespace(recipe="sft", data=SimpleNamespace())).name == "sft"


def test_schema_of_files_selects_the_variant() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    recipes = {name: find_recipe(name) for name in ("sft", "sft_chat")}
    models = {name: recipe.config_model() for name, recipe in recipes.items()}
    schema = file_schema(models, {name: recipe.variants for name, recipe in recipes.items()})
    cluster = {"num_nodes": 1, "component_placement": {"actor": 0}}
    for data, right in [
        ({"type": "chat", "overlong": "truncate"}, True),
        ({"train_data_paths": ["a.jsonl"], "overlong": "truncate"}, True),
        ({"messages_key": "turns", "overlong": "truncate"}, True),
        ({"train_data_paths": "demonstrations", "overlong": "truncate"}, False),
    ]:
        file = {"recipe": "sft", "cluster": cluster, "data": data}
        assert validator(json.loads(json.dumps(schema))).is_valid(file) is right
