"""What is done to a process."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from rlinf_core.node.process_identity import identity_here, opened
from tests.chaos.disturbed_run import has_ended, without_room

WRITES = """
import sys
from pathlib import Path
for line in sys.stdin:
    try:
        with open(line.strip(), "w") as file:
            file.write("x")
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_process_without_room_writes_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write() -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{tmp_path}/file\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        with opened(identity_here(process.pid)) as handle:
            answers = [write()]
            with without_room(process.pid):
                answers.append(write())
            answers.append(write())
            assert answers == ["written", "File too large", "written"]
            assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == resource.getrlimit(resource.RLIMIT_FSIZE)
            assert not has_ended(handle)
            process.kill()
            process.wait()
            assert has_ended(handle)
    finally:
        process.kill()
        process.communicate()
