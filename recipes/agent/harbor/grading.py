"""Grading of tasks by tests in a fresh box that no agent has used, and checks of tasks before training.

All processes of the agent's box are ended. Its work folder and the task's declared artifacts become a layer over the
image of a new box, without a network. The tests are copied in and run, and all their processes are ended. Only then is
the reward file read, without following links.

In a check, the solution must earn 1 and doing nothing 0, and a canary shows whether a program can forge the tests'
result.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from pydantic import Field

from recipes.agent.boxes.box import BoxBlocked, BoxEnded, Left, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxLimits
from recipes.agent.boxes.image_building import image_of
from recipes.agent.boxes.image_store import Image, ImageStore
from recipes.agent.harbor.task_folder import RECORD, TaskFolder, find_tasks, read_task
from rlinf_core import ConfigError
from rlinf_core.foreign.files import FileModel, read_model
from rlinf_core.runners.storage.durable import write_whole

Mode = Literal["work", "files"]
_MODES: Final[tuple[Mode, ...]] = ("work", "files")
_REWARDS: Final = {"json": "/logs/verifier/reward.json", "txt": "/logs/verifier/reward.txt"}
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
        written = {kind: file for kind, path in _REWARDS.items() if (file := await box.read(path)) is not None}
    known = expected.kinds or _kinds_in(task)
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
    kind = next((kind for kind in _REWARDS if kind in files), None)
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


def _kinds_in(task: TaskFolder) -> tuple[str, ...]:
    """Return the kinds of reward files that the tests' sources mention; all kinds if they mention none."""
    texts = [path.read_bytes() for path in (task.path / "tests").rglob("*") if path.is_file()]
    named = tuple(kind for kind in _REWARDS if any(f"reward.{kind}".encode() in text for text in texts))
    return named or tuple(_REWARDS)


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """Return the contents of a folder, with names relative to it."""
    return [(str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*"))]


_SCHEMA: Final = "rlinf.tasks-checked/1"
_TIMES: Final = 3
# The Harbor agents that need tmux.
_IN_TMUX: Final = ("terminus", "terminus-1", "terminus-2")
# A limit of remaining processes that no tests reach.
_ANY: Final = 1 << 20
# Solves the task, then makes its Python files end any process that imports them with status 0.
_CANARY: Final = (
    "touch /tmp/before && sleep 0.05 && bash /solution/solve.sh; find . -newer /tmp/before -type f -name '*.py' -print"
    ' -exec sh -c \'printf "import os\\nos._exit(0)\\n" > "$1"\' _ {} \\;'
)
_SOLVE: Final = "bash /solution/solve.sh"


class CheckedTask(FileModel):
    """The result of a check.

    Attributes:
        name, digest: the task's.
        solution, nothing, canary: the rewards; `canary` is None if the solution writes no Python file.
        mode: which of the agent's files the tests need.
        kinds: the kinds of files in which the tests write the reward.
        running: the number of processes that the tests leave.
        seconds: the duration of the solution's tests.
        why: the reason for the solution's reward if the tests gave none.
        output: the end of the tests' output for a solution that does not earn 1.
        tmux: whether the image has tmux, which some Harbor agents need; None: an earlier version did not check it.
    """

    name: str
    digest: str
    solution: float
    nothing: float
    canary: float | None
    mode: Mode
    kinds: tuple[str, ...] = Field(strict=False)
    running: int
    seconds: float
    why: str = ""
    output: str = ""
    tmux: bool | None = None

    @property
    def forgeable(self) -> bool:
        """Whether code under test can make the tests report success."""
        return self.canary == 1

    @property
    def expected(self) -> Expected:
        """The facts to check grades against."""
        return Expected(self.mode, self.kinds, self.running)

    def fault(self, verifier_seconds: float, harness: str | None = None) -> str:
        """Return why the task is unfit for training, with a Harbor agent if one is named; "": it is fit."""
        if self.solution != 1:
            return f"its solution earns {self.solution:g}: {self.why or 'the tests say so'}"
        if self.nothing != 0:
            return f"doing nothing earns {self.nothing:g}"
        if self.forgeable:
            return "forgeable from within: code under test can end the tests as if all were well"
        if self.seconds * _TIMES > verifier_seconds:
            return (
                f"slow: the tests of its solution take {self.seconds:.1f} s, more than a third of"
                f" `verifier.timeout_sec` {verifier_seconds:g}"
            )
        if harness in _IN_TMUX and self.tmux is False:
            return f"its image has no `tmux`, in which `{harness}` works: install it where the image is built"
        return ""


class _Record(FileModel):
    tasks: dict[str, CheckedTask]


async def check_task(store: ImageStore, task: TaskFolder) -> CheckedTask:
    """Grade a task's solution, nothing, and the canary, each in boxes of their own.

    Raises:
        ConfigError: the task has no solution, or its image is not available.
        BoxError: no box can be made.
    """
    if not task.has_solution:
        raise ConfigError(f"the task `{task.name}` has no solution, and cannot be checked")
    image = await image_of(store, task.environment, task.docker_image, seconds=task.build_seconds)
    async with store.boxes.admission.admit(task.memory_mib):
        mode, solved = await _solved(store, task, image)
        expected = Expected(mode, solved.kinds, solved.running)
        nothing, _ = await _tried(store, task, image, mode, "", expected)
        canary, changed = await _tried(store, task, image, mode, _CANARY, expected)
        async with task_box(store, task, image) as box:
            has_tmux = (await box.run(["tmux", "-V"], timeout=task.agent_seconds)).status == 0
    return CheckedTask(
        name=task.name,
        digest=task.digest,
        solution=solved.reward,
        nothing=nothing.reward,
        canary=canary.reward if changed else None,
        mode=mode,
        kinds=solved.kinds,
        running=solved.running,
        seconds=round(solved.seconds, 3),
        why=solved.why,
        output="" if solved.reward == 1 else solved.output[-2000:],
        tmux=has_tmux,
    )


async def _solved(store: ImageStore, task: TaskFolder, image: Image) -> tuple[Mode, Grade]:
    """Return the first mode in which the solution earns 1 (if none, the first mode), and its grade."""
    grades: dict[Mode, Grade] = {}
    for mode in _MODES:
        grades[mode], _ = await _tried(store, task, image, mode, _SOLVE, Expected(mode, running=_ANY))
        if grades[mode].reward == 1:
            return mode, grades[mode]
    return _MODES[0], grades[_MODES[0]]


async def _tried(
    store: ImageStore, task: TaskFolder, image: Image, mode: Mode, script: str, expected: Expected
) -> tuple[Grade, str]:
    """Return the grade of a script's work, and the script's output."""
    said = ""
    async with task_box(store, task, image) as box:
        if script:
            await box.put_files(files_of(task.path / "solution"), "/solution")
            with contextlib.suppress(BoxEnded):
                user, env = task.agent_user or image.user, task.solution_env
                done = await box.run(["bash", "-c", script], user=user, env=env, timeout=task.agent_seconds)
                said = done.output.decode(errors="replace").strip()
        await finish(task, image, box, mode)
        return await grade(store, task, image, store.boxes.kept(box), expected), said


def read_checks(path: Path) -> dict[str, CheckedTask]:
    """Return the results of earlier checks of a folder of tasks, by task digest.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return dict(read_model(path / RECORD, _Record).tasks)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(
            f"`{path / RECORD}` is no record of checks",
            why=error.strerror,
            help="remove it, and run `rlinf tasks check`",
        ) from None


def find_check(task: TaskFolder) -> CheckedTask | None:
    """Return a task's check, stored in its folder or one of the two above it; see `find_tasks`.

    Raises:
        ConfigError: a file of results cannot be read.
    """
    path = task.path.absolute()
    for folder in (path, path.parent, path.parent.parent):
        if (checked := read_checks(folder).get(task.digest)) is not None:
            return checked
    return None


def load_checked(path: Path, harness: str | None = None) -> list[tuple[TaskFolder, CheckedTask]]:
    """Return the tasks of a folder with their checks.

    Args:
        path: a folder of tasks, or a task.
        harness: the Harbor agent that does the tasks; None: rlinf's own agent.

    Raises:
        ConfigError: a task cannot be read, was not checked in its present state, or is unfit for training.
    """
    checks, tasks = read_checks(path), [read_task(folder) for folder in find_tasks(path)]

    def fault_of(task: TaskFolder) -> str:
        checked = checks.get(task.digest)
        return "was not checked" if checked is None else checked.fault(task.verifier_seconds, harness)

    faults = [f"{task.name}: {fault}" for task in tasks if (fault := fault_of(task))]
    if faults:
        rest = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ConfigError(
            f"{len(faults)} of {len(tasks)} tasks in `{path}` are not fit to be trained on",
            why=f"{faults[0]}{rest}",
            help=f"run `rlinf tasks check {path}`, and mend or remove what it names",
        )
    return [(task, checks[task.digest]) for task in tasks]


def write_checks(path: Path, checks: Iterable[CheckedTask]) -> None:
    """Write the results of checks beside the tasks, replacing earlier ones.

    Raises:
        ConfigError: the file cannot be written.
    """
    tasks = {task.digest: task.model_dump() for task in checks}
    record = {"schema": _SCHEMA, "written": int(time.time()), "tasks": tasks}
    try:
        write_whole(path / RECORD, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"`{path / RECORD}` cannot be written", why=error.strerror) from None
