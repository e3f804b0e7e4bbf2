"""Tasks of agents: how they are made and shown, what becomes of those of processes that die, and their memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.agent import agent_memory
from recipes.agent.task_calls import AgentGroup, TaskCalls
from recipes.agent.tasks_and_tools import calculations, conversations, lookup_corpus, lookups, make_tools
from recipes.agent.tools.computing_tools import Search
from recipes.agent.tools.tool import Toolbox
from recipes.language.answers.prompt_messages import Prompt
from recipes.language.models.load_model import make_tokenizer
from rlinf_core import ConfigError, WorkerDiedError, WorkerGroupError, load_job
from rlinf_core.job.recipe import ProcessForecast
from tests.unit.recipes.agent.local import agent_config

NAME = "agents"


class OneCall:
    """A call on one rank: the tasks that are the rank's own, and how it ended."""

    def __init__(self, rank: int, prompts: tuple[Prompt, ...]) -> None:
        self.rank = rank
        self.slots = [task.slot for task in prompts if task.worker == rank]
        self.set_aside = any(task.set_aside for task in prompts)
        self.over = False
        self.error: Exception | None = None

    @property
    def going(self) -> bool:
        return not self.over and self.error is None


class Call:
    """A handle of calls on several ranks."""

    def __init__(self, calls: list[OneCall]) -> None:
        self.references = tuple(calls)

    def failures(self) -> dict[int, Exception]:
        return {reference.rank: reference.error for reference in self.references if reference.error is not None}

    def done(self) -> bool:
        return bool(self.failures()) or all(reference.over for reference in self.references)

    def wait(self) -> list[None]:
        if self.failures():
            raise WorkerGroupError(NAME, "generate", self.failures(), 4)
        return [None for _ in self.references]


class Group:
    """Agent processes; a dead one fails every call."""

    def __init__(self) -> None:
        self.calls: list[OneCall] = []
        self.dead: set[int] = set()

    def execute_on(self, *ranks: int) -> Any:
        group = self

        class View:
            def generate(self, prompts: tuple[Prompt, ...]) -> Call:
                made = [OneCall(rank, prompts) for rank in ranks]
                group.calls += made
                group.kill(*group.dead)
                return Call(made)

            def handle(self, method: str, references: list[OneCall]) -> Call:
                assert [reference.rank for reference in references] == list(ranks)
                return Call(references)

        return View()

    def kill(self, *ranks: int) -> None:
        self.dead.update(ranks)
        for call in self.calls:
            if call.rank in ranks and not call.over:
                call.error = WorkerDiedError(f"{NAME}:{call.rank}")

    def finish(self) -> list[int]:
        """End all calls that go on, and return the tasks that were done by that."""
        going = [call for call in self.calls if not call.over and call.error is None]
        for entry in going:
            entry.over = True
        return sorted(slot for item in going for slot in item.slots)


def prompts(count: int, workers: int) -> list[Prompt]:
    return [Prompt(slot, slot, 1, slot % workers, 4, 1.0) for slot in range(count)]


def begun(count: int = 12, workers: int = 4) -> tuple[Group, TaskCalls]:
    group = Group()
    calls = TaskCalls(cast("AgentGroup", group), workers)
    calls.begin(prompts(count, workers))
    return group, calls


def test_tasks_of_a_dead_process_are_each_done_once() -> None:
    group, calls = begun()

    group.kill(1, 3)
    assert not calls.done()
    done = group.finish()

    assert calls.done()
    assert done == list(range(12))
    assert (calls.lost, calls.take_moved(), calls.take_moved()) == (2, 6, 0)


def test_a_process_that_was_given_tasks_may_die_too() -> None:
    group, calls = begun()

    group.kill(1)
    assert not calls.done()
    group.kill(0)
    done: list[int] = []
    while not calls.done():
        done += group.finish()

    assert sorted(done) == list(range(12))
    assert calls.lost == 2


def test_later_tasks_go_to_the_living_alone() -> None:
    group, calls = begun()
    group.kill(2)
    calls.done()
    group.finish()
    assert calls.done()

    group.calls.clear()
    calls.begin(prompts(12, 4))

    assert {call.rank for call in group.calls} == {0, 1, 3}
    assert group.finish() == list(range(12))
    assert calls.done()
    assert calls.lost == 1


