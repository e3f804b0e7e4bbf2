"""Checks of tasks before training: the solution must earn 1 and doing nothing 0, and a canary shows whether a program
can forge the tests' result.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import Field

from recipes.agent.boxes.box import BoxEnded
from recipes.agent.harbor.grading import MODES, Expected, Grade, Mode, files_of, finish, grade, task_box
from recipes.agent.harbor.task_folder import RECORD, TaskFolder, find_tasks, read_task
from recipes.agent.images.building import image_of
from recipes.agent.images.store import Image, ImageStore
from rlinf_core import ConfigError
from rlinf_core.foreign.files import FileModel, read_model
from rlinf_core.runners.storage.durable import write_whole

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
    for mode in MODES:
        grades[mode], _ = await _tried(store, task, image, mode, _SOLVE, Expected(mode, running=_ANY))
        if grades[mode].reward == 1:
            return mode, grades[mode]
    return MODES[0], grades[MODES[0]]


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
