"""`rlinf recipes`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.config.shipped import shipped_configs
from rlinf_core.errors import ConfigError
from rlinf_core.job import registry

Cli = Callable[..., Any]


def test_each_with_the_config_it_starts_from(cli: Cli) -> None:
    ended = cli("recipes")
    assert ended.code == 0
    header, *rows = ended.out.splitlines()
    assert header.split() == ["recipe", "config", "what"]
    assert [row.split()[0] for row in rows] == ["embodied", "math"]
    for row in rows:
        assert row.split()[1] in shipped_configs()


def test_json(cli: Cli) -> None:
    data = json.loads(cli("recipes", "--output", "json").out)
    assert data["schema"] == "rlinf.recipes/1"
    assert [recipe["name"] for recipe in data["recipes"]] == ["embodied", "math"]
    assert all(recipe["summary"] and recipe["default_config"] for recipe in data["recipes"])


def test_a_broken_package_does_not_hide_the_others(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    find = registry.find_recipe

    def finding(name: str) -> Any:
        if name == "embodied":
            raise ConfigError("recipe `embodied` cannot be loaded", help="repair it")
        return find(name)

    monkeypatch.setattr(registry, "find_recipe", finding)
    ended = cli("recipes")
    assert ended.code == 0
    assert "math" in ended.out
    assert "recipe `embodied` cannot be loaded" in ended.err
