"""The configuration of recipe `agent`: its sections and defaults.

The defaults build a Qwen2 of 0.3 M parameters, show it a few conversations with a calculator among many without, and
let it find out by GRPO that the calculator pays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from recipes.agent.conversation.call_forms import PROBE_FUNCTION, taught_form
from recipes.agent.tool_config import (
    TEXT_ENVIRONMENTS,
    TOOL_OPTIONS,
    HarborOptions,
    McpServerConfig,
    TextEnvironmentKind,
    ToolOptions,
)
from recipes.language.config.language_config import (
    SYMBOLS,
    AnswerActorConfig,
    LanguageConfig,
    LanguageRunnerConfig,
    WarmStartConfig,
)
from recipes.language.config.language_no_effect import LANGUAGE
from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.rules.job_rules import SANDBOX_PROBE
from recipes.language.rules.job_rules import inputs as job_inputs
from recipes.language.rules.job_rules import trials as reward_trials
from recipes.language.text.chat_template import ChatRoles, ChatTemplate
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.model import Options
from rlinf_core.config.sections.values import PositiveFloat, StepsOrNever
from rlinf_core.job.recipe import Trial
from rlinf_core.scalars import Text

COMPONENTS: Final = ("actor", "rollout", "reward", "agent")
# The component that holds the index of `search`, so that agents need not.
INDEX: Final = "index"
AGENTS: Final = ("tool_agent", "env_agent")
TOOLS: Final = ("calculator", "search", "python")
# Names that are not tools here, each with an alternative.
_ELSEWHERE: Final = {
    "http": "let an MCP server fetch pages: `agent.mcp: {fetch: {command: [uvx, mcp-server-fetch]}}`",
    "bash": "`bash` comes with tasks with images: `run: env_agent`,"
    " `environment: {type: harbor, options: {path: FOLDER}}`",
}
# Generated tasks, which know the calls that lead to their answers.
MADE_TASKS: Final = ("calculations", "lookups")
# Programs that test a box, and the creation of a Harbor agent.
_BOX_PROBE: Final = "recipes.agent.boxes.box_probe"
_HARNESS_PROBE: Final = "recipes.agent.harbor.trials"
# The type of tasks that are seeds of an environment.
EPISODES: Final = "episodes"
_MARKS: Final = ("calculator", "search", "result")


class AgentRunnerConfig(LanguageRunnerConfig):
    """Settings of the run."""

    max_steps: StepsOrNever = 250
    seq_length: Count = Field(default=2048, description="Maximum conversation length, in tokens.")


class AgentDataConfig(LanguageDataConfig):
    """Tasks with verifiable answers."""

    type: Literal["calculations", "lookups", "episodes", "jsonl", "parquet", "reasoning_gym", "sums"] | None = Field(
        default=None,
        description="Source: generated calculations (products) or lookups (facts); episodes (seeds of"
        " `agent.environment`); JSONL or Parquet files, a reasoning_gym task, or sums. Default: files if"
        " `train_data_paths` is set, else calculations.",
    )

    @property
    def source(self) -> str:
        """The source of the tasks."""
        if self.type in (*MADE_TASKS, EPISODES):
            return self.type
        return "calculations" if self.type is None and not self.train_data_paths else super().source


class AgentWarmStartConfig(WarmStartConfig):
    """Supervised warm start on example conversations, for models built from scratch."""

    tool_share: Fraction = Field(
        default=0.2,
        description="Share of warm-start examples in which the model starts with a tool call instead of a guess. For"
        " `treasure`: fraction of well-formed commands.",
    )


class AgentActorConfig(AnswerActorConfig):
    """The workers that train."""

    built_symbols: ClassVar[str] = SYMBOLS + "abcdefghijklmnopqrstuvwxyz"
    built_words: ClassVar[tuple[str, ...]] = tuple(f"<{slash}{name}>" for name in _MARKS for slash in ("", "/"))

    warm_start: AgentWarmStartConfig = Field(
        default_factory=AgentWarmStartConfig,
        description="Supervised warm start of a model without `model_path`: steps, lr, tool_share.",
    )


def _needs_tool(tool: str) -> IgnoredKeys:
    """Return the rule for the options of a tool that agents do not have."""
    return IgnoredKeys(
        tuple(f"tool_options.{name}" for name in TOOL_OPTIONS[tool].model_fields),
        lambda agent, _: tool not in agent.tools,
        f"`tools` has no `{tool}`",
        f"remove it, or write `tools: [{tool}]`",
        because=("tools",),
    )


def _in_own_box(agent: AgentWorkerConfig) -> bool:
    """Return whether the built-in agent works on tasks with images."""
    return agent.tasks is not None and agent.tasks.harness is None


def _calls_tools(agent: AgentWorkerConfig) -> bool:
    return _in_own_box(agent) or (agent.run != "env_agent" and bool(agent.tools or agent.mcp))


def _without_calls(agent: AgentWorkerConfig) -> str:
    """Return why no call of a tool has a time limit."""
    if agent.run != "env_agent":
        return "`tools` is empty"
    return "an agent of Harbor has limits of its own" if agent.tasks else "`run: env_agent` uses no tools"


def _without_format(agent: AgentWorkerConfig) -> str:
    """Return why the model makes no calls in a built-in format."""
    return "an agent of Harbor has its own" if agent.tasks else "`run` is not tool_agent"


class AgentWorkerConfig(ConfigModel):
    """The workers that run agents."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *map(_needs_tool, TOOL_OPTIONS),
        IgnoredKeys(
            ("environment",),
            lambda agent, _: agent.run != "env_agent",
            "`run` is not env_agent",
            "remove it, or write `run: env_agent`",
            because=("run",),
        ),
        IgnoredKeys(
            ("tool_format",),
            lambda agent, _: agent.run != "tool_agent" and not _in_own_box(agent),
            _without_format,
            because=("run",),
        ),
        IgnoredKeys(
            ("tools", "mcp"),
            lambda agent, sizes: agent.run == "env_agent",
            "`run: env_agent` uses no tools",
            because=("run",),
        ),
        IgnoredKeys(
            ("tool_timeout",),
            lambda agent, _: not _calls_tools(agent),
            _without_calls,
            because=("environment.options.harness", "run", "tools"),
        ),
    )

    group_name: ClassVar[str] = "AgentGroup"

    run: Annotated[Text, KnownOrOwn("agent", AGENTS)] = Field(
        default="tool_agent",
        description="Agent: tool_agent, which calls tools until it answers; env_agent, which plays `environment`; or"
        " `package.module:function`, an async function of task, model and tools that returns an outcome.",
    )
    tools: tuple[Annotated[Text, KnownOrOwn("tool", TOOLS, instead=_ELSEWHERE)], ...] = Field(
        default=("calculator",),
        description="Tools: calculator, search, python (sandboxed), or"
        " `package.module:function`, a sync or async function from text to text.",
    )
    tool_format: Literal["auto", "plain"] = Field(
        default="auto",
        description="How the model calls the tools of tool_agent. auto: function calls in the format of its chat"
        " template, plain if the template has none; plain: `<name>argument</name>`.",
    )
    tool_timeout: PositiveFloat = Field(default=5.0, description="Time limit of one tool call, in seconds.")
    timeout: PositiveFloat = Field(default=300.0, description="Time limit of one agent run, in seconds.")
    max_turns: Count = Field(default=8, description="Maximum model turns in one run, over all its conversations.")
    max_concurrent: Count = Field(default=256, description="Concurrent runs per process.")
    tool_options: Options[ToolOptions] = Field(
        default_factory=dict[str, Any],
        description="Options of the tools (docs/reference/options.md). search: corpus_path, search_results; python:"
        " python_memory_mib.",
    )
    environment: TextEnvironmentKind = Field(
        default_factory=TEXT_ENVIRONMENTS[0], description="The environment that `run: env_agent` plays."
    )
    mcp: dict[Text, McpServerConfig] = Field(
        default_factory=dict[str, McpServerConfig],
        description="MCP servers, by names of your choice: every agent process starts them and offers their tools in"
        " addition to `tools`.",
    )

    @property
    def settings(self) -> ToolOptions:
        """The options of the tools, defaults included."""
        return ToolOptions.model_validate(self.tool_options)

    @property
    def tasks(self) -> HarborOptions | None:
        """The tasks with images that agents do; None: they do something else."""
        settings = self.environment.settings if self.run == "env_agent" else None
        return settings if isinstance(settings, HarborOptions) else None


