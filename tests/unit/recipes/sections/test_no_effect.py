"""The rules of keys without effect: they name keys there are, and are silent of what ships. `rows` has examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from recipes.embodied.config.env_types import ENV_TYPES
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core.config.diagnostics import render_text
from rlinf_core.config.model import ConfigModel, IgnoredKeys
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.config.validating.model_fields import sections, types_at, value_type, written_fields
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.registry import import_target


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_nothing_is_told_of_a_shipped_configuration(name: str) -> None:
    # As a file of a user's own: nothing is told of the keys of one that came with the package.
    text = shipped_configs()[name].read_bytes()
    assert [
        render_text(diagnostic)
        for diagnostic in load_with_lint("-", stdin=text, environ={}).diagnostics
        if diagnostic.code == NO_EFFECT
    ] == []


def rules() -> Iterator[tuple[str, KeyPath, type[ConfigModel], IgnoredKeys]]:
    for recipe in recipe_names():
        model = find_recipe(recipe).config_model()
        for place, section in sections(model):
            for rule in section.no_effect if issubclass(section, ConfigModel) else ():
                yield recipe, tuple(place.split(".")) if place else (), section, rule


def test_rules_name_keys_that_there_are() -> None:
    count = 0
    for _, _, section, rule in rules():
        for key in (*rule.keys, *rule.because):
            *above, name = key.split(".")
            holders = types_at(section, tuple(above))
            known = [holder for holder in holders if isinstance(holder, type) and issubclass(holder, BaseModel)]
            named = any(name in written_fields(item) for item in known)
            assert named or any(value_type(holder) for holder in holders), (section, key)
            count += 1
    assert count > 100


@pytest.mark.parametrize("name", recipe_names())
def test_every_rule_can_be_asked(name: str) -> None:
    job = load_with_lint(find_recipe(name).default_config, environ={})
    for recipe, place, kind, rule in rules():
        section: Any = job.config
        for segment in place:
            section = getattr(section, segment, None)
        if recipe == name and isinstance(section, kind):
            assert rule.when(section, {}) in (True, False, None) or rule.when(section, {})
            assert rule.reason(section)


@pytest.mark.parametrize("name", sorted(ENV_TYPES))
def test_the_table_of_environments_knows_their_processes(name: str) -> None:
    entry = ENV_TYPES[name]
    try:
        target: Any = import_target(entry.target, "env_type")
    except Exception:
        pytest.skip("its package is not installed")
    processes = target.processes if issubclass(target, SimulatedEnv) else None
    assert entry.processes == processes
