"""`rlinf explain --schema`."""

from __future__ import annotations

import json

import jsonschema
import pytest
from ruamel.yaml import YAML

from rlinf_core.config.shipped import shipped_configs
from tests.unit.cli.typed import Cli


@pytest.fixture
def validator(cli: Cli) -> jsonschema.Draft202012Validator:
    schema = json.loads(cli("explain", "--schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_shipped_configs_conform(validator: jsonschema.Draft202012Validator) -> None:
    reader = YAML(typ="safe", pure=True)
    configs = {name: reader.load(file) for name, file in shipped_configs().items()}
    assert configs
    errors = [(name, error.message) for name, config in configs.items() for error in validator.iter_errors(config)]
    assert errors == []


def test_a_mistyped_key_does_not(validator: jsonschema.Draft202012Validator) -> None:
    assert not validator.is_valid({"cluster": {"num_nodes": 1, "nodegroups": []}})


def test_one_recipe(cli: Cli) -> None:
    out = cli.out("explain", "--schema", "--recipe", "math")
    schema = jsonschema.Draft202012Validator(json.loads(out))
    config = {"recipe": "math", "cluster": {"num_nodes": 1}}
    assert schema.is_valid(config)
    assert not schema.is_valid(config | {"env": {}})


def test_an_unknown_recipe_is_2(cli: Cli) -> None:
    assert "did you mean `math`?" in cli.refuses(2, "explain", "--schema", "--recipe", "maths")