def test_the_death_of_the_last_process_is_raised() -> None:
    group, calls = begun(workers=2)
    group.kill(0, 1)

    with pytest.raises(WorkerGroupError, match="`agents:0` died"):
        calls.done()


def test_task_that_kills_its_processes_is_set_aside_alone() -> None:
    group = Group()
    output: list[tuple[int, int]] = []
    calls = TaskCalls(
        cast("AgentGroup", group), 3, revived(group), lambda task, deaths: output.append((task.slot, len(deaths)))
    )
    calls.begin(prompts(12, 3))
    done: list[int] = []

    while not calls.done():
        group.kill(*{call.rank for call in group.calls if 5 in call.slots and not call.set_aside and call.going})
        done += group.finish()

    assert output == [(5, 3)]
    assert calls.set_aside == 1
    # Those that shared a process with it twice were run alone, and each counts once.
    assert sorted(done) == list(range(12))


def test_task_that_was_near_two_deaths_is_done() -> None:
    group = Group()
    calls = TaskCalls(cast("AgentGroup", group), 1, revived(group))
    calls.begin(prompts(3, 1))

    for _ in range(2):
        group.kill(0)
        calls.done()
    done = []
    while not calls.done():
        assert len([call for call in group.calls if call.going]) == 1
        done += group.finish()

    assert done == [0, 1, 2]
    assert calls.set_aside == 0


def revived(group: Group) -> Callable[[WorkerGroupError], bool]:
    def relaunch(error: WorkerGroupError) -> bool:
        group.dead.clear()
        return True

    return relaunch


@pytest.mark.parametrize("error", [ValueError("of an agent"), WorkerDiedError("engines:0")])
def test_what_is_no_death_of_an_agent_is_raised(error: Exception) -> None:
    group, calls = begun()
    group.calls[1].error = error

    with pytest.raises(WorkerGroupError):
        calls.done()


@pytest.mark.parametrize("make", [calculations, lookups])
def test_tasks_of_evaluation_are_not_trained_on(make: object) -> None:
    parts = [make(evaluation=value, size=100, seed=3) for value in (True, False)]  # type: ignore[operator]
    evaluated, trained = ({task.prompt for task in part} for part in parts)
    assert len(evaluated) == len(parts[0]) == 100
    assert len(trained) > 100
    assert not evaluated & trained
    assert parts[0] == make(evaluation=True, size=100, seed=3)  # type: ignore[operator]
    assert parts[0] != make(evaluation=True, size=100, seed=4)  # type: ignore[operator]


def test_products_are_right() -> None:
    for task in calculations(evaluation=True, size=50, seed=0):
        first, second = task.prompt.removesuffix("=").split("*")
        assert int(first) * int(second) == int(task.answer)


def test_two_look_ups_lead_to_every_answer() -> None:
    tool = Search(lookup_corpus(0))
    for task in lookups(evaluation=True, size=200, seed=0):
        (_, first), (_, second) = task.row["calls"]
        town = asyncio.run(tool.call(first)).split()[-1]
        assert second == f"river {town}"
        assert asyncio.run(tool.call(second)).split()[-1] == task.answer


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_model_is_shown_tools_as_often_as_it_is_told_to_be(share: float) -> None:
    config = agent_config(actor={"warm_start": {"steps": 100, "tool_share": share}}, data={"rollout_batch_size": 8})
    tokenizer = make_tokenizer(config.actor)
    (opening,) = tokenizer.encode("<calculator>")
    (result,), (closing,) = tokenizer.encode("<result>"), tokenizer.encode("</result>")

    shown = conversations(config, tokenizer)

    assert len(shown) == 800
    begun = [item for item in shown if item.trained[0]]
    assert sum(item.tokens[0] == opening for item in begun) / len(begun) == pytest.approx(share, abs=0.06)
    # How a tool is used is shown whatever the share, and what it says is never learned.
    used = [item for item in shown if item.tokens[0] == opening]
    assert len(used) > 300
    for entry in used:
        said = slice(entry.tokens.index(result), entry.tokens.index(closing) + 1)
        assert not any(entry.trained[said])
        assert all(entry.trained[1 : said.start])
        assert all(entry.trained[said.stop :])
        assert entry.tokens[-1] == tokenizer.eos_token_id
    assert all(all(item.trained) for item in shown if item.tokens[0] != opening)


