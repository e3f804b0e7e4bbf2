"""`rlinf tasks`: tasks with images, checked and built on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from rlinf_cli import console
from rlinf_cli.command import Result, arg, command, group, opt
from rlinf_cli.interrupts import ExitCode

if TYPE_CHECKING:
    from recipes.agent.boxes.image_store import ImageStore
    from recipes.agent.harbor.task_folder import TaskFolder

CHECK_SCHEMA: Final = "rlinf.tasks-check/1"
BUILD_SCHEMA: Final = "rlinf.tasks-build/1"
LOAD_SCHEMA: Final = "rlinf.tasks-load/1"

app = group("Check tasks with images, and build their images.", heading="Jobs")

TasksPath = Annotated[Path, arg("PATH")]
Folder = Annotated[Path | None, opt("--boxes DIR", "Folder of boxes and images. Default: ~/.rlinf/boxes.")]
Memory = Annotated[int | None, opt("--memory MIB", "Memory for all boxes. Default: half of the machine's.", min=64)]


@command("rlinf tasks check tasks/terminal", app=app)
def check(path: TasksPath, boxes: Folder = None, memory: Memory = None) -> Result:
    """Check that the grades of tasks mean something.

    PATH is a task folder of Harbor, or a folder of such. Of each task, the solution must earn 1 and doing nothing 0; a
    canary shows whether code under test can end the tests as if all were well. The result is written to
    PATH/checked.json, which training asks for. Exits with 1 if a task is not fit to be trained on.
    """
    from recipes.agent.harbor.grading import CheckedTask, check_task, write_checks

    done: list[tuple[TaskFolder, CheckedTask, str]] = []

    async def run(task: TaskFolder, store: ImageStore) -> None:
        checked = await check_task(store, task)
        done.append((task, checked, checked.fault(task.verifier_seconds)))

    failed = _each(path, boxes, memory, run)
    write_checks(path, (checked for _, checked, _ in done))
    rows = [
        (
            task.name,
            f"{checked.solution:g}",
            f"{checked.nothing:g}",
            "-" if checked.canary is None else f"{checked.canary:g}",
            checked.mode,
            f"{checked.seconds:.1f}",
            fault or "fit",
        )
        for task, checked, fault in done
    ]
    rows += [(name, "-", "-", "-", "-", "-", why) for name, why in failed]
    record = {
        "schema": CHECK_SCHEMA,
        "tasks": [{**checked.model_dump(), "fault": fault, "notes": task.notes} for task, checked, fault in done],
        "failed": [{"task": name, "why": why} for name, why in failed],
    }
    notes = tuple(f"{task.name}: {note}" for task, _, _ in done for note in task.notes)
    unfit = bool(failed) or any(fault for _, _, fault in done)
    headings = ("task", "solution", "nothing", "canary", "files", "seconds", "result")
    return Result(lambda: console.table(headings, rows, keep=(0,)), record, _code(unfit), notes)


@command("rlinf tasks build tasks/terminal", app=app)
def build(
    path: TasksPath,
    save: Annotated[bool, opt("--save", "Write each image to `images/` beside the tasks, for other nodes.")] = False,
    boxes: Folder = None,
    memory: Memory = None,
) -> Result:
    """Build the images of tasks, without a daemon and without root.

    PATH is a task folder of Harbor, or a folder of such. Each image is built once by the digest of its files, in a box
    without a network: what a Dockerfile downloads must be in the image that its FROM names.
    """
    from recipes.agent.boxes.image_archives import save_archive
    from recipes.agent.boxes.image_building import archive_of, image_of

    built: list[tuple[str, str, str]] = []

    async def run(task: TaskFolder, store: ImageStore) -> None:
        image = await image_of(store, task.environment, task.docker_image, seconds=task.build_seconds)
        saved = ""
        if save:
            archive = archive_of(task.environment)
            archive.parent.mkdir(exist_ok=True)
            size = archive.stat().st_size if archive.exists() else await save_archive(store, image, archive)
            saved = f"{size / 1e6:.1f} MB"
        built.append((task.name, image.digest, saved))

    failed = _each(path, boxes, memory, run)
    rows = [*built, *((name, why, "") for name, why in failed)]
    record = {
        "schema": BUILD_SCHEMA,
        "images": [{"task": name, "digest": digest} for name, digest, _ in built],
        "failed": [{"task": name, "why": why} for name, why in failed],
    }
    return Result(lambda: console.table(("task", "image", "archive"), rows, keep=(0,)), record, _code(bool(failed)))


@command("rlinf tasks load image.tar python:3.12", app=app)
def load(
    archive: Annotated[Path, arg("ARCHIVE")],
    name: Annotated[str, arg("NAME")],
    boxes: Folder = None,
    memory: Memory = None,
) -> Result:
    """Load an image from an archive that `docker save` or `podman save` wrote.

    NAME is how FROM of a Dockerfile, or `docker_image` of task.toml, calls it. Sizes, paths and digests are checked;
    nothing of the archive runs.
    """
    from recipes.agent.boxes.image_archives import load_archive

    async def run() -> Any:
        async with _store(boxes, memory) as store:
            return await load_archive(store, archive, name)

    image = asyncio.run(run())
    text = f"{name}: {len(image.layers)} layers, {image.digest}"
    return Result(text, {"schema": LOAD_SCHEMA, "name": name, "digest": image.digest, "layers": len(image.layers)})


def _each(
    path: Path, boxes: Path | None, memory: int | None, act: Callable[[TaskFolder, ImageStore], Awaitable[None]]
) -> list[tuple[str, str]]:
    """Do something with each task, and return the names of those that failed, with the reasons."""
    from recipes.agent.boxes.box import BoxError
    from recipes.agent.harbor.task_folder import find_tasks, read_task
    from rlinf_core import ConfigError

    folders = find_tasks(path)
    failed: list[tuple[str, str]] = []

    async def run() -> None:
        async with _store(boxes, memory) as store:
            for folder in folders:
                try:
                    await act(read_task(folder), store)
                except ConfigError as error:
                    why, help = f": {error.why}" if error.why else "", f"; {error.help}" if error.help else ""
                    failed.append((folder.name, f"{error.message}{why}{help}"))
                except (BoxError, OSError) as error:
                    failed.append((folder.name, str(error)))

    asyncio.run(run())
    return failed


@asynccontextmanager
async def _store(folder: Path | None, memory: int | None) -> AsyncGenerator[ImageStore]:
    from recipes.agent.boxes.box_limits import half_of_memory
    from recipes.agent.boxes.boxes import DEFAULT_FOLDER, BoxHost
    from recipes.agent.boxes.image_store import ImageStore

    boxes = BoxHost(folder or DEFAULT_FOLDER, memory or half_of_memory())
    store = ImageStore(boxes)
    try:
        yield store
    finally:
        store.close()
        await boxes.close()


def _code(failed: bool) -> ExitCode:
    return ExitCode.FAILED if failed else ExitCode.OK
