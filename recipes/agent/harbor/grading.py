"""Grading of tasks by tests in a fresh box that no agent has used.

All processes of the agent's box are ended. Its work folder and the task's declared artifacts become a layer over the
image of a new box, without a network. The tests are copied in and run, and all their processes are ended. Only then is
the reward file read, without following links.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from recipes.agent.boxes.box import BoxBlocked, BoxEnded, Left, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxLimits
from recipes.agent.harbor.task_folder import TaskFolder
from recipes.agent.images.store import Image, ImageStore

Mode = Literal["work", "files"]
MODES: Final[tuple[Mode, ...]] = ("work", "files")
REWARDS: Final = {"json": "/logs/verifier/reward.json", "txt": "/logs/verifier/reward.txt"}
_LOGS: Final = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_NEVER: Final = ("/dev", "/proc", "/sys", "/logs", "/tests", "/solution")
# Folders with the programs of the tests, or files that these read at startup.
_SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/boot", "/root", "/run", "/opt")
_TRIES: Final = 2
# The time for processes that the tests have signalled to exit.
_GRACE_SECONDS: Final = 1.0
# Modules in the work folder cannot replace the tests' modules or run when Python starts; modules beside the tests'
# scripts are found by `PYTHONPATH`.
_SAFE_PYTHON: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "/tests",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Facts of the solution's grade that `rlinf tasks check` observed.

    Attributes:
        mode: which of the agent's files the tests get.
        kinds: the kinds of reward files that the tests write: `txt`, `json`.
        running: processes that the tests leave.
    """

    mode: Mode = "work"
    kinds: tuple[str, ...] = ()
    running: int = 0


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of the files that a box left.

    Attributes:
        reward: the tests' reward; 0 if they gave none twice, which the agent's files then caused.
        why: the reason for a reward that the tests did not give; "": they gave it.
        tampered: whether something other than the tests may have written the reward.
        timed_out: whether the tests exceeded their time limit.
        tries: the number of fresh boxes used.
        output: the tests' output and errors.
        seconds: the duration of the last test run.
        kinds: the kinds of reward files that were found.
        running: the number of processes that the tests left.
    """

    reward: float
    why: str
    tampered: bool
    timed_out: bool
    tries: int
    output: str
    seconds: float
    kinds: tuple[str, ...]
    running: int


def task_box(
    store: ImageStore, task: TaskFolder, image: Image, *above: Path, env: Mapping[str, str] = MappingProxyType({})
) -> AbstractAsyncContextManager[LiveBox]:
    """Start a box of a task, and end it afterwards, as `BoxHost.box` does.

    Args:
        above: layers over those of the image.
        env: variables besides those of the image and the task.
    """
    return store.boxes.box(
        [*above, *store.layers(image)],
        BoxLimits(memory=task.memory_mib * MIB, disk=task.storage_mib * MIB, cpus=task.cpus),
        env={**image.env, **task.env, **env},
        workdir=task.workdir or image.workdir,
        folders=_LOGS,
        title=f"{'tests' if above else 'box'} of {task.name}, {task.memory_mib} MiB",
    )


async def finish(task: TaskFolder, image: Image, box: LiveBox, mode: Mode) -> Left:
    """End the agent's box, and keep the files that the tests may see.

    Raises:
        BoxError: the files could not be kept.
    """
    workdir = task.workdir or image.workdir
    keep = ["/"] if mode == "files" else [*([workdir] if workdir != "/" else []), *task.artifacts]
    return await box.finish(keep, [*_NEVER, *(_SYSTEM if mode == "files" else ())])


async def grade(
    store: ImageStore, task: TaskFolder, image: Image, kept: Path, expected: Expected, *, seconds: float | None = None
) -> Grade:
    """Run the tests in a fresh box on the files that a box left; if they give no reward, retry once.

    Args:
        kept: the layer of kept files.
        expected: the facts of the solution's grade.
        seconds: the time limit of one test run; None: the task's.

    Raises:
        BoxError: no box could be made, or its holder was killed.
    """
    result: Grade | None = None
    for number in range(1, _TRIES + 1):
        try:
            result = await _graded(store, task, image, kept, expected, number, seconds or task.verifier_seconds)
        except BoxBlocked as error:
            # The image alone did not block the agent's box, so the agent's files do.
            return _ungraded(f"what the agent left hinders the tests: {error}", number)
        if not result.why or result.tampered:
            break
    return cast("Grade", result)


async def _graded(
    store: ImageStore, task: TaskFolder, image: Image, kept: Path, expected: Expected, number: int, seconds: float
) -> Grade:
    async with task_box(store, task, image, kept, env=_SAFE_PYTHON) as box:
        await box.put_files(files_of(task.path / "tests"), "/tests")
        began, status, timed_out, output = time.perf_counter(), 0, False, b""
        why = ""
        try:
            user = task.verifier_user or image.user
            done = await box.run(["bash", "/tests/test.sh"], env=task.verifier_env, user=user, timeout=seconds)
            status, timed_out, output = done.status, done.timed_out, done.output + done.errors
        except BoxEnded as error:
            why = str(error)
        took = time.perf_counter() - began
        left = await box.finish(grace=0.0 if timed_out or why else _GRACE_SECONDS)
        written = {kind: file for kind, path in REWARDS.items() if (file := await box.read(path)) is not None}
    known = expected.kinds or kinds_in(task)
    reward, tampered = 0.0, ""
    if timed_out:
        why = f"the tests took longer than {seconds:g} s"
    elif status < 0:
        why = why or f"the tests were ended by signal {-status}"
    elif extra := set(written) - set(known):
        tampered = f"there is a reward.{min(extra)}, which the tests do not write"
    elif left.running > expected.running:
        tampered = f"{left.running} processes were left that could have written the reward"
    elif late := [kind for kind, file in written.items() if file.late]:
        tampered = f"reward.{late[0]} was changed after the tests had ended"
    elif not why:
        reward, why = read_reward({kind: file.data for kind, file in written.items()})
    return Grade(
        reward=0.0 if why or tampered else reward,
        why=tampered or why,
        tampered=bool(tampered),
        timed_out=timed_out,
        tries=number,
        output=output.decode(errors="replace"),
        seconds=took,
        kinds=tuple(written),
        running=left.running,
    )


def _ungraded(why: str, tries: int) -> Grade:
    return Grade(0.0, why, False, False, tries, output="", seconds=0.0, kinds=(), running=0)


def read_reward(files: dict[str, bytes]) -> tuple[float, str]:
    """Return the reward in the files that tests wrote, and why there is none; `reward.json` takes precedence.

    Args:
        files: the file contents by kind, `json` or `txt`.
    """
    kind = next((kind for kind in REWARDS if kind in files), None)
    if kind is None:
        return 0.0, "the tests wrote no reward"
    try:
        value: Any = json.loads(files[kind])["reward"] if kind == "json" else float(files[kind])
        number = float(value)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return 0.0, f"reward.{kind} cannot be read: {files[kind][:80]!r}"
    if isinstance(value, bool | str) or not math.isfinite(number):
        return 0.0, f"the reward is no finite number: {value!r}"
    return number, ""


def kinds_in(task: TaskFolder) -> tuple[str, ...]:
    """Return the kinds of reward files that the tests' sources mention; all kinds if they mention none."""
    texts = [path.read_bytes() for path in (task.path / "tests").rglob("*") if path.is_file()]
    named = tuple(kind for kind in REWARDS if any(f"reward.{kind}".encode() in text for text in texts))
    return named or tuple(REWARDS)


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """Return the contents of a folder, with names relative to it."""
    return [(str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*"))]
