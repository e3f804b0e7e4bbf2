"""Task folders of Harbor: task.toml, instruction.md, environment/, tests/ and solution/."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.agent.boxes.image_store import folder_digest
from rlinf_core import ConfigError
from rlinf_core.config.validating.validation_messages import refusals
from rlinf_core.suggest import did_you_mean

TOML, INSTRUCTION, TESTS, SOLUTION = "task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh"
_FIRST: Final = "task.yaml"
# What `rlinf tasks check` writes beside tasks.
RECORD: Final = "checked.json"
HARBOR_HELP: Final = (
    "install it with rlinf in an interpreter of the agents' own, Python 3.12 or newer, and name that by"
    " `python_interpreter_path` (docs/agents/tasks-with-images.md)"
)
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("source", "healthcheck", "gpu_types", "skills_dir", "allowed_hosts", "environment_mode", "collect"),
        *("agent.network_mode", "verifier.network_mode", "verifier.environment", "multi_step_reward_strategy"),
    )
)
_ENTRYPOINT: Final = re.compile(rb"^\s*ENTRYPOINT\s", re.MULTILINE | re.IGNORECASE)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])i?B?", re.IGNORECASE)
_UNITS: Final = {"K": 2**-10, "M": 1.0, "G": 2.0**10}
_Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# More than any machine has, and than the kernel can represent.
_MOST_MIB: Final = 2**40
_Mib = Annotated[float, Field(gt=0, le=_MOST_MIB)]
_Variables = dict[str, str | int | float | bool]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Environment(_Section):
    docker_image: str | None = None
    workdir: str | None = None
    cpus: _Amount | None = None
    memory_mb: _Mib = 2048
    storage_mb: _Mib = 10240
    # Fields of earlier versions of the format.
    memory: str | None = None
    storage: str | None = None
    build_timeout_sec: _Amount = 600
    network_mode: str | None = None
    allow_internet: bool = False
    gpus: int = 0
    mcp_servers: list[Any] = []
    os: str = "linux"
    env: _Variables = {}


class _Part(_Section):
    timeout_sec: _Amount = 600
    user: str | int = ""
    env: _Variables = {}


class _Solution(_Section):
    env: _Variables = {}


class _Toml(_Section):
    schema_version: Any = None
    version: Any = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    solution: _Solution = _Solution()
    environment: _Environment = _Environment()
    agent: _Part = _Part()
    verifier: _Part = _Part()
    artifacts: list[str | dict[str, Any]] = []
    steps: list[Any] = []


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task.

    Attributes:
        digest: a digest of its files.
        docker_image: the name of its image; None: its Dockerfile's.
        workdir: the working folder; None: that of its image.
        memory_mib, storage_mib, cpus: the limits of its box; `cpus` 0: all.
        build_seconds, agent_seconds, verifier_seconds: the time limits.
        agent_user, verifier_user: the users in the box; "": the image's user.
        env, verifier_env, solution_env: the variables of all commands, and those of the tests and of the solution.
        artifacts: the absolute paths that the tests need besides the work folder.
        notes: remarks on settings in task.toml that have no effect or are unknown.
    """

    name: str
    path: Path
    digest: str
    instruction: str
    docker_image: str | None
    workdir: str | None
    memory_mib: int
    storage_mib: int
    cpus: float
    build_seconds: float
    agent_seconds: float
    verifier_seconds: float
    agent_user: str
    verifier_user: str
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    artifacts: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def environment(self) -> Path:
        """The folder of its Dockerfile."""
        return self.path / "environment"

    @property
    def has_solution(self) -> bool:
        """Whether it comes with a solution."""
        return (self.path / SOLUTION).is_file()


