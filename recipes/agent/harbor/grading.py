"""Grading: the tests run in a fresh box, where no agent has been.

All processes of the agent's box end. Of what it wrote, the work folder and what the task declares become a layer over
the image in a new box, without a network. The tests come in, run, and end with all that they started. Only then the one
file is read that holds the reward, following no link.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from recipes.agent.boxes.box import BoxEnded, Left, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxLimits
from recipes.agent.harbor.task_folder import TaskFolder
from recipes.agent.images.store import Image, ImageStore

Mode = Literal["work", "files"]
MODES: Final[tuple[Mode, ...]] = ("work", "files")
REWARDS: Final = {"json": "/logs/verifier/reward.json", "txt": "/logs/verifier/reward.txt"}
LOGS: Final = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_NEVER: Final = ("/dev", "/proc", "/sys", "/logs", "/tests", "/solution")
# What programs of the tests are in, or read at their start.
_SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/boot", "/root", "/run", "/opt")
_TRIES: Final = 2
# Processes that the tests have ended end within it.
_GRACE_SECONDS: Final = 1.0
# No module of the work folder stands in for one of the tests' own, and none starts with every Python; those beside a
# script of the tests are found by the path.
_SAFE_PYTHON: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "/tests",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Facts of the solution's grade, as `rlinf tasks check` saw it.

    Attributes:
        mode: what of the agent's files the tests get.
        kinds: the files that the tests write, of `txt` and `json`.
        running: processes that the tests leave.
    """

    mode: Mode = "work"
    kinds: tuple[str, ...] = ()
    running: int = 0


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of what a box has left.

    Attributes:
        reward: 0 where there is none twice: that is what the agent left.
        why: the reason of a reward that no test gave; "": the tests gave it.
        tampered: whether the reward was written by something other than the tests.
        timed_out: whether the tests took too long.
        tries: fresh boxes that were used.
        output: all that the tests wrote.
        seconds: the time of the last run of the tests.
        kinds: files with rewards that were found.
        running: processes that the tests left.
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


def limits_of(task: TaskFolder) -> BoxLimits:
    """Return the limits of a task's boxes."""
    return BoxLimits(memory=task.memory_mib * MIB, disk=task.storage_mib * MIB, cpus=task.cpus)


def workdir_of(task: TaskFolder, image: Image) -> str:
    """Return the folder in which the agent and the tests work."""
    return task.workdir or image.workdir


async def finish(task: TaskFolder, image: Image, box: LiveBox, mode: Mode) -> Left:
    """End the agent's box, and keep what its tests may see.

    Raises:
        BoxError: it could not be kept.
    """
    workdir = workdir_of(task, image)
    keep = ["/"] if mode == "files" else [*([workdir] if workdir != "/" else []), *task.artifacts]
    return await box.finish(keep, [*_NEVER, *(_SYSTEM if mode == "files" else ())])


async def grade(
    store: ImageStore, task: TaskFolder, image: Image, kept: Path, expected: Expected, *, seconds: float | None = None
) -> Grade:
    """Run the tests over what a box has left, in a fresh box; once more in another one where they give no reward.

    Args:
        kept: the layer of what was kept.
        expected: what the solution's grade was like.
        seconds: limit of one run of the tests; by default the task's own.

    Raises:
        BoxError: no box could be made, or its holder was killed.
    """
    result: Grade | None = None
    for number in range(1, _TRIES + 1):
        result = await _graded(store, task, image, kept, expected, number, seconds or task.verifier_seconds)
        if not result.why or result.tampered:
            break
    return cast("Grade", result)


async def _graded(
    store: ImageStore, task: TaskFolder, image: Image, kept: Path, expected: Expected, number: int, seconds: float
) -> Grade:
    boxes, env = store.boxes, {**image.env, **task.env, **_SAFE_PYTHON}
    settings: dict[str, Any] = {"env": env, "workdir": workdir_of(task, image), "folders": LOGS}
    async with boxes.box([kept, *store.layers(image)], limits_of(task), **settings) as box:
        await box.put(packed(task.path / "tests"), "/tests")
        began, status, timed_out, output = time.perf_counter(), 0, False, b""
        why = ""
        try:
            done = await box.run(
                ["bash", "/tests/test.sh"], env=task.verifier_env, user=task.verifier_user, timeout=seconds
            )
            status, timed_out, output = done.status, done.timed_out, done.output + done.errors
        except BoxEnded as error:
            why = str(error)
        took = time.perf_counter() - began
        left = await box.finish(grace=0.0 if timed_out or why else _GRACE_SECONDS)
        written = {kind: data for kind, path in REWARDS.items() if (data := await box.read(path)) is not None}
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
    elif not why:
        reward, why = read_reward(written)
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


def read_reward(files: dict[str, bytes]) -> tuple[float, str]:
    """Return the reward of the files that tests wrote, and why there is none; `reward.json` comes first.

    Args:
        files: their contents, by `json` and `txt`.
    """
    kind = next((kind for kind in REWARDS if kind in files), None)
    if kind is None:
        return 0.0, "the tests wrote no reward"
    try:
        value: Any = json.loads(files[kind])["reward"] if kind == "json" else float(files[kind])
        number = float(value)
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0.0, f"reward.{kind} cannot be read: {files[kind][:80]!r}"
    if isinstance(value, bool | str) or not math.isfinite(number):
        return 0.0, f"the reward is no finite number: {value!r}"
    return number, ""


def kinds_in(task: TaskFolder) -> tuple[str, ...]:
    """Return the files of rewards that the texts of the tests name; all where they name none."""
    texts = [path.read_bytes() for path in (task.path / "tests").rglob("*") if path.is_file()]
    named = tuple(kind for kind in REWARDS if any(f"reward.{kind}".encode() in text for text in texts))
    return named or tuple(REWARDS)


def packed(folder: Path, names: Sequence[str] | None = None) -> bytes:
    """Return a folder's files as an archive, owned by root."""
    buffer = io.BytesIO()

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()) if names is None else [folder / name for name in names]:
            archive.add(path, path.name, filter=owned)
    return buffer.getvalue()
