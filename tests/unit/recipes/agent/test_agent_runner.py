"""The loop of agents: what ends a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.agent.loop.agent_runner import AgentRunner
from recipes.language.loop.reasoning_runner import ReasoningRunner
from rlinf_core.errors import RunError


def generate(monkeypatch: pytest.MonkeyPatch, share: float) -> dict[str, float]:
    """Have a step generated in whose runs the agent raised at that share."""
    monkeypatch.setattr(ReasoningRunner, "generate_rollouts", lambda runner, step: {"exit/error": share})
    runner: Any = AgentRunner.__new__(AgentRunner)
    runner._calls = SimpleNamespace(lost=0, set_aside=0, take_moved=lambda: 0)
    runner._slow_tools = SimpleNamespace(look=lambda metrics: None)
    return runner.generate_rollouts(3)


def test_an_agent_that_raises_in_every_run_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="the agent raised in every run of step 3"):
        generate(monkeypatch, 1.0)
    assert generate(monkeypatch, 0.75)["exit/error"] == 0.75
