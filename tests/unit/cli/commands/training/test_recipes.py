"""`rlinf train` without a file: the recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config.shipped import shipped_configs
from rlinf_core.errors import ConfigError
from rlinf_core.job import find_recipe as registry
from tests.unit.cli.typed import Cli

PACKAGES = Path(__file__).parents[2] / "packages"


def test_each_with_the_config_it_starts_from(cli: Cli) -> None:
    out = cli.out("train")
    table, _, _ = out.partition("\n\n")
    header, *rows = table.splitlines()
    assert header.split() == ["recipe", "config", "what"]
    assert [row.split()[0] for row in rows] == ["agent", "embodied", "math", "serve", "sft", "sft_chat"]
    for row in rows:
        assert row.split()[1] in shipped_configs()


def test_json(cli: Cli) -> None:
    data = json.loads(cli("train", "--json").out)
    assert data["schema"] == "rlinf.recipes/1"
    assert [recipe["name"] for recipe in data["recipes"]] == ["agent", "embodied", "math", "serve", "sft", "sft_chat"]
    assert all(recipe["summary"] and recipe["default_config"] for recipe in data["recipes"])


def test_a_broken_package_does_not_hide_the_others(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    find = registry.find_recipe

    def finding(name: str) -> Any:
        if name == "embodied":
            raise ConfigError("recipe `embodied` cannot be loaded", help="repair it")
        return find(name)

    monkeypatch.setattr(registry, "find_recipe", finding)
    ended = cli("train")
    assert ended.code == 0
    assert "math" in ended.out
    assert "recipe `embodied` cannot be loaded" in ended.err


def test_a_package_brings_its_own_config(cli: Cli, fake_recipe: Path) -> None:
    data = json.loads(cli("train", "--json").out)
    (own,) = [recipe["default_config"] for recipe in data["recipes"] if recipe["name"] == "fake"]
    assert Path(own) == PACKAGES / "fake.yaml"
    ended = cli("train", "recipe=fake", "--dry-run")
    assert ended.code == 0, ended.err


def test_what_cannot_be_run_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    unprogrammed = registry.find_recipe("embodied")._replace(name="unprogrammed", program=None)
    monkeypatch.setattr(registry, "recipe_names", lambda: ["embodied", "unprogrammed"])
    find = registry.find_recipe
    monkeypatch.setattr(registry, "find_recipe", lambda name: unprogrammed if name == "unprogrammed" else find(name))
    why = "it has no program in this version; its files can only be validated and laid out"
    text = cli("train").out
    assert f"\n`unprogrammed` cannot be run: {why}\n" in text
    assert "`embodied` cannot be run" not in text
    first, second = json.loads(cli("train", "--json").out)["recipes"]
    assert (first["runnable"], first["obstacle"]) == (True, None)
    assert (second["runnable"], second["obstacle"]) == (False, why)


def test_what_an_interpreter_lacks_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    assert "`embodied` cannot be run: needs `torch`, not installed in this Python\n" in cli("train").out
