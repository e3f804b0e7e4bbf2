"""The parts of a bundle of evidence, by the names of their files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_core.cluster import engine
from rlinf_core.cluster.ray_api import session_folder
from rlinf_core.config.secrets import mask_text
from rlinf_core.foreign.files import check_regular, open_regular
from rlinf_core.manager.manager_client import current_client
from rlinf_core.manager.manager_messages import JobSnapshot
from rlinf_core.node.control_group import own_group
from rlinf_core.node.kernel_log import kernel_lines
from rlinf_core.process import proc
from rlinf_core.process.known_secrets import hidden
from rlinf_core.process.proc import MARK, processes_of, tail
from rlinf_core.runners.storage.evidence import FailedProcess
from rlinf_core.version import __version__

Parts = Iterator[tuple[str, str]]

_TAIL_BYTES: Final = 64 << 10
_MOST_FILES: Final = 200
_MOST_PROCESSES: Final = 500
_PID: Final = re.compile(r"\bpid (\d+)")
_PACKAGES: Final = ("ray", "torch", "numpy", "pydantic", "transformers", "vllm", "gymnasium")
_RAY_LOGS: Final = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "log_monitor.log", "monitor.log")
_STATUS_FIELDS: Final = ("State", "PPid", "VmHWM", "VmRSS", "RssShmem", "VmSwap", "Threads")
_MACHINE_FIELDS: Final = ("MemTotal", "MemAvailable", "Shmem", "SwapTotal", "SwapFree")


class FailureScene(NamedTuple):
    """The start of a collection.

    Attributes:
        run: the run folder.
        failures: root causes first.
        snapshot: the processes of the job, or None where its manager does not answer.
    """

    run: Path
    failures: Sequence[FailedProcess]
    snapshot: JobSnapshot | None

    @property
    def pids(self) -> list[int]:
        """The processes of the job, living or dead, on any machine."""
        peers = self.snapshot.peers.values() if self.snapshot is not None else ()
        named = _PID.findall("\n".join(failure.place or "" for failure in self.failures))
        return sorted({os.getpid(), *(peer.info.pid for peer in peers), *map(int, named)})


def snapshot() -> JobSnapshot | None:
    """Return what the job's processes do, with their stacks; None without a manager that answers."""
    client = current_client()
    if client is None or client.lost_manager() is not None:
        return None
    return client.snapshot(stacks=True)