def find_tasks(path: Path) -> list[Path]:
    """Return the folders of tasks: a task itself, or the tasks below a folder, by name.

    Raises:
        ConfigError: the folder does not exist, or has no tasks.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no folder `{path}`")
    for pattern in (TOML, f"*/{TOML}", f"*/*/{TOML}"):
        if folders := sorted(file.parent for file in path.glob(pattern)):
            return folders
    why, help = f"there is no `{TOML}` in it, or in the folders below it", None
    if any(next(path.glob(pattern), None) for pattern in (_FIRST, f"*/{_FIRST}", f"*/*/{_FIRST}")):
        why = f"there are files `{_FIRST}`, of the first format of Terminal-Bench, and none named `{TOML}`"
        help = "where Harbor is installed, `harbor task migrate --help` says how to convert them"
    raise ConfigError(f"`{path}` has no tasks", why=why, help=help)


def memory_of(path: Path) -> int:
    """Return the memory of a task's box in MiB; only its task.toml is read.

    Raises:
        ConfigError: task.toml is missing or cannot be read.
    """
    environment = _read_toml(path).environment
    return _mib(path / TOML, environment.memory, environment.memory_mb)


def _read_toml(path: Path) -> _Toml:
    try:
        return _Toml.model_validate(tomllib.loads((path / TOML).read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(f"{path / TOML}: {refusals(error)[0]}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the task `{path.name}` cannot be read", why=str(error)) from None


def read_task(path: Path) -> TaskFolder:
    """Read a task folder.

    Raises:
        ConfigError: a file is missing or cannot be read, or the task needs something that boxes lack.
    """
    where, toml = path / TOML, _read_toml(path)
    # Tasks of several steps, or for Windows, have other files.
    _refuse_unsupported(path, toml)
    for name in (INSTRUCTION, TESTS):
        if not (path / name).is_file():
            raise ConfigError(f"the task `{path.name}` has no `{name}`")
    try:
        instruction = (path / INSTRUCTION).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the task `{path.name}` cannot be read", why=str(error)) from None
    environment, agent, verifier = toml.environment, toml.agent, toml.verifier
    if not instruction:
        raise ConfigError(f"the task `{path.name}` has an empty `{INSTRUCTION}`")
    sources = [item if isinstance(item, str) else str(item.get("source", "")) for item in toml.artifacts]
    artifacts = tuple(_absolute(where, source) for source in sources)
    if "/" in artifacts:
        raise ConfigError(f"{where}: the artifact `/` would give the tests the agent's own programs", help="name files")
    return TaskFolder(
        name=str(toml.task.get("name") or path.name),
        path=path,
        digest=folder_digest(path, without=RECORD),
        instruction=instruction,
        docker_image=environment.docker_image,
        workdir=_absolute(where, environment.workdir) if environment.workdir else None,
        memory_mib=_mib(where, environment.memory, environment.memory_mb),
        storage_mib=_mib(where, environment.storage, environment.storage_mb),
        cpus=environment.cpus or 0.0,
        build_seconds=environment.build_timeout_sec,
        agent_seconds=agent.timeout_sec,
        verifier_seconds=verifier.timeout_sec,
        agent_user=str(agent.user),
        verifier_user=str(verifier.user),
        env=_variables(where, "environment", environment.env),
        verifier_env=_variables(where, "verifier", verifier.env),
        solution_env=_variables(where, "solution", toml.solution.env),
        artifacts=artifacts,
        notes=tuple(_notes(toml, path / "environment/Dockerfile")),
    )


def _refuse_unsupported(path: Path, toml: _Toml) -> None:
    environment = toml.environment
    compose = next((name for name in _COMPOSE if (path / "environment" / name).exists()), "")
    reasons = (
        (bool(toml.steps), "has several steps (`[[steps]]`)"),
        (bool(compose), f"is run by compose (`environment/{compose}`)"),
        (environment.gpus > 0, "needs GPUs (`environment.gpus`)"),
        ("tpu" in (environment.model_extra or {}), "needs a TPU (`environment.tpu`)"),
        (environment.network_mode == "allowlist", "needs some hosts of the internet (`environment.network_mode`)"),
        (bool(environment.mcp_servers), "needs MCP servers (`environment.mcp_servers`)"),
        (environment.os.lower() != "linux", "is not for Linux (`environment.os`)"),
    )
    for holds, what in reasons:
        if holds:
            raise ConfigError(f"the task `{path.name}` {what}, which boxes do not have", where=str(path / TOML))


def _absolute(where: Path, path: str) -> str:
    """Return an absolute path in its shortest form, in which grading compares paths."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts:
        raise ConfigError(f"{where}: `{path}` is no absolute path")
    return "/" + "/".join(parts)


def _mib(where: Path, text: str | None, mib: float) -> int:
    """Return a size in MiB: `memory_mb = 512`, or `memory = "2G"` of earlier versions."""
    if text is None:
        return math.ceil(mib)
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].upper()] if match is not None else 0.0
    if not 0 < size <= _MOST_MIB:
        raise ConfigError(f"{where}: `{text}` is no size", help='write it as "2G"')
    return math.ceil(size)


def _variables(where: Path, section: str, env: _Variables) -> dict[str, str]:
    for name, value in env.items():
        if "${" in str(value):
            raise ConfigError(
                f"{where}: `{section}.env.{name}` asks for a variable of this machine, which no box is given"
            )
    return {name: str(value) for name, value in env.items()}


def _notes(toml: _Toml, dockerfile: Path) -> Iterator[str]:
    """Yield remarks on settings that have no effect, and on unknown ones."""
    sections = {"": toml, "environment.": toml.environment, "agent.": toml.agent, "verifier.": toml.verifier}
    for prefix, section in sections.items():
        for key in section.model_extra or {}:
            if key in _WITHOUT_EFFECT or f"{prefix}{key}" in _WITHOUT_EFFECT:
                yield f"`{prefix}{key}` changes nothing here"
            else:
                near = did_you_mean(key, list(type(section).model_fields))
                yield f"`{prefix}{key}` is not known" + (f": {near}" if near else "")
    if toml.environment.network_mode == "public" or toml.environment.allow_internet:
        yield "it asks for the internet, and a box has no network"
    if dockerfile.is_file() and _ENTRYPOINT.search(dockerfile.read_bytes()):
        yield "the `ENTRYPOINT` of its Dockerfile does not run: commands start alone"
