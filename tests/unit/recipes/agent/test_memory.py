"""The forecast of memory of agents: processes, and conversations as long as they may be."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.agent.memory import agent_forecast as agent_memory
from recipes.language.memory import job_forecast
from rlinf_core import load_job
from rlinf_core.job.process_forecast import ProcessForecast

SMALL = ("actor.model.hidden_dim=64", "actor.warm_start.steps=0", "data.rollout_batch_size=4")


@pytest.fixture(autouse=True)
def bases(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(config: Any, component: str, module: str, program: str = "") -> dict[str, int]:
        return {"start": 90, "init": 95, "work": 100}

    for module in (job_forecast, agent_memory):
        monkeypatch.setattr(module, "empty_process", empty)


def forecast(*overrides: str, file: str = "agent_calculator", **counts: int) -> dict[str, ProcessForecast]:
    job = load_job(file, (*SMALL, *overrides))
    job.raise_if_bad()
    config: Any = job.config
    return {each.component: each for each in agent_memory.forecast(config, counts)}


def test_agents_and_their_index_are_counted_where_they_are() -> None:
    assert set(forecast()) == {"actor", "rollout", "reward", "agent"}
    place = "cluster.component_placement.index={node_group: node, placement: 0}"
    index = forecast(place, file="agent_search")["index"]
    assert [each.phase for each in index.phases] == ["init_worker", "search"]


def test_a_conversation_is_as_long_as_it_may_be() -> None:
    phases = {each.phase: each.parts for each in forecast("runner.val_check_interval=-1")["rollout"].phases}
    # 32 runs of 64 tokens: keys and values of two layers, and a row of numbers of the 64 that may be drawn.
    assert phases["serve"]["keys and values"] == 32 * 64 * (4 * 2 * 2 * 64 + 20)


def test_what_is_not_counted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sandbox is asked for, and not started.
    monkeypatch.setattr("shutil.which", lambda *args, **settings: "/usr/bin/bwrap")  # pyright: ignore
    notes = forecast("agent.tools=[calculator, python]", "agent.python_memory_mib=300")["agent"].notes
    assert "programs of `python` take up to 300 MiB each" in notes
