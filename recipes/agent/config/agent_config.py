"""The file of the agent recipe: its sections, its defaults, and the rules between its values.

The defaults build a Qwen2 of 0.3 M parameters, show it a few conversations with a calculator among many without, and
let it find out by GRPO that the calculator pays.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from recipes.agent.call_forms import PROBE_FUNCTION, taught_form
from recipes.agent.config.tool_config import McpServerConfig, TextEnvironmentConfig
from recipes.language.config.language_config import (
    OPTIONAL_COMPONENTS,
    SYMBOLS,
    AnswerActorConfig,
    LanguageConfig,
    LanguageRunnerConfig,
    WarmStartConfig,
)
from recipes.language.config.language_no_effect import LANGUAGE
from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.rules.job_rules import SANDBOX_PROBE, check_job
from recipes.language.rules.job_rules import inputs as job_inputs
from recipes.language.rules.job_rules import trials as reward_trials
from recipes.language.templates.chat_template import ChatRoles, ChatTemplate
from recipes.sections.checks import Report, WorldSizes, blame
from recipes.sections.imports import check_import, runs_in_this_interpreter
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigError, ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import OptionalPath, PositiveFloat, StepsOrNever
from rlinf_core.job.recipe import Trial
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.scalars import Text

COMPONENTS: Final = ("actor", "rollout", "reward", "agent")
# Placed where agents need not hold the index of `search` themselves.
INDEX: Final = "index"
AGENTS: Final = ("tool_agent", "env_agent")
TOOLS: Final = ("calculator", "search", "python")
# Names that are no tools here, each with where what they do is.
_ELSEWHERE: Final = {
    "http": "let an MCP server fetch pages: `agent.mcp: {fetch: {command: [uvx, mcp-server-fetch]}}`",
    "bash": "`bash` comes with tasks with images: `run: env_agent`, `environment: {type: harbor, path: FOLDER}`",
}
# Tasks that are made on the spot, and know which calls lead to their answers.
MADE_TASKS: Final = ("calculations", "lookups")
# Programs that try a box, and make an agent of Harbor.
BOX_PROBE: Final = "recipes.agent.boxes.box_probe"
HARNESS_PROBE: Final = "recipes.agent.harbor.harness_probe"
# Tasks that are the seeds of an environment.
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


def _needs_tool(tool: str, *keys: str) -> IgnoredKeys:
    """Return the rule of keys that change nothing without a tool."""
    help = f"remove it, or write `tools: [{tool}]`"
    return IgnoredKeys(
        keys, lambda agent, _: tool not in agent.tools, f"`tools` has no `{tool}`", help, because=("tools",)
    )


def _in_own_box(agent: AgentWorkerConfig) -> bool:
    """Return whether our own agent works on tasks with images."""
    return agent.run == "env_agent" and agent.environment.type == "harbor" and agent.environment.harness is None


def _calls_tools(agent: AgentWorkerConfig) -> bool:
    return _in_own_box(agent) or (agent.run != "env_agent" and bool(agent.tools or agent.mcp))


def _without_calls(agent: AgentWorkerConfig) -> str:
    """Return why no call of a tool has a time limit."""
    if agent.run != "env_agent":
        return "`tools` is empty"
    in_box = agent.environment.type == "harbor"
    return "an agent of Harbor has limits of its own" if in_box else "`run: env_agent` uses no tools"


def _without_format(agent: AgentWorkerConfig) -> str:
    """Return why nothing is called in a format of ours."""
    return "`run` is not tool_agent" if agent.environment.harness is None else "an agent of Harbor has its own"


class AgentWorkerConfig(ConfigModel):
    """The workers that run agents."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        _needs_tool("search", "corpus_path", "search_results"),
        _needs_tool("python", "python_memory_mib"),
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
            because=("environment.harness", "run", "tools"),
        ),
    )

    group_name: Text = Field(
        default="AgentGroup", description="Name of the worker group, by which other components address it."
    )
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
    corpus_path: OptionalPath = Field(
        default=None,
        description="Text file of documents for `search`, one per line. Default: the facts of `data.type: lookups`.",
    )
    search_results: Count = Field(default=1, description="Number of documents that `search` returns.")
    python_memory_mib: Annotated[int, Field(ge=64)] = Field(
        default=256, description="Memory limit of each process of a `python` program, in MiB."
    )
    environment: TextEnvironmentConfig = Field(
        default_factory=TextEnvironmentConfig, description="The environment that `run: env_agent` plays."
    )
    mcp: dict[Text, McpServerConfig] = Field(
        default_factory=dict[str, McpServerConfig],
        description="MCP servers, by names of your choice: every agent process starts them and offers their tools in"
        " addition to `tools`.",
    )


