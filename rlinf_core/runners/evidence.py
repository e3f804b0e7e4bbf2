"""Evidence of a failure: one bundle in the run folder, written atomically; bundles are bounded in size and number."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_core.cluster import engine
from rlinf_core.cluster.ray_api import session_folder
from rlinf_core.config.secrets import environment_secrets, mask_text
from rlinf_core.errors import RLinfError, WorkerDiedError
from rlinf_core.failures import text_of
from rlinf_core.foreign.files import check_regular, make_folder, open_regular
from rlinf_core.node.process_life import kernel_lines, own_group
from rlinf_core.process import proc
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.process.proc import MARK, processes_of, tail
from rlinf_core.runners.recovery import Failure, failures_of, position, reason_of
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_events import (
    EVIDENCE,
    EVIDENCE_SCHEMA,
    FAILURE,
    MOST_BUNDLE_BYTES,
    MOST_BUNDLES,
    MOST_FILE_BYTES,
    EvidenceFile,
    FailedProcess,
    bundle_folders,
)
from rlinf_core.suggest import encodable
from rlinf_core.supervision.client import current_client
from rlinf_core.supervision.job_view import JobSnapshot
from rlinf_core.version import __version__

Parts = Iterator[tuple[str, str]]

LOGGER = logging.getLogger("rlinf")
# The bundles of the first failures are kept: later failures may be due to them.
_FIRST_BUNDLES: Final = 2
_MOST_TEXT: Final = 64 << 10
_MOST_FAILURES: Final = 200
# The attribute of an error that holds its bundle's folder, so that an error that is raised on is kept once.
_KEPT: Final = "rlinf_evidence"
_TAIL_BYTES: Final = 64 << 10
_MOST_FILES: Final = 200
_MOST_PROCESSES: Final = 500
_PID: Final = re.compile(r"\bpid (\d+)")
_PACKAGES: Final = ("ray", "torch", "numpy", "pydantic", "transformers", "vllm", "gymnasium")
_RAY_LOGS: Final = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "log_monitor.log", "monitor.log")
_STATUS_FIELDS: Final = ("State", "PPid", "VmHWM", "VmRSS", "RssShmem", "VmSwap", "Threads")
_MACHINE_FIELDS: Final = ("MemTotal", "MemAvailable", "Shmem", "SwapTotal", "SwapFree")


def keep_evidence(
    run: Path, error: BaseException, step: int, components: Mapping[str, str] | None = None
) -> Path | None:
    """Keep evidence of a failure in the run folder `run`; return its folder, also if this error was kept before.

    It takes at most a second if processes are busy. `failure.json` names the parts that could not be collected. It
    raises nothing, since it must not hide the failure.

    Args:
        run: the run folder.
        error: the failure, as raised in the driver.
        step: the last finished step.
        components: the component of each worker group.

    Returns:
        The folder; None if nothing could be written.
    """
    kept = vars(error).get(_KEPT)
    if isinstance(kept, Path):
        return kept
    try:
        folder = _write(run, error, step, components or {})
    except Exception as failure:  # noqa: BLE001 - nothing may hide the error itself
        LOGGER.warning("no evidence of the failure was kept: %s", failure)
        return None
    vars(error)[_KEPT] = folder
    return folder


def evidence_line(folder: Path | None) -> list[str]:
    """Return the line of an event's details that names a folder of evidence; empty without a folder."""
    return [] if folder is None else [f"evidence: {EVIDENCE}/{folder.name}"]


def failed_processes(error: BaseException, components: Mapping[str, str]) -> list[FailedProcess]:
    """Return the records of the failures in an error, root causes first."""
    return [_failed(failure, components) for failure in failures_of(error)[:_MOST_FAILURES]]


