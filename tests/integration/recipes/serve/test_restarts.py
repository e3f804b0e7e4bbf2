"""Deaths of the server, of the actor and of the engine under a client: it goes on, and sees what it would have seen."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep

import pytest

from tests.integration.recipes.serve.service_command import (
    NO_SDK,
    PYTHON,
    Service,
    client_environment,
    free_port,
    run_client,
    service,
)
from tests.waiting import until

PROGRAM = Path(__file__).with_name("restart_program.py")
SMALL = ("actor.model.hidden_dim=32", "actor.model.num_layers=1", "server.save_interval=3", "runner.max_restarts=100")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.ray,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not PYTHON, reason=NO_SDK),
]


def workers_of(running: Service, seen: set[int]) -> list[int]:
    """Return the processes of the actor and the engine, in the order in which they began.

    Args:
        running: the service.
        seen: the processes that were workers at an earlier look. During a call Ray names a process by its method.
    """
    parents = dict[int, tuple[int, int]]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            values = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(values[1]), int(values[19])  # the parent, and when it began
    below = {running.process.pid}
    for _ in range(4):
        below |= {pid for pid, (parent, _) in parents.items() if parent in below}
    seen |= {pid for pid in below if is_worker(pid)}
    return sorted(seen & below, key=lambda pid: parents[pid][1])


def is_worker(pid: int) -> bool:
    """Return whether a process is that of a worker, and not of the manager, which Ray names by its own class."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::WorkerProcess")
    return False


def kill(victim: str, running: Service, seen: set[int]) -> bool:
    """Kill the actor or the engine, where both are there; return whether they were."""
    workers = workers_of(running, seen)
    if len(workers) == 2:
        os.kill(workers[victim == "engine"], signal.SIGKILL)
    return len(workers) == 2


def seen_without_deaths(folder: Path, steps: int) -> list[object]:
    folder.mkdir()
    with service(folder, *SMALL) as running:
        done = run_client(running, [str(PROGRAM), str(folder), str(steps)], folder)
        assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


def progress(folder: Path) -> int:
    file = folder / "progress"
    return int(file.read_text() or 0) if file.exists() else 0


@pytest.mark.parametrize("seed", range(3))
def test_client_goes_on_through_ten_deaths(tmp_path: Path, seed: int) -> None:
    deaths = int(os.environ.get("RLINF_TEST_DEATHS", "10"))
    steps, draw, folder = 4 * deaths + 4, random.Random(seed), tmp_path / "killed"
    right = seen_without_deaths(tmp_path / "whole", steps)
    folder.mkdir()
    seen = set[int]()
    options, port = (*SMALL, f"server.state_dir={folder / 'state'}"), free_port()
    with ExitStack() as stack:
        running = stack.enter_context(service(folder, *options, port=port))
        command = [PYTHON, "-W", "ignore", str(PROGRAM), str(folder), str(steps)]
        client = subprocess.Popen(
            command, env=client_environment(running, folder), cwd=folder, stderr=subprocess.PIPE, text=True
        )
        stack.callback(client.kill)
        for death in range(deaths):
            at = 4 * death + draw.randint(1, 4)
            until(lambda at=at: progress(folder) >= at or client.poll() is not None, f"step {at}", 300)
            victim = draw.choice(["server", "actor", "engine"])
            sleep(0.2 * draw.random())  # the moment within the step
            assert client.poll() is None, client.communicate()[1][-3000:]
            if victim == "server":
                os.kill(running.process.pid, signal.SIGKILL)
                running.process.wait(60)
                running = stack.enter_context(service(folder, *options, port=port))
            else:
                # None is there while the service starts them again after the death before.
                until(lambda running=running, victim=victim: kill(victim, running, seen), "both workers", 240)
        errors = client.communicate(timeout=600)[1]
    assert client.returncode == 0, errors[-3000:]
    assert json.loads((folder / "seen.json").read_text()) == right