class IndexConfig(ConfigModel):
    """The workers that hold the index of `search`."""

    group_name: Text = Field(
        default="IndexGroup", description="Name of the worker group, by which other components address it."
    )


class AgentConfig(LanguageConfig):
    """Configuration of the agent recipe."""

    # An agent may reward itself.
    rewards_by_rule: ClassVar[bool] = False

    warm_start_examples: ClassVar[str] = "recipes.agent.tasks.warm_start_examples:conversations"
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
            because=("agent.environment.harness",),
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
        """Whether workers of their own hold the index of `search`."""
        return INDEX in self.cluster.component_placement and "search" in self.agent.tools

    @property
    def offers_functions(self) -> bool:
        """Whether tool_agent's model calls tools as functions where its chat template teaches a form."""
        agent = self.agent
        calls = agent.run == "tool_agent" or self.plays_tasks
        return self.data.apply_chat_template and calls and agent.tool_format == "auto"

    @property
    def plays_tasks(self) -> bool:
        """Whether agents do tasks with images."""
        return self.agent.run == "env_agent" and self.agent.environment.type == "harbor"

    @property
    def has_harness(self) -> bool:
        """Whether agents of Harbor do the tasks with images."""
        return self.plays_tasks and self.agent.environment.harness is not None

    def chat_roles(self, template: ChatTemplate) -> list[ChatRoles]:
        """See `LanguageConfig`."""
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


