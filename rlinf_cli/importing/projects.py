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


# The sections of verl, each with the rlinf section of its keys.
VERL_SECTIONS: Final[dict[Path, Path]] = {
    ("actor_rollout_ref", "actor"): ("actor",),
    ("actor_rollout_ref", "model"): ("actor", "model"),
    ("actor_rollout_ref", "ref"): ("reference",),
    ("actor_rollout_ref", "rollout"): ("rollout",),
    ("reward_model",): ("reward",),
    ("trainer",): ("runner",),
}
# The sections of RLinf with other paths here.
RLINF_SECTIONS: Final[dict[Path, Path]] = {("actor", "lr_sched"): ("actor", "optim")}
# The same for RLinf's evaluations, whose model is in `rollout.model`, and for verl's fine-tuning.
EVALUATION_SECTIONS: Final[dict[Path, Path]] = {("rollout", "model"): ("actor", "model")}
VERL_SFT_SECTIONS: Final[dict[Path, Path]] = {
    ("model",): ("actor", "model"),
    ("optim",): ("actor", "optim"),
    ("engine",): ("actor", "fsdp_config"),
    ("trainer",): ("runner",),
}
# The path of inference backends' arguments, by backend.
ENGINE_OPTIONS: Final[Path] = ("actor_rollout_ref", "rollout", "engine_kwargs")
# Variables with which RLinf's search paths begin, and the folders of its checkout to which its launch scripts set them.
FOLDER_BY_VARIABLE: Final = {
    "EMBODIED_PATH": "examples/embodiment",
    "REPO_PATH": "",
    "REWARD_PATH": "examples/reward",
    "DIFFUSION_PATH": "examples/diffusion",
}
_TASKS: Final = {"embodied": "embodied", "sft": "sft", "math": "math", "reasoning": "math"}
# Sections that mark files of agents, whose loops and tools are programs of RLinf.
_AGENT_SECTIONS: Final = ("agentloop", "tools", "rollout_server", "eval")
# Tools of these agents, each with the equivalent tool of recipe `agent`.
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
    """Return our equivalents of a file's tools, if its agent calls tools in a loop of turns; empty for other loops,
    such as several agents with a `workflow`.
    """
    tools, loop = tree.get("tools"), tree.get("agentloop")
    if not isinstance(tools, MappingNode) or not isinstance(loop, MappingNode):
        return []
    if loop.entry("toolcall_parser") is None or loop.entry("workflow") is not None:
        return []
    return [_AGENT_TOOLS[entry.key.raw] for entry in tools.entries if entry.key.raw in _AGENT_TOOLS]


def _refuse_other_meanings(tree: MappingNode, task_type: str, *, is_agent: bool) -> None:
    """Check that no recipe lacks what a file of RLinf trains or evaluates.

    Raises:
        ConfigError: the file's agents, token or recording have no counterpart here.
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
    """Return the key in `component_placement` of each placed component."""
    entries = placement.entries if placement is not None else ()
    return {piece.name: entry.key.raw for entry in entries for piece in name_pieces(entry.key.raw)}


def _is_policy(tree: MappingNode) -> bool:
    """Return whether a file for supervised training trains a robot policy."""
    kind = find(tree, ("actor", "model", "model_type"))
    name = kind.raw if isinstance(kind, ScalarNode) else ""
    return not name.startswith(("qwen", "llama", "deepseek"))
