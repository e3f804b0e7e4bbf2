"""Recipe agent: a small model acts in many turns, is trained and is shown turn by turn."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.tools.tool import Toolbox
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.runners import events
from tests.integration.recipes.conftest import SMALL_MATH, Killer, Run, Train
from tests.integration.recipes.language.test_math_learns import metrics, train
from tests.rlinf_command import rlinf

pytestmark = pytest.mark.ray

CHANGED = ("actor.warm_start.steps=", "runner.max_steps=")
KEPT = tuple(item for item in SMALL_MATH if not item.startswith(CHANGED))
SMALL = (*KEPT, "actor.warm_start.steps=20", "runner.max_steps=3")
CHECKED = ("rollout.check_logprobs=strict", "algorithm.recompute_logprobs=true")


@pytest.fixture(scope="module")
def train_agent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Runs of the agent recipe."""
    folder = tmp_path_factory.mktemp("agent")
    with closing(Train(cluster, folder, "recipes.agent.agent_runner", SMALL, "agent/calculator-laptop")) as made:
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


async def dying(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Take two turns; the first process that comes to its sixth run is killed between them."""
    chat = llm.conversation(task.prompt)
    await chat.reply(max_new_tokens=4)
    RUNS.append(task.prompt)
    marker = Path(task.row["marker"])
    if len(RUNS) == 6 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    reply = await chat.reply(max_new_tokens=4)
    return AgentOutcome(answer=reply.text, reward=float(len(reply.tokens)))


# Of an agent process.
RUNS: list[str] = []


def gaps(run: Run) -> list[float]:
    return [
        record.metrics["train/logprob_gap/max"] for record in run.metrics if "train/logprob_gap/max" in record.metrics
    ]


@pytest.mark.timeout(600)
def test_a_model_acts_is_trained_and_shown_turn_by_turn(train_agent: Train, tmp_path: Path) -> None:
    run = train_agent("actor.warm_start.tool_share=0.9", *CHECKED)

    assert len(run.metrics) == 3
    last = run.metrics[-1].metrics
    assert last["agent/tool_calls"] > 0
    assert last["agent/turns"] > 1
    # Engine and trainer are the same model, in every turn: they differ by rounding alone.
    assert len(gaps(run)) == 3
    assert max(gaps(run)) < 1e-4
    asked = ("report", "--samples", str(run.folder.path), "-n", "60")
    samples = json.loads(rlinf(tmp_path, *asked, "--json"))["samples"]
    used = next(sample for sample in samples if any(turn["who"] == "tool" for turn in sample["turns"]))
    assert [turn["who"] for turn in used["turns"]][:3] == ["task", "model", "tool"]
    assert used["turns"][1]["text"].endswith("</calculator>")
    assert "(calculator, " in rlinf(tmp_path, *asked)


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_an_agent_of_the_users_branches_and_gives_rewards(train_agent: Train) -> None:
    run = train_agent(f"agent.run={__name__}:branching", *CHECKED)

    for record in run.metrics:
        metrics = record.metrics
        raised = metrics.get("exit/error", 0.0)
        assert metrics["agent/turns"] == pytest.approx(2)
        assert metrics["agent/tool_errors"] == pytest.approx(1)
        # A run that raises twice is a sample without a length, and keeps what its turn was credited with.
        assert "failed/error" not in metrics
        assert raised < 1
        assert 1 < metrics["reward/length"] / (1 - raised) <= 4
        assert 0 < metrics["reward/turns"] <= 0.04
    assert max(gaps(run)) < 1e-4


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_agents_go_on_while_the_model_learns_and_after_a_restart(
    train_agent: Train, learned: dict[int, list[int]]
) -> None:
    ahead = ("runner.max_staleness=2", "runner.max_steps=5", "runner.save_interval=1")

    run = train_agent(*ahead, during=Killer("agent", 3, events.ACTOR_TRAINING))

    (restart,) = run.of(events.RunRestarted)
    assert restart.step in (2, 3, 4)
    assert [record.step for record in run.metrics] == [1, 2, 3, 4, 5]
    assert max(record.metrics["rollout/staleness_max"] for record in run.metrics) <= 2
    # The first tasks were done under the newest weights; those of later steps were begun under older ones.
    assert run.metrics[0].metrics["rollout/staleness_mean"] == 0
    assert any(record.metrics["rollout/staleness_mean"] > 0 for record in run.metrics)
    # Of a step that was repeated the last time counts. No task is learned from twice, and none is left out.
    counts = Counter(problem for problems in learned.values() for problem in problems)
    assert set(counts.values()) == {1}
    assert len(counts) == 5 * 6


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_an_environment_is_played_from_seeds(train_agent: Train) -> None:
    run = train_agent(
        "agent.run=env_agent",
        "agent.max_turns=3",
        "data.type=episodes",
        "data.max_prompt_length=200",
        "runner.seq_length=600",
        "actor.warm_start.steps=2",
        "runner.val_check_interval=2",
        *CHECKED,
    )

    assert len(run.metrics) == 3
    for record in run.metrics:
        assert record.metrics["reward/unfinished"] > 0
        assert record.metrics["reward/return"] >= 0
        assert 1 <= record.metrics["agent/turns"] <= 3
    assert max(gaps(run)) < 1e-4


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_agents_search_in_an_index_of_workers(train_agent: Train) -> None:
    placed = {"actor,rollout,reward,index": {"placement": 0}, "agent": {"placement": "0:0-1"}}
    run = train_agent(
        "data.type=lookups",
        "data.max_prompt_length=24",
        "agent.tools=[search]",
        "runner.seq_length=96",
        "actor.warm_start={steps: 40, tool_share: 0.9}",
        f"cluster.component_placement={json.dumps(placed)}",
    )

    assert run.metrics[-1].metrics["agent/tool_calls"] > 0
    assert run.metrics[-1].metrics["agent/tool_timeouts"] == 0


@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.parametrize("restarts", [0, 3])
def test_a_killed_agent_process_costs_its_tasks_alone(train_agent: Train, tmp_path: Path, restarts: int) -> None:
    """A new process begins them again; where no restart is left, the other process does them."""
    marker, data = tmp_path / "killed", tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "marker": str(marker)} for number in range(10, 40)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    placed = {"actor,rollout,reward": {"placement": 0}, "agent": {"placement": "0:0-1"}}
    shown: dict[str, list[int]] = {}

    run = train_agent(
        f"agent.run={__name__}:dying",
        # One after the other, so that some tasks of the process that dies are done before.
        "agent.max_concurrent=1",
        "data.type=jsonl",
        f"data.train_data_paths={data}",
        "data.val_data_paths=null",
        f"cluster.component_placement={json.dumps(placed)}",
        "runner.sample_interval=1",
        f"runner.max_restarts={restarts}",
        *CHECKED,
    )

    assert marker.exists()
    assert not run.of(events.RunRestarted)
    assert [item.repeated for item in run.of(events.WorkersRelaunched)] == (["its tasks"] if restarts else [])
    assert [record.metrics["agent/processes_lost"] for record in run.metrics] == [1, 1, 1]
    # Half of six tasks; the first of them had been handed on, and was done a second time for nothing.
    assert [record.metrics["agent/tasks_moved"] for record in run.metrics] == [3, 0, 0]
    assert all(record.metrics["agent/turns"] == pytest.approx(2) for record in run.metrics)
    for path in run.folder.path.glob("samples/*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        shown[path.name] = sorted((record["slot"], record["sample"]) for record in records)
    assert len(shown) == 3
    for entry in shown.values():
        slots = {slot for slot, _ in entry}
        assert len(slots) == 6
        assert entry == [(slot, sample) for slot in sorted(slots) for sample in range(4)]
    assert max(gaps(run)) < 1e-4


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_single_agent_process_is_started_again(train_agent: Train) -> None:
    saved = ("runner.save_interval=3", "runner.save_format=dcp")
    whole = train_agent(*saved)
    for component in ("agent", "reward"):
        run = train_agent(*saved, during=Killer(component, 2, events.GENERATE_ROLLOUTS))
        assert run.recoveries() == [events.WorkersRelaunched]
        assert [item.step for item in run.of(events.StepFinished)] == [1, 2, 3]
        assert run.ends_like(whole)


FRAMEWORKS = os.environ.get("RLINF_FRAMEWORKS_PYTHON")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_learns_to_search_twice(tmp_path: Path, seed: int) -> None:
    run = train(tmp_path, "agent/search-laptop", f"actor.seed={seed}", f"data.seed={seed}")

    rewards = metrics(run, "rollout/reward")
    assert rewards[0] < 0.3
    assert statistics.fmean(rewards[-5:]) >= 0.8


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_without_the_search_it_is_left_to_guess(tmp_path: Path) -> None:
    run = train(tmp_path, "agent/search-laptop", "agent.tools=[]")

    assert statistics.fmean(metrics(run, "rollout/reward")[-5:]) < 0.4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FRAMEWORKS, reason="RLINF_FRAMEWORKS_PYTHON names no interpreter with pydantic-ai")
def test_an_agent_of_a_framework_learns_through_its_endpoint(tmp_path: Path) -> None:
    run = train(tmp_path, "agent/pydantic-ai-laptop", "runner.max_steps=20", "data.val_size=50")

    rewards, greedy = metrics(run, "rollout/reward"), metrics(run, "eval/pass@1")
    assert statistics.fmean(rewards[-5:]) >= statistics.fmean(rewards[:3]) + 0.2
    assert greedy[-1] >= greedy[0] + 0.2
    # It uses its calculator, and its own words are learned from in every turn.
    assert metrics(run, "agent/turns")[-1] > metrics(run, "agent/turns")[0]


@pytest.mark.nightly
@pytest.mark.security
@pytest.mark.timeout(3600)
def test_nothing_is_left_of_runs_that_were_killed(tmp_path: Path) -> None:
    # Not at the head of this module, which agent processes import.
    from benchmarks.language.killed_runs import killed

    results = list(killed(tmp_path, 1, math.inf))
    assert len(results) == 8
    assert [result for result in results if not result.met] == []
