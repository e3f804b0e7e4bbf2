"""Task folders of Harbor: task.toml, instruction.md, environment/, tests/ and solution/."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from recipes.agent.images.store import folder_digest
from rlinf_core import ConfigError
from rlinf_core.suggest import did_you_mean

TOML, INSTRUCTION, TESTS, SOLUTION = "task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh"
# What `rlinf tasks check` writes beside tasks.
RECORD: Final = "checked.json"
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
# Keys of task.toml by section: those that are read, and those that change nothing here.
_READ: Final = {
    "": ("schema_version", "version", "task", "metadata", "agent", "verifier", "environment", "solution", "artifacts"),
    "agent": ("timeout_sec", "user"),
    "verifier": ("timeout_sec", "user", "env"),
    "environment": (
        *("docker_image", "workdir", "cpus", "memory_mb", "storage_mb", "build_timeout_sec", "network_mode"),
        *("gpus", "env", "memory", "storage", "allow_internet", "mcp_servers"),
    ),
}
_WITHOUT_EFFECT: Final = {
    "": ("source", "multi_step_reward_strategy"),
    "agent": ("network_mode", "allowed_hosts"),
    "verifier": ("environment_mode", "network_mode", "allowed_hosts", "collect", "environment"),
    "environment": ("healthcheck", "gpu_types", "skills_dir", "os", "allowed_hosts"),
}
_UNITS: Final = {"K": 2**-10, "M": 1.0, "G": 2.0**10}


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task.

    Attributes:
        digest: changes with each of its files.
        docker_image: the image that it names; None: its Dockerfile.
        workdir: None: that of its image.
        memory_mib, storage_mib, cpus: limits of its box; `cpus` 0: all.
        build_seconds, agent_seconds, verifier_seconds: limits.
        agent_user, verifier_user: users of the box; "": that of its image, and root.
        env, verifier_env: variables of all commands, and of the tests.
        artifacts: absolute paths besides the work folder that the tests need.
        notes: what of task.toml changes nothing here.
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
    """Return the folders of tasks: a task itself, or those below a folder, by name.

    Raises:
        ConfigError: there are none.
    """
    if (path / TOML).is_file():
        return [path]
    folders = sorted(file.parent for file in path.glob(f"*/{TOML}")) or sorted(
        file.parent for file in path.glob(f"*/*/{TOML}")
    )
    if not folders:
        raise ConfigError(f"`{path}` has no tasks", why=f"there is no `{TOML}` in it, or in the folders below it")
    return folders


def read_task(path: Path) -> TaskFolder:
    """Read a task folder.

    Raises:
        ConfigError: a file is missing or cannot be read, or the task needs what boxes do not have.
    """
    where = path / TOML
    try:
        data = tomllib.loads(where.read_text(encoding="utf-8"))
        instruction = (path / INSTRUCTION).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the task `{path.name}` cannot be read", why=str(error)) from None
    if not (path / TESTS).is_file():
        raise ConfigError(f"the task `{path.name}` has no `{TESTS}`")
    reader = _Reader(where, data)
    _refuse_unsupported(path, reader)
    environment, agent, verifier = (reader.section(name) for name in ("environment", "agent", "verifier"))
    task = reader.section("task")
    read = TaskFolder(
        name=str(task.get("name") or path.name),
        path=path,
        digest=folder_digest(path, without=RECORD),
        instruction=instruction,
        docker_image=reader.text(environment, "environment", "docker_image") or None,
        workdir=reader.text(environment, "environment", "workdir") or None,
        memory_mib=_mib(reader, environment, "memory", 2048),
        storage_mib=_mib(reader, environment, "storage", 10240),
        cpus=reader.number(environment, "environment", "cpus", 0.0),
        build_seconds=reader.number(environment, "environment", "build_timeout_sec", 600.0),
        agent_seconds=reader.number(agent, "agent", "timeout_sec", 600.0),
        verifier_seconds=reader.number(verifier, "verifier", "timeout_sec", 600.0),
        agent_user=reader.text(agent, "agent", "user"),
        verifier_user=reader.text(verifier, "verifier", "user"),
        env=reader.variables(environment, "environment"),
        verifier_env=reader.variables(verifier, "verifier"),
        artifacts=reader.artifacts(),
        notes=reader.notes(),
    )
    for name, folder in (("workdir", read.workdir), *(("artifacts", place) for place in read.artifacts)):
        if folder is not None and (not folder.startswith("/") or ".." in folder.split("/")):
            raise ConfigError(f"{where}: `{name}` is no absolute path: `{folder}`")
    return read


def _refuse_unsupported(path: Path, reader: _Reader) -> None:
    environment = reader.section("environment")
    reasons = (
        ("steps" in reader.data, "has several steps (`[[steps]]`)"),
        (any((path / "environment" / name).exists() for name in _COMPOSE), "has several containers (compose)"),
        (bool(environment.get("gpus")), "needs GPUs (`gpus`)"),
        (environment.get("network_mode") == "allowlist", "needs some hosts of the internet (`allowlist`)"),
        (bool(environment.get("mcp_servers")), "needs MCP servers (`mcp_servers`)"),
        (str(environment.get("os", "linux")).lower() != "linux", "is not for Linux (`os`)"),
    )
    for holds, what in reasons:
        if holds:
            raise ConfigError(f"the task `{path.name}` {what}, which boxes do not have", where=str(path / TOML))


def _mib(reader: _Reader, section: Mapping[str, Any], name: str, default: int) -> int:
    """Return a size: `memory_mb = 512`, or `memory = "2G"` of earlier versions."""
    text = section.get(name)
    if text is None:
        return math.ceil(reader.number(section, "environment", f"{name}_mb", float(default)))
    unit = str(text).strip().upper().removesuffix("B").removesuffix("I")
    try:
        return math.ceil(float(unit[:-1]) * _UNITS[unit[-1]])
    except (ValueError, KeyError, IndexError):
        raise ConfigError(f'{reader.where}: `{name} = "{text}"` is no size', help='write it as "2G"') from None


class _Reader:
    """Takes values of task.toml, each of its type."""

    def __init__(self, where: Path, data: dict[str, Any]) -> None:
        self.where, self.data = where, data

    def section(self, name: str) -> dict[str, Any]:
        value = self.data.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: `{name}` is no section")
        return cast("dict[str, Any]", value)

    def number(self, section: Mapping[str, Any], name: str, key: str, default: float) -> float:
        value = section.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            if value == default:
                return default
            raise ConfigError(f"{self.where}: `{name}.{key}` is no positive number: {value!r}")
        return float(value)

    def text(self, section: Mapping[str, Any], name: str, key: str) -> str:
        value = section.get(key, "")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{self.where}: `{name}.{key}` is no text: {value!r}")
        return str(value)

    def variables(self, section: Mapping[str, Any], name: str) -> dict[str, str]:
        value = section.get("env", {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: `{name}.env` is no table of variables")
        variables = {key: str(text) for key, text in cast("dict[str, object]", value).items()}
        for key, text in variables.items():
            if "${" in text:
                raise ConfigError(
                    f"{self.where}: `{name}.env.{key}` asks for a variable of this machine, which no box is given"
                )
        return variables

    def artifacts(self) -> tuple[str, ...]:
        listed: object = self.data.get("artifacts", [])
        if not isinstance(listed, list):
            raise ConfigError(f"{self.where}: `artifacts` is no list")
        items = cast("list[object]", listed)
        return tuple(
            str(cast("dict[str, object]", item).get("source", "")) if isinstance(item, dict) else str(item)
            for item in items
        )

    def notes(self) -> tuple[str, ...]:
        """Return what changes nothing here, and what is not known."""
        notes: list[str] = []
        for name, known in _READ.items():
            section = self.data if not name else self.section(name)
            for key in section:
                place = f"{name}.{key}".lstrip(".")
                if key in _WITHOUT_EFFECT[name]:
                    notes.append(f"`{place}` changes nothing here")
                elif key not in known:
                    near = did_you_mean(key, known)
                    notes.append(f"`{place}` is not known" + (f": {near}" if near else ""))
        environment = self.section("environment")
        if environment.get("network_mode") == "public" or environment.get("allow_internet") is True:
            notes.append("it asks for the internet, and a box has no network")
        return tuple(notes)
