"""`rlinf serve` as a process of its own, and programs of the Tinker SDK against it.

The SDK lives in an interpreter of its own, which `RLINF_TEST_TINKER` names; without one, tests of it are skipped:

    python3 -m venv V && V/bin/pip install tinker==0.38.0
    RLINF_TEST_TINKER=V/bin/python pytest -m nightly tests/integration/recipes/serve
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.rlinf_command import output_of
from tests.waiting import until

PYTHON = os.environ.get("RLINF_TEST_TINKER", "")
NO_SDK = "RLINF_TEST_TINKER names no interpreter with the Tinker SDK"
RLINF = Path(sys.executable).with_name("rlinf")


class Service(NamedTuple):
    """A service: its process, its run folder and its address."""

    process: subprocess.Popen[str]
    folder: Path
    url: str

    @property
    def key(self) -> str:
        # With `server.state_dir` it is not in the run folder.
        folders = (self.folder / "service", self.folder.parents[1] / "state")
        return next(folder for folder in folders if folder.is_dir()).joinpath("keys/default").read_text().strip()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def service(folder: Path, *overrides: str, port: int = 0) -> Generator[Service]:
    """Serve from a folder as long as the context lasts."""
    port = port or free_port()
    command = [str(RLINF), "serve", "serve/sums-laptop", f"server.port={port}", *overrides]
    output = folder / "service.log"
    with output.open("w") as file:
        # Beside whatever cluster there is on this machine, whose processes would be none of this one's.
        environment = {**os.environ, "RLINF_ADDRESS": "local"}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True
        )
    try:
        until(lambda: "export TINKER_API_KEY" in output.read_text() or process.poll() is not None, "the service", 240)
        assert process.poll() is None, output.read_text()
        run = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_ctime)
        yield Service(process, run, f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def client_environment(running: Service, folder: Path) -> dict[str, str]:
    """Return the environment of a program of the SDK, offline."""
    return {
        **os.environ,
        "TINKER_BASE_URL": running.url,
        "TINKER_API_KEY": running.key,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "HOME": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_client(running: Service, arguments: Sequence[str], folder: Path, timeout: float = 280) -> str:
    """Return what a program prints in the interpreter of the SDK, offline, in a folder."""
    environment = client_environment(running, folder)
    return output_of(PYTHON, "-W", "ignore", *arguments, env=environment, cwd=folder, timeout=timeout, errors=True)
