"""The projects whose files are converted: how their files are told apart, and which recipe they ask for."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from rlinf_core.config.tree import MappingNode, Path, ScalarNode, find
from rlinf_core.errors import ConfigError


class Project(StrEnum):
    """A project whose files are converted."""

    RLINF = "RLinf"
    VERL = "verl"


# Sections of verl, and where their keys are here.
VERL_SECTIONS: Final[dict[Path, Path]] = {
    ("actor_rollout_ref", "actor"): ("actor",),
    ("actor_rollout_ref", "model"): ("actor", "model"),
    ("actor_rollout_ref", "ref"): ("reference",),
    ("actor_rollout_ref", "rollout"): ("rollout",),
    ("reward_model",): ("reward",),
    ("trainer",): ("runner",),
}
# Arguments of engines, by the name of the engine.
ENGINE_OPTIONS: Final[Path] = ("actor_rollout_ref", "rollout", "engine_kwargs")
_TASKS: Final = {"embodied": "embodied", "sft": "sft", "math": "math", "reasoning": "math"}
# Sections that the file of a job has, and a fragment of one has not.
JOB_SECTIONS: Final = ("actor_rollout_ref", "trainer", "runner")


def project_of(tree: MappingNode) -> Project:
    """Return the project whose file this is.

    Raises:
        ConfigError: it is none's, or one of ours.
    """
    keys = set(tree.keys())
    if "recipe" in keys:
        raise ConfigError(
            "this is a file of rlinf already: it has the key `recipe`", help="check it by `rlinf validate`"
        )
    if "actor_rollout_ref" in keys or ("trainer" in keys and "runner" not in keys):
        return Project.VERL
    if "runner" in keys or {"cluster", "actor"} <= keys:
        return Project.RLINF
    raise ConfigError(
        "this is no job file of RLinf or verl",
        why="it has neither `runner` nor `actor_rollout_ref`; its keys: "
        + ", ".join(f"`{entry.key.raw}`" for entry in tree.entries),
        help="name the file that a job is started with; those that its defaults list names are found from there",
    )


def recipe_of(project: Project, tree: MappingNode) -> tuple[str, str]:
    """Return the recipe for a file, and the reason in words.

    Raises:
        ConfigError: no recipe does what the file asks for.
    """
    if project is Project.VERL:
        if tree.entry("actor_rollout_ref") is None:
            raise ConfigError(
                "no recipe trains a language model on given answers, as this file of verl asks",
                why="it has no `actor_rollout_ref`, so that nothing generates answers",
                help="recipe `sft` learns from demonstrations of robots; `rlinf recipes` tells about all",
            )
        return "math", "a file of verl with `actor_rollout_ref`"
    task = find(tree, ("runner", "task_type"))
    written = task.raw if isinstance(task, ScalarNode) else ""
    if written == "sft" and not _is_policy(tree):
        raise ConfigError(
            "no recipe trains a language model on given answers, as `runner.task_type: sft` asks here",
            help="recipe `sft` learns from demonstrations of robots; `rlinf recipes` tells about all",
        )
    if written in _TASKS:
        return _TASKS[written], f"`runner.task_type: {written}`"
    if tree.entry("env") is not None:
        return "embodied", "the section `env`"
    if find(tree, ("data", "prompt_key")) is not None or find(tree, ("algorithm", "sampling_params")) is not None:
        return "math", "prompts and sampling of a language model"
    known = ", ".join(f"`{name}`" for name in _TASKS)
    raise ConfigError(
        f"no recipe does what `runner.task_type: {written}` asks for" if written else "nothing tells what is trained",
        help=f"known values of `runner.task_type`: {known}",
    )


def _is_policy(tree: MappingNode) -> bool:
    """Return whether a file for supervised training is about a policy of robots."""
    kind = find(tree, ("actor", "model", "model_type"))
    name = kind.raw if isinstance(kind, ScalarNode) else ""
    return not name.startswith(("qwen", "llama", "deepseek"))