def _failed(failure: Failure, components: Mapping[str, str]) -> FailedProcess:
    error = failure.error
    own = isinstance(error, RLinfError)
    end = error.end if isinstance(error, WorkerDiedError) else None
    died = isinstance(error, WorkerDiedError) and error.address == failure.name
    fields: dict[str, Any] = {
        "name": failure.name,
        "component": None if failure.group is None else components.get(failure.group, failure.group),
        "rank": failure.rank,
        "method": failure.method,
        "place": failure.place,
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "bases": [base.__name__ for base in type(error).__mro__[:-1]],
        "code": error.code if own else "",
        "text": _short(text_of(error)),
        "traceback": _short("".join(traceback.format_exception(error))),
        "why": _short(error.why or "") if own else "",
        "help": _short(error.help or "") if own else "",
        "position": position(error) or "",
        "consequence": failure.consequence,
        "died": died,
    }
    if died and end is not None:
        fields |= end._asdict()
    return FailedProcess.model_validate(_masked(fields))


def _write(run: Path, error: BaseException, step: int, components: Mapping[str, str]) -> Path:
    remember(environment_secrets())
    missing: list[str] = []
    try:
        snapshot = _snapshot()
    except RLinfError as failure:
        snapshot = None
        missing.append(f"waits, stacks: {failure.message}")
    scene = FailureScene(run, failed_processes(error, components), snapshot)
    make_folder(run / EVIDENCE)
    name = _free_name(run / EVIDENCE)
    aside = run / EVIDENCE / f".{name}.{os.getpid()}.part"
    aside.mkdir(mode=0o700)
    try:
        left = MOST_BUNDLE_BYTES - MOST_FILE_BYTES
        for file, text in _collected(scene, missing):
            content = text.encode("utf-8", "backslashreplace")[-MOST_FILE_BYTES:]
            if len(content) > left:
                missing.append(f"{file}: the bundle is full")
                continue
            left -= len(content)
            path = aside / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        evidence = EvidenceFile.model_validate(
            {
                "schema": EVIDENCE_SCHEMA,
                "time": time.time(),
                "step": step,
                "what": _masked(reason_of(error)),
                "failures": list(scene.failures),
                "missing": _masked(missing),
            }
        )
        (aside / FAILURE).write_text(evidence.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        durable.sync_tree(aside)
        durable.rename(aside, run / EVIDENCE / name)
    except BaseException:
        durable.remove_tree(aside)
        raise
    for surplus in _surplus(bundle_folders(run)):
        durable.remove_tree(surplus)
    return run / EVIDENCE / name


def _collected(scene: FailureScene, missing: list[str]) -> Iterator[tuple[str, str]]:
    for part in PARTS:
        try:
            yield from part(scene)
        except Exception as failure:  # noqa: BLE001 - Ray, /proc and files of other people raise any error
            missing.append(f"{part.__name__}: {type(failure).__name__}: {failure}")


def _surplus(folders: Sequence[Path]) -> Sequence[Path]:
    """Return the bundles to remove: all except those of the first and the newest failures."""
    return folders[_FIRST_BUNDLES : len(folders) - MOST_BUNDLES + _FIRST_BUNDLES] if len(folders) > MOST_BUNDLES else ()


def _free_name(folder: Path) -> str:
    """Return a name that sorts after all existing names of this second."""
    base = time.strftime("%Y%m%d-%H%M%S")
    numbers = [entry.name.removeprefix(base) for entry in os.scandir(folder) if entry.name.startswith(base)]
    last = max((int(number[1:]) if number[1:].isdigit() else 1 for number in numbers), default=0)
    return f"{base}-{last + 1:03}" if last else base


def _short(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[: _MOST_TEXT // 2]}\n... {len(text) - _MOST_TEXT} characters ...\n{text[-_MOST_TEXT // 2 :]}"


class FailureScene(NamedTuple):
    """The input of a collection of evidence.

    Attributes:
        run: the run folder.
        failures: the failures, root causes first.
        snapshot: the processes of the job; None if its manager does not answer.
    """

    run: Path
    failures: Sequence[FailedProcess]
    snapshot: JobSnapshot | None

    @property
    def pids(self) -> list[int]:
        """The pids of the job's processes, living or dead, on any machine."""
        peers = self.snapshot.peers.values() if self.snapshot is not None else ()
        named = _PID.findall("\n".join(failure.place or "" for failure in self.failures))
        return sorted({os.getpid(), *(peer.info.pid for peer in peers), *map(int, named)})


def _snapshot() -> JobSnapshot | None:
    """Return a snapshot of the job's processes with their stacks; None without a living manager."""
    client = current_client()
    if client is None or client.lost_manager() is not None:
        return None
    return client.snapshot(stacks=True)


def _masked(value: Any) -> Any:
    """Return a JSON value with the secret values in its texts masked."""
    if isinstance(value, str):
        return encodable(hidden(mask_text(value)))
    if isinstance(value, Mapping):
        return {str(name): _masked(inner) for name, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_masked(inner) for inner in cast("Sequence[Any]", value)]
    return value


def _json_of(value: Any) -> str:
    """Return a value as JSON, with secret values masked."""
    return json.dumps(_masked(value), indent=1, ensure_ascii=False, default=str) + "\n"


def waits(scene: FailureScene) -> Parts:
    """Yield the waits of processes, their stacks and recent operations, and the contents of channels."""
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
                    "kind": str(operation.kind),
                    "target": operation.target,
                    "key": operation.key,
                    "peers": list(operation.peers),
                    "seconds": round(operation.age, 3),
                    "detached": operation.detached,
                }
                for operation in answer.publication.operations
            ],
        }
        for name, hello in job.peers.items()
    ]
    yield "waits.json", _json_of({"processes": processes, "dead": dict(job.dead)})
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
    yield "in_flight.json", _json_of({"channels": in_flight})
    stacks = [f"== {name}\n{answer.stacks}\n" for name, answer in job.answers.items() if answer.stacks]
    yield "stacks.txt", _masked("\n".join(stacks))
    recent = [f"== {name}\n{answer.recent}\n" for name, answer in job.answers.items() if answer.recent]
    yield "recent.txt", _masked("\n".join(recent))


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
    yield "memory.json", _json_of(content)


