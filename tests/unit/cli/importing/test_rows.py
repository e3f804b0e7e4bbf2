"""The rows of `foreign.toml`: each names a function that there is, and a key that a recipe has."""

from __future__ import annotations

import pytest

from rlinf_cli.importing.foreign_names import foreign_table
from rlinf_cli.importing.rules.rows import FUNCTIONS, rules_of
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.validating.model_fields import types_at
from rlinf_core.job.find_recipe import find_recipe

KINDS = foreign_table()["rules"]
RECIPES = {"RLinf": "embodied", "sac": "embodied", "evaluation": "embodied", "verl": "math", "verl_sft": "sft_chat"}


def test_every_rule_has_a_row() -> None:
    rows = [row for rows in KINDS.values() for row in rows.values() if isinstance(row, dict)]
    by_rows = {row["by"] for row in rows if "by" in row} | {"to"}
    returned = {name: function.__annotations__.get("return") for name, function in FUNCTIONS.items()}
    helpers = {"same", "drop"}
    assert {name for name, kind in returned.items() if kind in ("Rule", "Result")} - helpers == by_rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_lead_to_keys_of_the_recipe(kind: str) -> None:
    assert rules_of(kind)
    model = find_recipe(RECIPES.get(kind, kind)).config_model()
    targets = [row if isinstance(row, str) else row.get("to") for row in KINDS[kind].values()]
    # One that a recipe lacks is named all the same: its finding says why.
    lacking = {target for target in targets if target and not types_at(model, to_path(parse_path(target)[0]))}
    assert lacking <= {"reward.use_reward_model"}
