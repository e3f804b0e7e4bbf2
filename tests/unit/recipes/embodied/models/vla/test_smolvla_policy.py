"""SmolVLA where lerobot is not installed; tests/integration/recipes/policies/test_policies.py runs it where it is."""

from __future__ import annotations

import sys

import pytest

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.registry import make_model
from rlinf_core.errors import ConfigError


def test_an_interpreter_without_lerobot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    config = policy_model({"model_type": "smolvla"})
    with pytest.raises(ConfigError, match=r"(?s)needs the package lerobot.*python_interpreter_path"):
        make_model(config, EnvSpec(4, 2, cameras={"main": (32, 32, 3)}))
