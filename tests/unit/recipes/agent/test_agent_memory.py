"""The forecast of memory of agents: processes, and conversations as long as they may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.agent import agent_memory
from rlinf_core import load_job
from rlinf_core.job.recipe import ProcessForecast

SMALL = ("actor.model.hidden_dim=64", "actor.warm_start.steps=0", "data.rollout_batch_size=4")


def forecast(*overrides: str, file: str = "agent_calculator", **counts: int) -> dict[str, ProcessForecast]:
    job = load_job(file, (*SMALL, *overrides))
    job.raise_if_bad()
    config: Any = job.config
    return {item.component: item for item in agent_memory.forecast(config, counts)}


def test_agents_and_their_index_are_counted(tmp_path: Path) -> None:
    assert set(forecast()) == {"actor", "rollout", "reward", "agent"}
    place = "cluster.component_placement.index={node_group: node, placement: 0}"
    assert forecast(place, file="agent_search")["index"].parts["index"] == 0
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a fact\n" * 100)
    documents = f"agent.corpus_path={corpus}"
    assert forecast(place, documents, file="agent_search")["index"].parts["index"] == 12 * 700
    assert forecast(documents, file="agent_search")["agent"].parts["index"] == 12 * 700


def test_a_conversation_is_as_long_as_it_may_be() -> None:
    parts = forecast("runner.val_check_interval=-1")["rollout"].parts
    # 32 runs of 64 tokens: keys and values of two layers, and a row of numbers of those that may be drawn.
    assert parts["keys and values"] == 32 * (64 * 4 * 2 * 2 * 64 + 63 * 20)


def test_what_is_not_counted_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sandbox is asked for, and not started.
    monkeypatch.setattr("shutil.which", lambda *args, **settings: "/usr/bin/bwrap")  # pyright: ignore
    notes = forecast("agent.tools=[calculator, python]", "agent.python_memory_mib=300")["agent"].notes
    assert "programs of `python` take up to 300 MiB each" in notes