def check(config: AgentConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_job(config, COMPONENTS, world_sizes, report, (*OPTIONAL_COMPONENTS, INDEX))
    _check_limits(config, report)
    _check_agent(config, report)


def _check_limits(config: AgentConfig, report: Report) -> None:
    prompt, turn = config.data.max_prompt_length, config.rollout.sampling_params.max_new_tokens
    if prompt + turn > config.runner.seq_length:
        report(
            blame(
                config,
                ("runner", "seq_length"),
                ("rollout", "sampling_params", "max_new_tokens"),
                ("data", "max_prompt_length"),
            ),
            "conflicting-settings",
            f"max_prompt_length {prompt} + max_new_tokens {turn} = {prompt + turn} tokens exceed the longest"
            f" conversation, `runner.seq_length` {config.runner.seq_length}",
            f"raise `runner.seq_length` to {prompt + turn} plus room for further turns",
        )


def _check_agent(config: AgentConfig, report: Report) -> None:
    agent = config.agent
    if ":" in agent.run:
        check_import(config, ("agent", "run"), agent.run, "agent", report)
    for number, tool in enumerate(agent.tools):
        if ":" in tool:
            check_import(config, ("agent", "tools", number), tool, "agent", report)
    _check_environment(config, report)
    if "python" in agent.tools and shutil.which("bwrap") is None and runs_in_this_interpreter(config, "agent"):
        report(
            ("agent", "tools", agent.tools.index("python")),
            "missing-extra",
            "`python` runs programs in a bubblewrap sandbox, and bubblewrap is not installed",
            "run `apt install bubblewrap`",
        )
    if agent.mcp and runs_in_this_interpreter(config, "agent"):
        _check_servers(agent, report)
    if "search" in agent.tools:
        _check_search(config, report)
    elif INDEX in config.cluster.component_placement:
        report(
            ("cluster", "component_placement", INDEX),
            "unused-component",
            "the index is unused: `agent.tools` has no `search`, and nothing would run there",
            "remove it, or write `agent.tools: [search]`",
            severity=Severity.WARNING,
        )


def _check_environment(config: AgentConfig, report: Report) -> None:
    environment, plays = config.agent.environment, config.agent.run == "env_agent"
    if plays != (config.data.source == EPISODES) and (plays or ":" not in config.agent.run):
        report(
            blame(config, ("data", "type"), ("agent", "run")),
            "conflicting-settings",
            f"`agent.run: {config.agent.run}` does not match tasks of {config.data.source}: environments and episode"
            " seeds go together",
            "write both `agent.run: env_agent` and `data.type: episodes`",
        )
    if not plays:
        return
    at = ("agent", "environment", "type")
    if environment.type == "openenv" and not environment.url:
        report(
            at, "conflicting-settings", "`openenv` needs a server", "write `agent.environment.url: http://HOST:PORT`"
        )
    if environment.type == "verifiers":
        if not environment.name:
            report(at, "conflicting-settings", "`verifiers` needs a taskset", "write `agent.environment.name: TASKSET`")
        if missing_modules(["verifiers"]) and runs_in_this_interpreter(config, "agent"):
            message = "environments of verifiers need the package verifiers"
            report(at, "missing-extra", message, f"run `{install_command('verifiers')}`")
    if environment.type == "harbor":
        _check_tasks(config, report)
    if ":" in environment.type:
        check_import(config, at, environment.type, "agent", report)


def _check_tasks(config: AgentConfig, report: Report) -> None:
    at, path = ("agent", "environment", "path"), config.agent.environment.path
    if path is None:
        report(
            ("agent", "environment", "type"),
            "conflicting-settings",
            "`harbor` needs tasks",
            "write `agent.environment.path: FOLDER`",
        )
        return
    if not runs_in_this_interpreter(config, "agent"):
        return
    # It reads each task: for the files that have some.
    from recipes.agent.harbor.checking import load_checked
    from recipes.agent.harbor.task_folder import HARBOR_HELP

    if config.agent.environment.harness is not None and missing_modules(["harbor"]):
        message = "agents of Harbor (`harness`) need the package harbor, which is not installed"
        report(("agent", "environment", "harness"), "missing-extra", message, HARBOR_HELP)
    if not Path(path).is_dir():
        message = f"`path` names `{path}`, which does not exist on this machine"
        report(at, "unusable-path", message, severity=Severity.WARNING)
        return
    try:
        tasks = load_checked(Path(path))
    except ConfigError as error:
        report(at, "unusable-path", f"{error.message}: {error.why}" if error.why else error.message, error.help)
        return
    memory = config.agent.environment.box_memory_mib
    large = max((task for task, _ in tasks), key=lambda task: task.memory_mib)
    if memory is not None and large.memory_mib > memory:
        report(
            ("agent", "environment", "box_memory_mib"),
            "conflicting-settings",
            f"the task `{large.name}` needs {large.memory_mib} MiB, and all boxes of a node may have {memory} MiB",
            f"raise it to {large.memory_mib} at least, or lower `memory_mb` in the task's task.toml",
        )


def _check_servers(agent: AgentWorkerConfig, report: Report) -> None:
    if missing_modules(["mcp"]):
        report(("agent", "mcp"), "missing-extra", "MCP servers need the package mcp", f"run `{install_command('mcp')}`")
    for name, server in agent.mcp.items():
        if shutil.which(server.command[0], path=server.env.get("PATH")) is None:
            message = f"the command `{server.command[0]}` does not exist on this machine"
            report(("agent", "mcp", name, "command"), "unusable-path", message, severity=Severity.WARNING)


def _check_search(config: AgentConfig, report: Report) -> None:
    agent = config.agent
    if agent.corpus_path is None and config.data.source != "lookups":
        report(
            blame(config, ("agent", "corpus_path"), ("agent", "tools"), ("data", "type")),
            "conflicting-settings",
            f"`search` needs documents, and tasks of {config.data.source} provide none",
            "write `agent.corpus_path: FILE`, a text file with one document per line",
        )
        return
    here = agent.corpus_path is not None and runs_in_this_interpreter(config, "agent")
    if here and not Path(str(agent.corpus_path)).is_file():
        message = f"`corpus_path` names `{agent.corpus_path}`, which does not exist on this machine"
        report(("agent", "corpus_path"), "unusable-path", message, severity=Severity.WARNING)


def inputs(config: AgentConfig) -> list[Path]:
    """Return the files and folders that a run reads."""
    corpus = config.agent.corpus_path
    return job_inputs(config) + ([] if corpus is None else [Path(corpus)])


def trials(config: AgentConfig) -> list[Trial]:
    """Return the checks of `rlinf doctor`: what agents need where they run, and the sandbox of rewards."""
    tool = [Trial("agent", "sandbox", SANDBOX_PROBE)] if "python" in config.agent.tools else []
    boxes = [Trial("agent", "boxes", BOX_PROBE)] if config.plays_tasks else []
    environment, length = config.agent.environment, str(config.runner.seq_length)
    named = (environment.harness or "", json.dumps(environment.options), length)
    harness = [Trial("agent", "harness", HARNESS_PROBE, named)] if config.has_harness else []
    return tool + boxes + harness + reward_trials(config)
