"""The supported source projects: detection of a file's project, and of the matching recipe."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from rlinf_core.config.tree import MappingNode, Path, ScalarNode, find, name_pieces
from rlinf_core.errors import ConfigError


class Project(StrEnum):
    """A supported source project."""

    RLINF = "RLinf"
    VERL = "verl"


# Sections of verl, with the rlinf section of their keys.
VERL_SECTIONS: Final[dict[Path, Path]] = {
    ("actor_rollout_ref", "actor"): ("actor",),
    ("actor_rollout_ref", "model"): ("actor", "model"),
    ("actor_rollout_ref", "ref"): ("reference",),
    ("actor_rollout_ref", "rollout"): ("rollout",),
    ("reward_model",): ("reward",),
    ("trainer",): ("runner",),
}
# Sections of RLinf, likewise.
RLINF_SECTIONS: Final[dict[Path, Path]] = {("actor", "lr_sched"): ("actor", "optim")}
# Sections of RLinf's evaluations, whose model stands in `rollout.model`, and of verl's fine-tuning.
EVALUATION_SECTIONS: Final[dict[Path, Path]] = {("rollout", "model"): ("actor", "model")}
VERL_SFT_SECTIONS: Final[dict[Path, Path]] = {
    ("model",): ("actor", "model"),
    ("optim",): ("actor", "optim"),
    ("engine",): ("actor", "fsdp_config"),
    ("trainer",): ("runner",),
}
# Engine arguments, by engine.
ENGINE_OPTIONS: Final[Path] = ("actor_rollout_ref", "rollout", "engine_kwargs")
# Variables that the launch scripts of RLinf set to folders of its checkout, and their search paths begin with.
FOLDER_BY_VARIABLE: Final = {
    "EMBODIED_PATH": "examples/embodiment",
    "REPO_PATH": "",
    "REWARD_PATH": "examples/reward",
    "DIFFUSION_PATH": "examples/diffusion",
}
_TASKS: Final = {"embodied": "embodied", "sft": "sft", "math": "math", "reasoning": "math"}
# What marks files of agents, whose loops and tools are programs of RLinf.
_AGENT_SECTIONS: Final = ("agentloop", "tools", "rollout_server", "eval")
# Tools of these agents, with the tool of recipe `agent` that does the same.
_AGENT_TOOLS: Final = {"search": "search", "codejudge": "python"}
_AGENT_TASKS: Final = ("coding_online_rl", "reasoning_eval")
# Sections that mark a job file, not a fragment.
JOB_SECTIONS: Final = ("actor_rollout_ref", "trainer", "runner")


def project_of(tree: MappingNode) -> Project:
    """Return the project that a file belongs to.

    Raises:
        ConfigError: it belongs to no supported project, or is an rlinf file already.
    """
    keys = set(tree.keys())
    if "recipe" in keys:
        raise ConfigError(
            "this is an rlinf file already: it has the key `recipe`", help="check it with `rlinf validate`"
        )
    if "actor_rollout_ref" in keys or ("trainer" in keys and "runner" not in keys):
        return Project.VERL
    if "runner" in keys or {"cluster", "actor"} <= keys:
        return Project.RLINF
    raise ConfigError(
        "this is not a job file of RLinf or verl",
        why="it has neither `runner` nor `actor_rollout_ref`; its keys: "
        + ", ".join(f"`{entry.key.raw}`" for entry in tree.entries),
        help="name the main file of a job; the files of its defaults list are found from there",
    )


def recipe_of(project: Project, tree: MappingNode) -> tuple[str, str]:
    """Return the recipe for a file, and why.

    Raises:
        ConfigError: no recipe matches the file.
    """
    if project is Project.VERL:
        if tree.entry("actor_rollout_ref") is None:
            return "sft_chat", "a file of verl without `actor_rollout_ref`: nothing generates answers"
        return "math", "a file of verl with `actor_rollout_ref`"
    task = find(tree, ("runner", "task_type"))
    written = task.raw if isinstance(task, ScalarNode) else ""
    tools = agent_tools(tree)
    _refuse_other_meanings(tree, written, is_agent=bool(tools))
    if tools:
        return "agent", f"agents that call `{tools[0]}`"
    if written == "sft" and not _is_policy(tree):
        raise ConfigError(
            "`runner.task_type: sft` of a language model is not converted",
            help="write a file for recipe `sft_chat`, which learns from given answers",
        )
    if written in _TASKS:
        return _TASKS[written], f"`runner.task_type: {written}`"
    if tree.entry("env") is not None:
        return "embodied", "the section `env`"
    if find(tree, ("data", "prompt_key")) is not None or find(tree, ("algorithm", "sampling_params")) is not None:
        return "math", "prompts and sampling of a language model"
    task_types = ", ".join(f"`{name}`" for name in _TASKS)
    raise ConfigError(
        f"no recipe matches `runner.task_type: {written}`" if written else "the file does not say what to train",
        help=f"known values of `runner.task_type`: {task_types}",
    )


def agent_tools(tree: MappingNode) -> list[str]:
    """Return the tools here of a file whose agents call them in a loop of turns; none where its loop is another, as
    that of several agents with a `workflow` is.
    """
    tools, loop = tree.get("tools"), tree.get("agentloop")
    if not isinstance(tools, MappingNode) or not isinstance(loop, MappingNode):
        return []
    if loop.entry("toolcall_parser") is None or loop.entry("workflow") is not None:
        return []
    return [_AGENT_TOOLS[entry.key.raw] for entry in tools.entries if entry.key.raw in _AGENT_TOOLS]


def _refuse_other_meanings(tree: MappingNode, task_type: str, *, is_agent: bool) -> None:
    """Refuse a file of RLinf that means neither training nor evaluation of what a recipe has.

    Raises:
        ConfigError: it is one.
    """
    sections = [name for name in _AGENT_SECTIONS if tree.entry(name) is not None and not is_agent]
    if sections or task_type in _AGENT_TASKS:
        what = f"section `{sections[0]}`" if sections else f"`runner.task_type: {task_type}`"
        raise ConfigError(
            f"the agents of this file are programs of RLinf ({what}), which no recipe here has",
            help="write a file for recipe `agent`, with your own agent or its tools",
        )
    token = find(tree, ("actor", "model", "openpi", "use_rlt"))
    if isinstance(token, ScalarNode) and token.value is True:
        raise ConfigError(
            "this file trains a token that summarizes the observations of pi0 (`openpi.use_rlt`), which no recipe"
            " supports",
            help="without `use_rlt` the file fine-tunes the policy itself",
        )
    placement = find(tree, ("cluster", "component_placement"))
    components = placed(placement) if isinstance(placement, MappingNode) else {}
    if "env" in components and not {"actor", "rollout"} & set(components):
        raise ConfigError(
            "this file records episodes of a person and trains nothing: it places `env` without `rollout` and `actor`",
            help="`rlinf record` records demonstrations, from a file of recipe `embodied` for the same robot",
        )


def placed(placement: MappingNode | None) -> dict[str, str]:
    """Return the key of each placed component."""
    entries = placement.entries if placement is not None else ()
    return {piece.name: entry.key.raw for entry in entries for piece in name_pieces(entry.key.raw)}


def _is_policy(tree: MappingNode) -> bool:
    """Return whether a file for supervised training trains a robot policy."""
    kind = find(tree, ("actor", "model", "model_type"))
    name = kind.raw if isinstance(kind, ScalarNode) else ""
    return not name.startswith(("qwen", "llama", "deepseek"))