def masked(value: Any) -> Any:
    """Return a value of JSON with stars for secret values in its texts."""
    if isinstance(value, str):
        return hidden(mask_text(value))
    if isinstance(value, Mapping):
        return {str(name): masked(inner) for name, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [masked(inner) for inner in cast("Sequence[Any]", value)]
    return value


def json_of(value: Any) -> str:
    """Return JSON, with stars for secret values."""
    return json.dumps(masked(value), indent=1, ensure_ascii=False, default=str) + "\n"


def waits(scene: FailureScene) -> Parts:
    """Yield the graph of who waits for whom, the stacks, what processes did before, and what is in flight in
    channels."""
    job = scene.snapshot
    if job is None:
        return
    processes = [
        {
            "name": name,
            "node": hello.node,
            "pid": hello.info.pid,
            "device": hello.device,
            "answered": (answer := job.answers.get(name)) is not None,
            "running": answer is not None and answer.publication.running,
            "waits": []
            if answer is None
            else [
                {
                    "kind": str(published.operation.kind),
                    "target": published.operation.target,
                    "key": published.operation.key,
                    "peers": list(published.operation.peers),
                    "seconds": round(published.age, 3),
                    "detached": published.operation.detached,
                }
                for published in answer.publication.operations
            ],
        }
        for name, hello in job.peers.items()
    ]
    yield "waits.json", json_of({"processes": processes, "dead": dict(job.dead)})
    channels = {name: view for answer in job.answers.values() for name, view in answer.channels.items()}
    in_flight = {
        name: {
            "depths": dict(view.depths),
            "maxsize": view.maxsize,
            "producers": list(view.producers),
            "consumers": list(view.consumers),
        }
        for name, view in channels.items()
    }
    yield "in_flight.json", json_of({"channels": in_flight})
    stacks = [f"== {name}\n{answer.stacks}\n" for name, answer in job.answers.items() if answer.stacks]
    yield "stacks.txt", masked("\n".join(stacks))
    recent = [f"== {name}\n{answer.recent}\n" for name, answer in job.answers.items() if answer.recent]
    yield "recent.txt", masked("\n".join(recent))


def memory(scene: FailureScene) -> Parts:
    """Yield the memory of this machine's processes, of its control group, and of /dev/shm."""
    shared = os.statvfs("/dev/shm")
    group = own_group()
    content = {
        "processes": [_status(pid) for pid in _local_pids(scene)[:_MOST_PROCESSES]],
        "control_group": None if group is None else group._asdict(),
        "dev_shm": {"bytes": shared.f_blocks * shared.f_frsize, "free": shared.f_bavail * shared.f_frsize},
        "machine": _fields("/proc/meminfo", _MACHINE_FIELDS),
    }
    yield "memory.json", json_of(content)


def run_logs(scene: FailureScene) -> Parts:
    """Yield the ends of the logs of the run, those of what failed first."""
    paths = sorted((scene.run / "logs").glob("*/rank_*.log"))
    first = [f"{failure.component}/rank_{failure.rank}.log" for failure in scene.failures]
    paths.sort(key=lambda path: f"{path.parent.name}/{path.name}" not in first)
    for path in paths[:_MOST_FILES]:
        yield from _tail(path, f"logs/{path.parent.name}-{path.name}")


def ray_logs(scene: FailureScene) -> Parts:
    """Yield the ends of the logs of Ray's own processes, and of its files about the processes that died."""
    if engine.current() is None:
        return
    folder = Path(session_folder()) / "logs"
    dead = [pid for failure in scene.failures if failure.died for pid in _PID.findall(failure.place or "")]
    names = [*_RAY_LOGS, *(path.name for pid in dead for path in folder.glob(f"*{pid}*"))]
    for name in names[:_MOST_FILES]:
        yield from _tail(folder / name, f"ray/{name}")


def kernel(scene: FailureScene) -> Parts:
    """Yield the kernel's lines about the processes of the job."""
    lines = kernel_lines(scene.pids)
    if lines:
        yield "kernel.txt", masked("\n".join(lines) + "\n")


def versions(scene: FailureScene) -> Parts:
    """Yield the versions of what runs the job; `environment.json` of the run has all packages."""
    numbers = {"rlinf": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "versions.json", json_of(numbers)


def config(scene: FailureScene) -> Parts:
    """Yield the configuration, whose secrets are masked."""
    with open_regular(scene.run / "config.yaml") as file:
        yield "config.yaml", masked(file.read(_TAIL_BYTES * 4).decode("utf-8", "replace"))


# The most informative comes first: a bundle has a limit.
ALL: Final[Sequence[Callable[[FailureScene], Parts]]] = (waits, memory, kernel, versions, config, run_logs, ray_logs)


def _tail(path: Path, name: str) -> Parts:
    try:
        check_regular(path)
    except OSError:
        return
    text = tail(path, _TAIL_BYTES)
    if text.strip():
        yield name, masked(text)


def _local_pids(scene: FailureScene) -> list[int]:
    running = engine.current()
    folder = str(running.folder) if running is not None and running.folder is not None else ""
    owner = os.environ.get(MARK, folder)
    own = processes_of(owner, folder) if owner and folder else []
    return sorted({os.getpid(), *own})


def _status(pid: int) -> dict[str, Any]:
    return {
        "pid": pid,
        "command": proc.spell_command(pid)[:200],
        "waits_in": proc.read(f"/proc/{pid}/wchan").decode("ascii", "replace"),
        **_fields(f"/proc/{pid}/status", _STATUS_FIELDS),
    }


def _fields(path: str, names: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in proc.fields(path).items() if name in names}
