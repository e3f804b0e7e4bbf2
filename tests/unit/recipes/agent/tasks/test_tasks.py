from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.agent.tasks.tasks import calculations, lookup_corpus, lookups, make_tools
from recipes.agent.tasks.warm_start_examples import conversations
from recipes.agent.tools.search import Search
from recipes.agent.tools.toolbox import Toolbox
from recipes.language.models.load_model import make_tokenizer
from rlinf_core import ConfigError
from tests.unit.recipes.agent.local import agent_config


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
    elsewhere = {"type": "openenv", "url": "http://127.0.0.1:1"}
    assert conversations(agent_config(agent={**played, "environment": elsewhere}, **sections), tokenizer) == []


def test_tools_are_made_by_their_names() -> None:
    tools = make_tools(agent_config(agent={"tools": ["calculator", "textwrap:dedent"]}))
    assert [tool.name for tool in tools] == ["calculator", "dedent"]
    assert asyncio.run(Toolbox(tools, 1.0).call("dedent", " a")).text == "a"
    with pytest.raises(ConfigError, match="two tools are named `calculator`"):
        make_tools(agent_config(agent={"tools": ["calculator", "calculator"]}))
    with pytest.raises(ConfigError, match="not a class or a function"):
        make_tools(agent_config(agent={"tools": ["string:digits"]}))
