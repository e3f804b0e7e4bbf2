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
        return self.key_of("default")

    def key_of(self, tenant: str) -> str:
        return (self.folder / "service/keys" / tenant).read_text().strip()


@contextmanager
def service(folder: Path, *overrides: str) -> Generator[Service]:
    """Serve from a folder as long as the context lasts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(RLINF), "serve", "serve_laptop", f"server.port={port}", *overrides]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("export TINKER_API_KEY"):
                break
        assert process.poll() is None, "".join(lines)
        (run,) = (folder / "runs").iterdir()
        yield Service(process, run, f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def run_client(
    running: Service, arguments: Sequence[str], folder: Path, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a program in the interpreter of the SDK, offline, in a folder."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": running.url,
        "TINKER_API_KEY": running.key,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "HOME": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [PYTHON, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout)
