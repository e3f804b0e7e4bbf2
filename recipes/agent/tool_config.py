"""Sections for external services of agents: MCP servers and third-party environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import BeforeValidator, Field

from recipes.sections.values import KnownOrOwn, one_or_many
from rlinf_core import ConfigModel, Count
from rlinf_core.config.model import NoOptions, Variant, kind_of_section, one_of
from rlinf_core.config.sections.values import DataPath, OptionalPath
from rlinf_core.scalars import Text


class SearchOptions(ConfigModel):
    """Options of the tool `search`."""

    corpus_path: OptionalPath = Field(
        default=None,
        description="Text file of documents, one per line. Default: the facts of `data.type: lookups`.",
    )
    search_results: Count = Field(default=1, description="Number of documents that a search returns.")


class PythonOptions(ConfigModel):
    """Options of the tool `python`."""

    python_memory_mib: Annotated[int, Field(ge=64)] = Field(
        default=256, description="Memory limit of each process of a program, in MiB."
    )


TOOL_OPTIONS: Final[Mapping[str, type[ConfigModel]]] = {"search": SearchOptions, "python": PythonOptions}


class ToolOptions(SearchOptions, PythonOptions):
    """The options of all tools."""


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


class OpenEnvOptions(ConfigModel):
    """Options of `type: openenv`."""

    url: Text = Field(description="OpenEnv server.", examples=["http://127.0.0.1:8000"])
    action_key: Text = Field(
        default="message", description="Key of the server's actions that holds the model's message."
    )
    observation_key: Text | None = Field(
        default=None,
        description="Key of the server's observations that holds the text for the model. Default: their only text, or"
        " the whole observation as JSON.",
    )


class VerifiersOptions(ConfigModel, extra="allow"):
    """Options of `type: verifiers`, beside those of the taskset itself, such as `game: Wordle-v0`."""

    taskset: Text = Field(description="Taskset of verifiers.", examples=["textarena"])
    harness: Text | None = Field(
        default=None,
        description="Name of the verifiers harness that runs a task. Default: a chat in the agent process, with the"
        " tools of the task.",
    )

    @property
    def taskset_options(self) -> dict[str, Any]:
        """The options of the taskset itself."""
        return self.model_extra or {}


class HarborOptions(ConfigModel, extra="allow"):
    """Options of `type: harbor`, beside those of the agent that `harness` is."""

    path: DataPath = Field(
        description="Folder of tasks in Harbor's format, which `rlinf tasks check` found fit.", examples=["tasks"]
    )
    harness: Text | None = Field(
        default=None,
        description="Agent of Harbor that does the tasks, such as terminus-2, or `package.module:Class`. Default: a"
        " chat in the agent process, with `bash`.",
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

    @property
    def agent_options(self) -> dict[str, Any]:
        """The options of the agent that `harness` is."""
        return self.model_extra or {}


EnvironmentOptions: TypeAlias = NoOptions | OpenEnvOptions | VerifiersOptions | HarborOptions
ENVIRONMENT_OPTIONS: Final[Mapping[str, type[EnvironmentOptions]]] = {
    "treasure": NoOptions,
    "openenv": OpenEnvOptions,
    "verifiers": VerifiersOptions,
    "harbor": HarborOptions,
}


class TextEnvironmentConfig(Variant):
    """The environment that `run: env_agent` plays."""

    chosen_by: ClassVar[str] = "type"

    type: Annotated[Text, KnownOrOwn("environment", tuple(ENVIRONMENT_OPTIONS))] = Field(
        default="treasure",
        description="Environment: treasure, a small text game; openenv, an OpenEnv server; verifiers, a verifiers"
        " taskset; harbor, tasks with images, each done by `bash` in a box and graded in a fresh one; or"
        " `package.module:name`, a class or function that makes a `TextEnvironment`.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="The keys of this type alone (docs/agents.md); of `verifiers` those of the taskset, too, of"
        " `harbor` those of the agent that `harness` is.",
    )

    @property
    def settings(self) -> EnvironmentOptions:
        """The options, defaults included."""
        return ENVIRONMENT_OPTIONS.get(self.type, NoOptions).model_validate(self.options)


TEXT_ENVIRONMENTS: Final = (
    *(kind_of_section(TextEnvironmentConfig, (name,), options) for name, options in ENVIRONMENT_OPTIONS.items()),
    kind_of_section(TextEnvironmentConfig, (), NoOptions, form="[^:]*:.*", others=("package.module:name",)),
)
if TYPE_CHECKING:
    TextEnvironmentKind: TypeAlias = TextEnvironmentConfig
else:
    TextEnvironmentKind = one_of(TEXT_ENVIRONMENTS)
