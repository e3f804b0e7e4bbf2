"""A forecast of the memory of a job of agents: of its language model, and of agents, their tools and their index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from recipes.agent.config import EPISODES, AgentConfig
from recipes.agent.conversation.turn_encoder import TurnEncoder
from recipes.agent.tasks.task_messages import first_messages
from recipes.agent.tasks.tasks import load_tasks
from recipes.language.config import LanguageConfig
from recipes.language.data.problems import training_order
from recipes.language.memory.job_forecast import (
    Sizes,
    Workers,
    component_forecasts,
    empty_process,
    sizes_of,
)
from recipes.language.memory.longest_answers import Prompts
from rlinf_core import ConfigError
from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORKERS = Workers("recipes.agent.workers.rollout_worker", "turns", "serve")
_PROGRAM = "recipes.agent.memory.base_program"


def forecast(config: AgentConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, by component and phase.

    Args:
        config: the whole file.
        world_sizes: processes of each component; None where that is not known: 1.

    Raises:
        ConfigError: the sizes of the model are not known.
    """
    sizes = sizes_of(config, world_sizes, first_prompts)
    found = component_forecasts(sizes, _WORKERS)
    return [*found, _agent(config, sizes), *([_index(config, sizes)] if config.has_index else [])]


def first_prompts(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase, count: int) -> Prompts:
    """Return the prompts of the first training step's tasks, without what is said of tools.

    Raises:
        ConfigError: the tasks cannot be read, or what they begin with is not known before they are played.
    """
    data = cast("AgentConfig", config).data
    if data.source == EPISODES:
        raise ConfigError("an environment says what an episode begins with")
    tasks = load_tasks(data, evaluation=False)
    encoder = TurnEncoder(
        tokenizer, apply_chat_template=data.apply_chat_template, template_arguments=data.chat_template_kwargs
    )
    numbers = training_order(len(tasks), 0, count, seed=data.seed, shuffle=data.shuffle)
    encoded = [encoder.encode((), first_messages(tasks[number], data, "")) for number in numbers]
    return tuple(each for each in encoded if each)


def _agent(config: AgentConfig, sizes: Sizes) -> ProcessForecast:
    """Return the forecast of one agent process: what it has loaded, and the conversations of a step."""
    count = sizes.count("agent")
    base = empty_process(config, "agent", "recipes.agent.workers.agent_worker", _PROGRAM)["init"]
    drawn = sizes.answers.objects(sizes.model.vocabulary) // count
    phases = (PhaseForecast("init_worker", {"base": base}), PhaseForecast("generate", {"base": base, "answers": drawn}))
    notes: list[str] = []
    if config.agent.mcp:
        notes.append("the MCP servers that each agent process starts are not counted")
    if "python" in config.agent.tools:
        notes.append(f"programs of `python` take up to {config.agent.python_memory_mib} MiB each")
    if ":" in config.agent.run:
        notes.append(f"what `{config.agent.run}` holds is not counted, nor are conversations besides its first")
    return ProcessForecast("agent", count, phases, 0, tuple(notes))


def _index(config: AgentConfig, sizes: Sizes) -> ProcessForecast:
    """Return the forecast of one process that holds the index of `search`."""
    base = empty_process(config, "index", "recipes.agent.workers.index_worker", _PROGRAM)["init"]
    phases = (PhaseForecast("init_worker", {"base": base}), PhaseForecast("search", {"base": base}))
    return ProcessForecast("index", sizes.count("index"), phases)
