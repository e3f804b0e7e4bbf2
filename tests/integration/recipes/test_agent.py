"""`recipe: agent`: a small model acts in many turns, is trained, and is shown turn by turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

pytest.importorskip("transformers")

from recipes.agent.agents import AgentOutcome, AgentTask
from recipes.agent.llm import LanguageModel
from recipes.agent.tools.toolbox import Toolbox
from rlinf_core.cluster.cluster import Cluster
from tests.integration.recipes.conftest import SMALL_MATH, Run, Train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

CHANGED = ("actor.warm_start.steps=", "runner.max_steps=")
KEPT = tuple(each for each in SMALL_MATH if not each.startswith(CHANGED))
SMALL = (*KEPT, "actor.warm_start.steps=20", "runner.max_steps=3")
CHECKED = ("rollout.check_logprobs=strict", "algorithm.recompute_logprobs=true")


@pytest.fixture(scope="module")
def train_agent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Runs of the agent recipe."""
    folder = tmp_path_factory.mktemp("agent")
    with closing(Train(cluster, folder, "recipes.agent.program", SMALL, "agent_calculator")) as made:
        yield made


async def branching(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Ask twice from the same beginning, use a tool, give the first turn a reward, and fail now and then."""
    chat = llm.conversation(task.prompt)
    first = await chat.reply(max_new_tokens=4)
    chat.credit(0.01 * len(first.tokens))
    branch = chat.fork()
    branch.add((await tools.call("calculator", "1/0")).text, "tool")
    second = await branch.reply(max_new_tokens=4)
    if len(second.tokens) == 1:
        raise ValueError("a turn of one token")
    length = float(len(second.tokens))
    return AgentOutcome(answer=second.text, reward=length, parts={"length": length})


def gaps(run: Run) -> list[float]:
    return [each.metrics["train/logprob_gap/max"] for each in run.metrics if "train/logprob_gap/max" in each.metrics]


def test_a_model_acts_is_trained_and_shown_turn_by_turn(train_agent: Train) -> None:
    run = train_agent("actor.warm_start.tool_share=0.9", *CHECKED)

    assert len(run.metrics) == 3
    last = run.metrics[-1].metrics
    assert last["agent/tool_calls"] > 0
    assert last["agent/turns"] > 1
    # Engine and trainer are the same model, in every turn: they differ by rounding alone.
    assert len(gaps(run)) == 3
    assert max(gaps(run)) < 1e-4
    shown = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "samples", str(run.folder.path), "-n", "60", "--output", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    samples = json.loads(shown.stdout)["samples"]
    used = next(each for each in samples if any(turn["who"] == "tool" for turn in each["turns"]))
    assert [turn["who"] for turn in used["turns"]][:3] == ["task", "model", "tool"]
    assert used["turns"][1]["text"].endswith("</calculator>")
    text = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "samples", str(run.folder.path), "-n", "60"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "(calculator, " in text


def test_an_agent_of_the_users_branches_and_gives_rewards(train_agent: Train) -> None:
    run = train_agent(f"agent.run={__name__}:branching", *CHECKED)

    for each in run.metrics:
        metrics = each.metrics
        failed = metrics.get("reward/failed_error", 0.0)
        assert metrics["agent/turns"] == pytest.approx(2)
        assert metrics["agent/tool_errors"] == pytest.approx(1)
        assert failed < 24
        assert 1 < metrics["reward/length"] <= 4
        assert 0 < metrics["reward/turns"] <= 0.04
    assert max(gaps(run)) < 1e-4