class IndexConfig(ConfigModel):
    """The workers that hold the index of `search`."""

    group_name: ClassVar[str] = "IndexGroup"


class AgentConfig(LanguageConfig):
    """Configuration of the agent recipe."""

    # An agent may set its own reward.
    rewards_by_rule: ClassVar[bool] = False

    warm_start_examples: ClassVar[str] = "recipes.agent.tasks_and_tools:conversations"
    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        *LANGUAGE,
        IgnoredKeys(
            ("actor.warm_start.tool_share",),
            lambda config, sizes: config.data.source not in ("calculations", "lookups", "episodes"),
            lambda config: f"tasks of {config.data.source} do not specify the calls that solve them",
            because=("data.type", "data.train_data_paths"),
        ),
        IgnoredKeys(
            ("data.shuffle",),
            lambda config, sizes: config.data.source == "episodes",
            "episode seeds are used in order",
            because=("data.type",),
        ),
        IgnoredKeys(
            ("data.system_prompt",),
            lambda config, sizes: config.has_harness,
            "an agent of Harbor writes the messages",
            because=("agent.environment.options.harness",),
        ),
    )

    runner: AgentRunnerConfig = Field(
        default_factory=AgentRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: AgentActorConfig = Field(
        default_factory=AgentActorConfig, description="The model that learns, its optimizer and its sharding."
    )
    data: AgentDataConfig = Field(default_factory=AgentDataConfig, description="The tasks.")
    agent: AgentWorkerConfig = Field(
        default_factory=AgentWorkerConfig, description="The agents: program, tools and limits."
    )

    index: IndexConfig = Field(
        default_factory=IndexConfig,
        description="The `search` index. With a placement in `cluster.component_placement`, its workers hold it once"
        " for all agent processes.",
    )

    @property
    def has_index(self) -> bool:
        """Whether separate workers hold the index of `search`."""
        return INDEX in self.cluster.component_placement and "search" in self.agent.tools

    @property
    def offers_functions(self) -> bool:
        """Whether the model calls tools as functions if its chat template teaches a form."""
        agent = self.agent
        calls = agent.run == "tool_agent" or self.plays_tasks
        return self.data.apply_chat_template and calls and agent.tool_format == "auto"

    @property
    def plays_tasks(self) -> bool:
        """Whether agents do tasks with images."""
        return self.agent.tasks is not None

    @property
    def has_harness(self) -> bool:
        """Whether agents of Harbor do the tasks with images."""
        return self.agent.tasks is not None and self.agent.tasks.harness is not None

    def chat_roles(self, template: ChatTemplate) -> list[ChatRoles]:
        agent, asked = self.agent, super().chat_roles(template)
        system = ("system",) if self.data.system_prompt and not self.has_harness else ()
        uses_tools = agent.run == "tool_agent" and (agent.tools or agent.mcp)
        uses_bash = self.plays_tasks and not self.has_harness
        if not uses_tools and not uses_bash:
            return [*asked, ChatRoles(("agent", "run"), (*system, "user", "assistant", "user"))]
        at = ("agent", "environment") if uses_bash else ("agent", "tools")
        if self.offers_functions and taught_form(template) is not None:
            return [*asked, ChatRoles(at, (*system, "user", "assistant", "tool"), (PROBE_FUNCTION,))]
        plain = ChatRoles(
            at,
            ("system", "user"),
            help="tool instructions go into a system message: use a model whose chat template accepts one, or write"
            " `data.apply_chat_template: false`",
        )
        return [*asked, plain, ChatRoles(at, ("system", "user", "assistant", "tool"))]

    @property
    def longest_answer(self) -> int:
        """See `LanguageConfig`: the turns of a conversation are one answer."""
        return self.runner.seq_length


def inputs(config: AgentConfig) -> list[Path]:
    """Return the files and folders that a run reads."""
    corpus = config.agent.settings.corpus_path
    return job_inputs(config) + ([] if corpus is None else [Path(corpus)])


def trials(config: AgentConfig) -> list[Trial]:
    """Return the checks of `rlinf doctor`: what agents need where they run, and the sandbox of rewards."""
    tool = [Trial("agent", "sandbox", SANDBOX_PROBE)] if "python" in config.agent.tools else []
    boxes = [Trial("agent", "boxes", _BOX_PROBE)] if config.plays_tasks else []
    tasks = config.agent.tasks
    if tasks is not None and tasks.harness is not None:
        named = (tasks.harness, json.dumps(tasks.agent_options), str(config.runner.seq_length))
        boxes.append(Trial("agent", "harness", _HARNESS_PROBE, named))
    return tool + boxes + reward_trials(config)
