"""Sections for external services of agents: MCP servers and third-party environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import BeforeValidator, Field

from recipes.sections.values import KnownOrOwn, one_or_many
from rlinf_core import ConfigModel, Count, IgnoredKeys
from rlinf_core.config.model import Variant, kind_of_section, one_of
from rlinf_core.config.sections.values import DataPath, OptionalPath
from rlinf_core.scalars import Text

ENVIRONMENTS: Final = ("treasure", "openenv", "verifiers", "harbor")


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


class TextEnvironmentConfig(Variant):
    """The environment that `run: env_agent` plays."""

    chosen_by: ClassVar[str] = "type"

    type: Annotated[Text, KnownOrOwn("environment", ENVIRONMENTS)] = Field(
        default="treasure",
        description="Environment: treasure, a small text game; openenv, an OpenEnv server; verifiers, a verifiers"
        " taskset; harbor, tasks with images, each done by `bash` in a box and graded in a fresh one; or"
        " `package.module:name`, a class or function that makes a `TextEnvironment`.",
    )


class OpenEnvKeys(ConfigModel):
    """The keys of `type: openenv`."""

    url: Text = Field(description="OpenEnv server.", examples=["http://127.0.0.1:8000"])
    action_key: Text = Field(
        default="message", description="Key of the server's actions that holds the model's message."
    )
    observation_key: Text | None = Field(
        default=None,
        description="Key of the server's observations that holds the text for the model. Default: their only text, or"
        " the whole observation as JSON.",
    )


class VerifiersKeys(ConfigModel):
    """The keys of `type: verifiers`."""

    name: Text = Field(description="Taskset of verifiers.", examples=["textarena"])
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Options of the taskset, such as `{game: Wordle-v0}`."
    )
    harness: Text | None = Field(
        default=None,
        description="Name of the verifiers harness that runs a task. Default: a chat in the agent process, with the"
        " tools of the task.",
    )


class HarborKeys(ConfigModel):
    """The keys of `type: harbor`."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("options",),
            lambda environment, sizes: environment.harness is None,
            "they are those of `harness`, and there is none",
            "remove it, or write `harness: terminus-2`",
            because=("type",),
        ),
    )

    path: DataPath = Field(
        description="Folder of tasks in Harbor's format, which `rlinf tasks check` found fit.", examples=["tasks"]
    )
    harness: Text | None = Field(
        default=None,
        description="Agent of Harbor that does the tasks, such as terminus-2, or `package.module:Class`. Default: a"
        " chat in the agent process, with `bash`.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Options of the agent that `harness` is."
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


_KEYS: Final[Mapping[str, tuple[type[ConfigModel], ...]]] = {
    "treasure": (),
    "openenv": (OpenEnvKeys,),
    "verifiers": (VerifiersKeys,),
    "harbor": (HarborKeys,),
}
TEXT_ENVIRONMENTS: Final = (
    *(kind_of_section(TextEnvironmentConfig, (name,), None, mixins=keys) for name, keys in _KEYS.items()),
    kind_of_section(TextEnvironmentConfig, (), None, form="[^:]*:.*", others=("package.module:name",)),
)
if TYPE_CHECKING:
    TextEnvironmentKind: TypeAlias = TextEnvironmentConfig
else:
    TextEnvironmentKind = one_of(TEXT_ENVIRONMENTS)