def run_logs(scene: FailureScene) -> Parts:
    """Yield the ends of the run's logs, those of failed processes first."""
    paths = sorted((scene.run / "logs").glob("*/rank_*.log"))
    first = [f"{failure.component}/rank_{failure.rank}.log" for failure in scene.failures]
    paths.sort(key=lambda path: f"{path.parent.name}/{path.name}" not in first)
    for path in paths[:_MOST_FILES]:
        yield from _tail(path, f"logs/{path.parent.name}-{path.name}")


def ray_logs(scene: FailureScene) -> Parts:
    """Yield the ends of the logs of Ray's own processes, and of Ray's files about dead processes."""
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
        yield "kernel.txt", _masked("\n".join(lines) + "\n")


def versions(scene: FailureScene) -> Parts:
    """Yield the versions of rlinf, Python, kernel and main packages; the run's `environment.json` has all packages."""
    numbers = {"rlinf": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "versions.json", _json_of(numbers)


def config(scene: FailureScene) -> Parts:
    """Yield the configuration, with secrets masked."""
    with open_regular(scene.run / "config.yaml") as file:
        yield "config.yaml", _masked(file.read(_TAIL_BYTES * 4).decode("utf-8", "replace"))


# The most informative parts come first, since the size of a bundle is limited.
PARTS: Final[Sequence[Callable[[FailureScene], Parts]]] = (waits, memory, kernel, versions, config, run_logs, ray_logs)


def _tail(path: Path, name: str) -> Parts:
    try:
        check_regular(path)
    except OSError:
        return
    text = tail(path, _TAIL_BYTES)
    if text.strip():
        yield name, _masked(text)


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
