"""Rules for RLinf's agents that call one tool of ours: Search-R1's `search`, and the programs of rStar2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rlinf_cli.importing.outcomes import Added, Leaf, LeftOut, ReferenceText
from rlinf_cli.importing.projects import agent_tools
from rlinf_cli.importing.rules.rules_rlinf import MATH
from rlinf_cli.importing.rules.shared_rules import Result, Table, Values, drop, new, same, to
from rlinf_core.config.tree import MappingNode, Path

_TURNS: Final = "counts the turns of the model in a conversation"
_AGENTS: Final[Path] = ("cluster", "component_placement", "agent")
# Processes that run agents.
_PROCESSES: Final = 4


def _reward_type(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "rstar2":
        return new("reward.reward_type", "math", "`rstar2` compares expressions, as `math` does")
    return same("reward.reward_type", leaf)


def _adv_type(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "grpo_dynamic":
        return new("algorithm.adv_type", "grpo", "`grpo_dynamic` of conversations that are not trees is `grpo`")
    return same("algorithm.adv_type", leaf)


def _search(leaf: Leaf, values: Values) -> Result:
    server = values.of(leaf)
    return LeftOut(f"`search` reads `agent.corpus_path`; a function of yours in `agent.tools` may ask `{server}`")


AGENT: Final[Table] = {
    **MATH,
    "agentloop.max_turns": to("agent.max_turns", _TURNS),
    "agentloop.max_assistant_turns": to("agent.max_turns", _TURNS),
    "tools.search.server_addr": _search,
    "tools.search.topk": to("agent.search_results"),
    "tools.codejudge.host_addr": drop("programs run in a sandbox of the agent's process, and no server judges them"),
    "algorithm.adv_type": _adv_type,
    "algorithm.sampling_params.stop": drop("a turn ends where the model calls a tool, or stops"),
    "data.type": drop("rows are read by the ending of their file", quiet=True),
    "reward.reward_type": _reward_type,
}


def agent_needs(tree: MappingNode) -> Iterator[Added]:
    """Yield what agents need here: places, their tools, and what a tool reads."""
    why = f"agents run in a separate group of {_PROCESSES} CPU processes"
    yield Added((*_AGENTS, "node_group"), "node", why)
    yield Added((*_AGENTS, "placement"), f"0:0-{_PROCESSES - 1}", why)
    tools = agent_tools(tree)
    yield Added(("agent", "tools"), tools, "the section `tools` names them")
    if "search" in tools:
        yield Added(("agent", "tool_format"), "plain", "calls are written `<search>words</search>`")
        documents = ReferenceText("${env:SEARCH_DOCUMENTS}")
        yield Added(("agent", "corpus_path"), documents, "the documents, one a line, in the place of the file's server")
