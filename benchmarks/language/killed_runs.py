"""Runs of `rlinf train` on tasks with images that are killed in eight ways, and what is left of their boxes.

The tests of the tasks leave processes in sessions of their own and hang: in the middle of them, the run is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.table import Result
from recipes.agent.boxes.boxes import BoxHost, BoxLimits
from recipes.agent.boxes.image_store import ImageStore
from recipes.agent.harbor.grading import CheckedTask, write_checks
from recipes.agent.harbor.task_folder import find_tasks, read_task
from rlinf_core.env_vars import ADDRESS
from rlinf_core.node.attach import LOCAL

BOXES: Final = 20
# Of a command of a box: nothing else on this machine sleeps as long.
_MARK: Final = f"600.{os.getpid()}"
_FILES: Final = {
    "task.toml": 'schema_version = "1.4"\n[environment]\nmemory_mb = 64\n[verifier]\ntimeout_sec = 900\n',
    "instruction.md": "task {number}\n",
    "environment/Dockerfile": "FROM rlinf/host\nWORKDIR /app\n",
    "solution/solve.sh": "true\n",
    "tests/test.sh": f"setsid sleep {_MARK} & setsid sleep {_MARK} & sleep {_MARK}\n",
}
_SLEEPERS: Final = 3
_JOB: Final = f"""
recipe: agent
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,reward,agent: {{node_group: node, placement: 0}}
data: {{type: episodes, rollout_batch_size: {BOXES // 4}, val_size: 1, max_prompt_length: 400}}
agent:
  run: env_agent
  environment: {{type: harbor, options: {{path: tasks, box_folder: boxes, box_memory_mib: {64 * BOXES}}}}}
  max_turns: 1
rollout: {{sampling_params: {{max_new_tokens: 4}}}}
algorithm: {{group_size: 4, kl_beta: 0.0}}
actor: {{warm_start: {{steps: 0}}, model: {{hidden_dim: 32, num_layers: 1}}}}
runner: {{seq_length: 600, max_steps: 5, val_check_interval: -1}}
"""
_START_SECONDS: Final = 600.0
_END_SECONDS: Final = 120.0


class _Process(NamedTuple):
    pid: int
    parent: int
    began: str
    name: str
    space: str


# A run goes on after them.
ONGOING: Final = ("the holders, -9", "the starter, -9")
# How the run ends: a signal, and whether the whole group of processes gets it.
AGENT: Final = "an agent process, -9"
ENDING: Final[Mapping[str, tuple[int, bool]]] = {
    AGENT: (signal.SIGTERM, False),
    "the driver, -9": (signal.SIGKILL, False),
    "the process group, -9": (signal.SIGKILL, True),
    "`rlinf train`, SIGTERM": (signal.SIGTERM, False),
    "the process group, SIGTERM": (signal.SIGTERM, True),
    "Ctrl-C": (signal.SIGINT, True),
}


# Of their processes.
_NAMES: Final[Mapping[str, str]] = {ONGOING[0]: "rlinf-box", ONGOING[1]: "rlinf-boxes"}


class _Left(NamedTuple):
    seconds: float
    processes: int
    files: int


def killed(folder: Path, times: int, seconds: float) -> Iterable[Result]:
    """Kill runs with 20 boxes in each way, and count what is left: processes, mounts, folders and images.

    Args:
        folder: where runs, boxes and images are.
        times: how often in each way.
        seconds: no further run begins after them.
    """
    until = time.monotonic() + seconds
    # What a shell has started in the background ignores Ctrl-C, as do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(2):
        for name, text in _FILES.items():
            path = folder / f"tasks/{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(number=number), encoding="utf-8")
    write_checks(folder / "tasks", (_fit(path) for path in find_tasks(folder / "tasks")))
    (folder / "job.yaml").write_text(_JOB, encoding="utf-8")
    left: dict[str, list[_Left]] = {way: [] for way in (*ONGOING, *ENDING)}
    # By turns: where the time is up before all, each way was tried as often.
    for number, (way, (kind, group)) in itertools.product(range(times), ENDING.items()):
        if time.monotonic() > until:
            break
        with _training(folder) as run:
            for ongoing in ONGOING:
                # A task begins again once: once each in a run.
                if way != AGENT and len(left[ongoing]) < times:
                    left[ongoing].append(_struck(run, ongoing))
                    _say(number, ongoing, left[ongoing][-1])
            end = partial(os.killpg if group else os.kill, run.pid, kind)
            seconds, processes = _gone(partial(_kill_agents, run) if way == AGENT else end)
            if way == AGENT:
                end()
        left[way].append(_Left(seconds, processes, _files(folder)))
        _say(number, way, left[way][-1])
    for way, all_left in left.items():
        if not all_left:
            continue
        count = sum(one.processes + one.files for one in all_left)
        slowest = max(one.seconds for one in all_left)
        what = f"Left of {len(all_left)} x {BOXES} boxes: {way}"
        yield Result(what, f"processes of boxes gone within {slowest:.1f} s", str(count), "0", count == 0)


def _say(number: int, way: str, left: _Left) -> None:
    print(f"{time.strftime('%H:%M:%S')} {number + 1}: {way}: {left}", file=sys.stderr, flush=True)


def _fit(path: Path) -> CheckedTask:
    task = read_task(path)
    rest: dict[str, object] = {"kinds": ("txt",), "running": 0, "seconds": 0.1, "mode": "work", "canary": 0.0}
    return CheckedTask.model_validate(
        {"name": task.name, "digest": task.digest, "solution": 1.0, "nothing": 0.0, **rest}
    )


@contextmanager
def _training(folder: Path) -> Generator[subprocess.Popen[bytes]]:
    """Start a run, and yield it once the tests of 20 boxes hang; what is left of it afterwards is ended."""
    command = [sys.executable, "-m", "rlinf_cli", "train", "job.yaml"]
    environ = {**os.environ, ADDRESS.name: LOCAL, "PYTHONPATH": str(Path(__file__).parents[2])}
    with (folder / "out").open("wb") as out:
        run = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    everything: dict[int, _Process] = {}
    try:
        _ready(run, folder)
        everything = below(run.pid)
        yield run
        run.wait(_END_SECONDS)
        _until(lambda: not _alive(everything.values()) and not _sleepers(), _END_SECONDS)
        names = [process.name for process in _alive(everything.values())] + ["sleep"] * len(_sleepers())
        if names:
            raise SystemExit(f"of a run that was ended there are left: {names}")
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def _ready(run: subprocess.Popen[bytes], folder: Path) -> None:
    _until(lambda: run.poll() is not None or len(_sleepers()) >= _SLEEPERS * BOXES, _START_SECONDS)
    if len(_sleepers()) < _SLEEPERS * BOXES:
        text = (folder / "out").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"20 boxes did not start: nothing measured\n{text}")


def _struck(run: subprocess.Popen[bytes], way: str) -> _Left:
    """Kill processes of a run that goes on, and count what is left of the boxes that these had."""
    processes = [*below(run.pid).values(), *_boxes()]
    victims = list({process for process in processes if process.name == _NAMES[way]})
    holders = [process for process in _boxes() if process.name == _NAMES[ONGOING[0]]]
    if way == ONGOING[1]:
        # No box needs it: those that are there go on.
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        _until(lambda: not _alive(victims), _END_SECONDS)
        return _Left(0.0, len(holders) - len(_alive(holders)), 0)
    seconds, left = _gone(lambda: [os.kill(process.pid, signal.SIGKILL) for process in victims])
    # Each task begins again.
    _until(lambda: len(_sleepers()) >= _SLEEPERS * BOXES, _START_SECONDS)
    return _Left(seconds, left, 0)


def _kill_agents(run: subprocess.Popen[bytes]) -> None:
    """Kill the processes that have started boxes."""
    processes = below(run.pid)
    for process in list(processes.values()):
        if process.name == _NAMES[ONGOING[1]]:
            os.kill(process.parent, signal.SIGKILL)


def _gone(end: Callable[[], object]) -> tuple[float, int]:
    """End something; return the seconds until the processes and mounts of all boxes are gone, and how many are not."""
    boxes = _boxes()
    spaces = {process.space for process in boxes}
    if len(boxes) < (_SLEEPERS + 1) * BOXES:
        raise SystemExit(f"there are only {len(boxes)} processes in boxes: nothing measured")
    began, boot = time.perf_counter(), time.clock_gettime(time.CLOCK_BOOTTIME)
    end()
    _until(lambda: not _alive(boxes), _END_SECONDS)
    seconds = time.perf_counter() - began
    # A mount lives as long as its namespace, which is seen in the processes that are in it. Its number is given again.
    ticks = boot * os.sysconf("SC_CLK_TCK")
    mounts = sum(process.space in spaces and int(process.began) <= ticks for process in _processes().values())
    return seconds, len(_alive(boxes)) + mounts


def _files(folder: Path) -> int:
    """Return how many folders of boxes and parts of images are left once boxes were started again."""

    async def sweep() -> None:
        boxes = BoxHost(folder / "boxes", 1024)
        store = ImageStore(boxes)
        layers = store.layers(await store.base("rlinf/host"))
        async with boxes.box(layers, BoxLimits()):
            await boxes.sweep()
        store.close()
        await boxes.close()

    asyncio.run(sweep())
    folders = os.listdir(folder / "boxes/live")
    images = {path.name for kind in ("images", "layers") for path in (folder / "boxes" / kind).iterdir()}
    known = _known_images.setdefault(folder, images)
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").count(str(folder))
    return len(folders) + len(images ^ known) + mounts


_known_images: dict[Path, set[str]] = {}


# Processes


def _processes() -> dict[int, _Process]:
    return {process.pid: process for pid in filter(str.isdigit, os.listdir("/proc")) if (process := _process(pid))}


def _process(pid: str) -> _Process | None:
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
        words = rest.split()
        # One that nobody has waited for is gone, but for its number.
        if words[0] != "Z":
            return _Process(int(pid), int(words[1]), words[19], name, os.readlink(f"/proc/{pid}/ns/mnt"))
    return None


def _boxes() -> list[_Process]:
    """Return the processes of boxes in which something sleeps, their holders included."""
    processes = _processes()
    spaces = {processes[pid].space for pid in _sleepers() if pid in processes}
    return [process for process in processes.values() if process.space in spaces]


def below(owner: int) -> dict[int, _Process]:
    """Return the processes that a process has started, with all that these have."""
    processes = _processes()
    below, grown = {owner}, True
    while grown:
        children = {process.pid for process in processes.values() if process.parent in below} - below
        below |= children
        grown = bool(children)
    return {pid: processes[pid] for pid in below - {owner} if pid in processes}


def _sleepers() -> list[int]:
    def asked(pid: str) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", _MARK.encode()]
        return False

    return [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if asked(pid)]


def _alive(processes: Iterable[_Process]) -> list[_Process]:
    return [
        process
        for process in processes
        if (now := _process(str(process.pid))) is not None and now.began == process.began
    ]


def _until(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
