"""Environments of verifiers.

`RLINF_VERIFIERS_PYTHON` names an interpreter with that library and rlinf: `pip install "rlinf-cli[verifiers]"`
in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.environments.verifiers_agent import VerifiersAgent, VerifiersSettings
from recipes.language.data_config import MOST_GENERATED
from rlinf_core import ConfigError

PYTHON = os.environ.get("RLINF_VERIFIERS_PYTHON", "")
PROGRAM = "tests.unit.recipes.agent.environments.verifiers_episode"
ROOT = Path(__file__).parents[5]
CALL = '<tool_call>{"name": "backwards", "arguments": {"word": "%s"}}</tool_call>'

with_verifiers = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="RLINF_VERIFIERS_PYTHON names no interpreter with verifiers"),
]


def played(*turns: str, seed: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the program of `verifiers_episode.py` printed."""
    asked = json.dumps({"options": options or {}, "seed": seed, "turns": turns})
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [PYTHON, "-m", PROGRAM, asked], capture_output=True, text=True, check=True, env=env, cwd=ROOT, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


class TestRealOnes:
    """With the library, as it is installed."""

    pytestmark = with_verifiers

    def test_its_reward_is_that_of_the_run(self) -> None:
        right, wrong = played("enots", seed=0), played("stone", seed=0)
        assert (right["reward"], wrong["reward"]) == (2.0, 0.0)
        assert right["parts"] == {"spelled": 2.0}
        assert right["told"] == [["system", "Answer by one word."], ["user", "Spell stone backwards."]]
        assert right["drawn"] == ["enots\0"]

    def test_its_tools_are_called_and_not_learned(self) -> None:
        found = played(CALL % "river", "revir", seed=MOST_GENERATED, options={"with_tool": True})
        assert found["reward"] == 2.0
        # A task of evaluation: the first, which no seed of training leads to.
        assert found["told"][1:] == [["user", "Spell river backwards."], ["tool", "revir"]]
        assert found["drawn"] == [f"{CALL % 'river'}\0revir\0"]

    def test_a_run_without_further_turns_is_scored_as_it_is(self) -> None:
        found = played(*[CALL % "stone"] * 4, seed=0, options={"with_tool": True})
        assert found["reward"] == 0.0


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.agent.environments.verifiers_agent.missing_modules", list)
    with pytest.raises(ConfigError) as error:
        VerifiersAgent(VerifiersSettings("words", {}, None, 1))
    assert "verifiers>=0.4,<0.5" in str(error.value.help)