def test_episodes_are_shown_where_an_environment_has_examples() -> None:
    played = {"run": "env_agent", "max_turns": 4}
    sections: dict[str, Any] = {"data": {"type": "episodes"}, "actor": {"warm_start": {"steps": 2, "tool_share": 1.0}}}
    config = agent_config(agent=played, **sections)
    tokenizer = make_tokenizer(config.actor)

    shown = conversations(config, tokenizer)

    assert len(shown) == 2 * config.data.rollout_batch_size
    for item in shown:
        text = tokenizer.decode(item.prompt)
        assert re.fullmatch(r"find room \d and take\. \d \([a-z, ]+\)\. ", text)
        said = [token for token, learned in zip(item.tokens, item.trained, strict=True) if learned]
        words = str(tokenizer.decode(said, skip_special_tokens=True)).split(".")[:-1]
        assert 1 <= len(words) <= 4
        assert set(words) <= {"north", "south", "west", "east", "take"}
        # Each is one of the doors that were told before it.
        assert words[0] in text
    elsewhere = {"type": "openenv", "options": {"url": "http://127.0.0.1:1"}}
    assert conversations(agent_config(agent={**played, "environment": elsewhere}, **sections), tokenizer) == []


def test_tools_are_made_by_their_names() -> None:
    tools = make_tools(agent_config(agent={"tools": ["calculator", "textwrap:dedent"]}))
    assert [tool.name for tool in tools] == ["calculator", "dedent"]
    assert asyncio.run(Toolbox(tools, 1.0).call("dedent", " a")).text == "a"
    with pytest.raises(ConfigError, match="two tools are named `calculator`"):
        make_tools(agent_config(agent={"tools": ["calculator", "calculator"]}))
    with pytest.raises(ConfigError, match="not a class or a function"):
        make_tools(agent_config(agent={"tools": ["string:digits"]}))


SMALL = ("actor.model.hidden_dim=64", "actor.warm_start.steps=0", "data.rollout_batch_size=4")


def forecast(*overrides: str, file: str = "agent/calculator-laptop", **counts: int) -> dict[str, ProcessForecast]:
    job = load_job(file, (*SMALL, *overrides))
    job.raise_if_bad()
    config: Any = job.config
    return {item.component: item for item in agent_memory.forecast(config, counts)}


def test_agents_and_their_index_are_counted(tmp_path: Path) -> None:
    assert set(forecast()) == {"actor", "rollout", "reward", "agent"}
    place = "cluster.component_placement.index={node_group: node, placement: 0}"
    assert forecast(place, file="agent/search-laptop")["index"].parts["index"] == 0
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a fact\n" * 100)
    documents = f"agent.tool_options.corpus_path={corpus}"
    assert forecast(place, documents, file="agent/search-laptop")["index"].parts["index"] == 12 * 700
    assert forecast(documents, file="agent/search-laptop")["agent"].parts["index"] == 12 * 700


@pytest.mark.parametrize("there", [True, False])
def test_a_corpus_that_is_not_there_is_warned_of(there: bool, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a fact\n")
    file = tmp_path / ("corpus.txt" if there else "none.txt")
    job = load_job("agent/search-laptop", (*SMALL, f"agent.tool_options.corpus_path={file}"))
    assert ("unusable-path" in [diagnostic.code for diagnostic in job.diagnostics]) is not there


def test_a_conversation_is_as_long_as_it_may_be() -> None:
    parts = forecast("runner.val_check_interval=-1")["rollout"].parts
    # 32 runs of 64 tokens: keys and values of two layers, and a row of numbers of those that may be drawn.
    assert parts["keys and values"] == 32 * (64 * 4 * 2 * 2 * 64 + 63 * 20)


def test_what_is_not_counted_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sandbox is asked for, and not started.
    monkeypatch.setattr("shutil.which", lambda *args, **settings: "/usr/bin/bwrap")  # pyright: ignore
    notes = forecast("agent.tools=[calculator, python]", "agent.tool_options.python_memory_mib=300")["agent"].notes
    assert "programs of `python` take up to 300 MiB each" in notes
