"""Validation rules of recipe `agent`."""

from __future__ import annotations

import shutil
from pathlib import Path

from recipes.agent.agent_config import COMPONENTS, EPISODES, INDEX, AgentConfig, AgentWorkerConfig
from recipes.agent.tool_config import HarborOptions
from recipes.language.config.language_config import OPTIONAL_COMPONENTS
from recipes.language.rules.job_rules import check_job, check_lengths
from recipes.language.rules.problem_rules import check_rewards
from recipes.sections.checks import Report, WorldSizes, report_absent, report_unusable
from recipes.sections.imports import check_import, check_sandbox, lacks_packages, runs_in_this_interpreter
from rlinf_core import ConfigError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.process.requirements import missing_modules
from rlinf_core.suggest import did_you_mean


def check(config: AgentConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_job(config, COMPONENTS, world_sizes, report, (*OPTIONAL_COMPONENTS, INDEX))
    check_lengths(config, report, "the longest conversation, `runner.seq_length`", " plus room for further turns")
    if config.agent.run == "tool_agent":
        # Other agents may set rewards, of which those from `correct_reward` on count as correct.
        check_rewards(config, report)
    _check_agent(config, report)


def _check_agent(config: AgentConfig, report: Report) -> None:
    agent = config.agent
    if ":" in agent.run:
        check_import(config, ("agent", "run"), agent.run, "agent", report, is_function=True)
    names = [tool.rpartition(":")[2] for tool in agent.tools]
    for number, (tool, name) in enumerate(zip(agent.tools, names, strict=True)):
        if ":" in tool:
            check_import(config, ("agent", "tools", number), tool, "agent", report, is_function=True)
        if name in names[:number]:
            message = f"two tools are named `{name}`"
            report.conflict(f"agent.tools.{number}", message, "rename or remove one of them")
    _check_environment(config, report)
    if "python" in agent.tools:
        check_sandbox(config, ("agent", "tools", agent.tools.index("python")), "python", "agent", report)
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
        report.conflict(
            "data.type agent.run",
            f"`agent.run: {config.agent.run}` does not match tasks of {config.data.source}: environments and episode"
            " seeds go together",
            "write both `agent.run: env_agent` and `data.type: episodes`",
        )
    if not plays:
        return
    at = ("agent", "environment", "type")
    if environment.type == "verifiers" and runs_in_this_interpreter(config, "agent"):
        lacks_packages(at, "environments of verifiers need", ["verifiers"], report)
    if config.agent.tasks is not None:
        _check_tasks(config, config.agent.tasks, report)
    if ":" in environment.type:
        check_import(config, at, environment.type, "agent", report)


def _check_tasks(config: AgentConfig, environment: HarborOptions, report: Report) -> None:
    above = ("agent", "environment", "options")
    at, path = (*above, "path"), environment.path
    if environment.harness is None:
        _check_names(environment, report)
    if not runs_in_this_interpreter(config, "agent"):
        return
    # Imported late, as only configurations with tasks need it.
    from recipes.agent.harbor.grading import load_checked
    from recipes.agent.harbor.task_folder import HARBOR_HELP

    if environment.harness is not None and missing_modules(["harbor"]):
        message = "agents of Harbor (`harness`) need the package harbor, which is not installed"
        report((*above, "harness"), "missing-extra", message, HARBOR_HELP)
    if not Path(path).is_dir():
        report_absent(at, path, report)
        return
    try:
        tasks = load_checked(Path(path), environment.harness)
    except ConfigError as error:
        report_unusable(at, error, report)
        return
    memory = environment.box_memory_mib
    large = max((task for task, _ in tasks), key=lambda task: task.memory_mib)
    if memory is not None and large.memory_mib > memory:
        report.conflict(
            "agent.environment.options.box_memory_mib",
            f"the task `{large.name}` needs {large.memory_mib} MiB, and all boxes of a node may have {memory} MiB",
            f"raise it to {large.memory_mib} at least, or lower `memory_mb` in the task's task.toml",
        )


def _check_names(environment: HarborOptions, report: Report) -> None:
    """Report options that only an agent of Harbor could read, where there is none."""
    for name in environment.agent_options:
        at = ("agent", "environment", "options", name)
        meant = did_you_mean(name, HarborOptions.model_fields)
        if meant:
            report(at, "unknown-key", f"`{name}` is no option of `type: harbor`", meant)
        else:
            message = f"`{name}` has no effect: it is an option of `harness`, and there is none"
            help = "remove it, or write `harness: terminus-2`"
            report(at, "no-effect", message, help, severity=Severity.WARNING)


def _check_servers(agent: AgentWorkerConfig, report: Report) -> None:
    lacks_packages(("agent", "mcp"), "MCP servers need", ["mcp"], report)
    for name, server in agent.mcp.items():
        if shutil.which(server.command[0], path=server.env.get("PATH")) is None:
            message = f"the command `{server.command[0]}` does not exist on this machine"
            report(("agent", "mcp", name, "command"), "unusable-path", message, severity=Severity.WARNING)


def _check_search(config: AgentConfig, report: Report) -> None:
    corpus = config.agent.settings.corpus_path
    if corpus is None and config.data.source != "lookups":
        report.conflict(
            "agent.tool_options.corpus_path agent.tools data.type",
            f"`search` needs documents, and tasks of {config.data.source} provide none",
            "write `agent.tool_options: {corpus_path: FILE}`, a text file with one document per line",
        )
        return
    if corpus is not None and runs_in_this_interpreter(config, "agent") and not Path(corpus).is_file():
        report_absent(("agent", "tool_options", "corpus_path"), corpus, report)
