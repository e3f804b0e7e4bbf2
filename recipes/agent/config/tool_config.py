"""Sections for external services of agents: MCP servers and third-party environments."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field

from recipes.sections.values import KnownOrOwn, one_or_many
from rlinf_core import ConfigModel, IgnoredKeys
from rlinf_core.config.sections.values import OptionalPath
from rlinf_core.scalars import Text

ENVIRONMENTS: Final = ("treasure", "openenv", "verifiers", "harbor")


class McpServerConfig(ConfigModel):
    """An MCP server that is started by its command."""

    command: Annotated[tuple[Text, ...], BeforeValidator(one_or_many), Field(min_length=1)] = Field(
        description="Command that starts the server, as a list; it is not run in a shell."
    )
    args: tuple[Text, ...] = Field(default=(), description="Additional arguments of the command.")
    env: dict[str, Text] = Field(
        default_factory=dict[str, str],
        description=(
            "Environment variables of the server, in addition to the worker's HOME, LOGNAME, PATH, SHELL, TERM and"
            " USER."
        ),
    )
    tools: tuple[Text, ...] | None = Field(
        default=None, description="The server's tools that are offered to the model. Default: all."
    )


def _only_of_type(names: tuple[str, ...], *keys: str) -> IgnoredKeys:
    """Return the rule for keys that only environments of these types read."""
    listed = " or ".join(names)
    return IgnoredKeys(
        keys,
        lambda environment, sizes: environment.type not in names,
        f"`type` is not {listed}",
        f"remove it, or write `type: {listed}`",
        because=("type",),
    )


class TextEnvironmentConfig(ConfigModel):
    """The environment that `run: env_agent` plays."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        _only_of_type(("openenv",), "url", "action_key", "observation_key"),
        _only_of_type(("verifiers",), "name"),
        _only_of_type(("verifiers", "harbor"), "options", "harness"),
        IgnoredKeys(
            ("options",),
            lambda environment, sizes: environment.type == "harbor" and environment.harness is None,
            "they are those of `harness`, and there is none",
            "remove it, or write `harness: terminus-2`",
            because=("type",),
        ),
        _only_of_type(("harbor",), "path", "box_memory_mib", "box_folder"),
    )

    type: Annotated[Text, KnownOrOwn("environment", ENVIRONMENTS)] = Field(
        default="treasure",
        description="Environment: treasure, a small text game; openenv, an OpenEnv server; verifiers, a verifiers"
        " taskset; harbor, tasks with images, each done by `bash` in a box and graded in a fresh one; or"
        " `package.module:name`, a class or function that makes a `TextEnvironment`.",
    )
    url: Text | None = Field(default=None, description="OpenEnv server, as in `http://127.0.0.1:8000`.")
    action_key: Text = Field(
        default="message", description="Key of the server's actions that holds the model's message."
    )
    observation_key: Text | None = Field(
        default=None,
        description="Key of the server's observations that holds the text for the model. Default: their only text, or"
        " the whole observation as JSON.",
    )
    name: Text | None = Field(default=None, description="Taskset of verifiers, such as `textarena`.")
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Options of the taskset, such as `{game: Wordle-v0}`; for harbor, of the agent that `harness` is.",
    )
    harness: Text | None = Field(
        default=None,
        description="Name of the verifiers harness that runs a task; for harbor, an agent of Harbor such as terminus-2,"
        " or `package.module:Class`. Default: a chat in the agent process, with the tools of the task; for harbor, with"
        " `bash`.",
    )
    path: OptionalPath = Field(
        default=None, description="Folder of tasks in Harbor's format, which `rlinf tasks check` found fit."
    )
    box_memory_mib: Annotated[int, Field(ge=64)] | None = Field(
        default=None,
        description="Memory for all boxes of a node together, in MiB. Default: half of the node's memory.",
    )
    box_folder: OptionalPath = Field(
        default=None,
        description="Folder of boxes and images on each node: on a disk, not on a network file system or the root of a"
        " container. Default: ~/.rlinf/boxes.",
    )
