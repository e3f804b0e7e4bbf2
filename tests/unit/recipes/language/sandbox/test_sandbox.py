"""Whether programs of a model stay in their sandbox, end with their limits, and leave each other alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.tasks_and_tools import Python
from recipes.agent.tools.tool import ToolError
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.sandbox import ProgramResult, SandboxLimits
from rlinf_core import ConfigError
from tests.unit.recipes.agent.tools.escapes import ESCAPES, program_of

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]

NEIGHBOUR = """
import time
written = open("mine", "w")
for number in range(20):
    written.write(f"{number}\\n")
    time.sleep(0.01)
written.close()
print(open("mine").read().split()[-1])
"""


def ran(program: str, limits: SandboxLimits | None = None, patience: float = 60.0) -> ProgramResult:
    async def run() -> ProgramResult:
        async with asyncio.timeout(patience):
            return await sandbox.run(program, limits or SandboxLimits())

    return asyncio.run(run())


@pytest.mark.parametrize("attempt", ESCAPES.values(), ids=ESCAPES.keys())
def test_no_program_gets_out(attempt: str, host: dict[str, Any]) -> None:
    async def both() -> tuple[ProgramResult, ProgramResult]:
        async with asyncio.timeout(60):
            return await asyncio.gather(
                sandbox.run(program_of(attempt, json.dumps(host)), SandboxLimits()),
                sandbox.run(NEIGHBOUR, SandboxLimits()),
            )

    tried, neighbour = asyncio.run(both())
    # A process that the kernel ended has said nothing; one that was not tried at all has failed to compile.
    assert "Error: invalid syntax" not in tried.errors
    assert tried.output.startswith("held") or tried.status != 0, tried
    assert "GOT" not in tried.output
    assert (neighbour.status, neighbour.output) == (0, "19\n"), neighbour


def test_there_are_sixty_attempts() -> None:
    assert len(ESCAPES) >= 60


def test_an_attempt_outside_of_the_sandbox_does_get_out(
    host: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The programs tell the truth: what is harmless succeeds here."""
    for name in ("read a secret file", "connect to a socket file", "see the process that started it"):
        exec(compile(program_of(ESCAPES[name], json.dumps(host)), name, "exec"), {})  # noqa: S102
        assert capfd.readouterr().out == "GOT OUT\n"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
        "while True: time.sleep(100)",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)",
    ],
    ids=["busy", "asleep", "deaf", "silent", "daemon"],
)
def test_abandoned_program_ends_with_all_its_processes(program: str, tmp_path: Path) -> None:
    started = _sandboxes()
    with pytest.raises(TimeoutError):
        ran(program, patience=1.0)
    assert _left(started) == set()


def test_program_abandoned_during_sandbox_creation_ends() -> None:
    async def give_up() -> None:
        for milliseconds in range(1, 41):
            task = asyncio.ensure_future(sandbox.run("import time; time.sleep(1000)", SandboxLimits()))
            await asyncio.sleep(milliseconds / 1000)
            task.cancel()
            async with asyncio.timeout(60):
                await asyncio.gather(task, return_exceptions=True)

    started = _sandboxes()
    asyncio.run(give_up())
    assert _left(started) == set()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_is_cut_off(stream: str) -> None:
    diagnostics = ran(f"import sys\nwhile True: sys.{stream}.write('x' * 4096)")
    assert diagnostics.flooded
    assert max(len(diagnostics.output), len(diagnostics.errors)) <= 3 * sandbox.OUTPUT_BYTES


def test_a_program_that_ends_leaves_no_process() -> None:
    started = _sandboxes()
    assert ran("import os, time\nif os.fork() == 0: time.sleep(1000)\nprint('done')").output == "done\n"
    assert _left(started) == set()


def test_the_tool_tells_what_was_printed_or_why_not() -> None:
    tool = Python(SandboxLimits())
    assert asyncio.run(tool.call("print(6 * 7)")) == "42"
    for program, output in {
        "1 / 0": "ZeroDivisionError: division by zero",
        "print(": "SyntaxError: '(' was never closed",
        "import os; os._exit(3)": "the program ended with status 3",
        "import os; os.kill(os.getpid(), 9)": "the program was ended by SIGKILL",
        "print('x' * 100_000)": "the program wrote more than 65536 bytes",
    }.items():
        with pytest.raises(ToolError) as error:
            asyncio.run(tool.call(program))
        assert str(error.value) == output


def test_two_programs_share_no_file() -> None:
    assert ran("open('/tmp/note', 'w').write('x')").status == 0
    assert "FileNotFoundError" in ran("open('/tmp/note')").errors


def test_sockets_that_a_program_may_need_are_made() -> None:
    program = "import socket\nfor family in (1, 2, 10): socket.socket(family).close()\nsocket.socketpair()"
    assert ran(f"{program}\nprint('made')").output == "made\n"


def test_without_a_filter_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="no system-call filter for `riscv64` machines"):
        Python(SandboxLimits())
    with pytest.raises(ConfigError):
        ran("print(1)")


def test_filter_that_is_not_in_force_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_TRIAL", "print(42); print(0)")
    with pytest.raises(ConfigError, match="the kernel does not filter system calls"):
        sandbox.check()


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as error:
        Python(SandboxLimits())
    assert "`bwrap` is not installed" in str(error.value)
    assert "apt install bubblewrap" in str(error.value)
    assert sandbox.look() == {
        "verdict": "fault",
        "what": "this machine has no sandbox, and programs written by a model run only in one:"
        " `bwrap` is not installed",
        "help": "run `apt install bubblewrap`",
    }


def test_doctor_says_what_allows_forbidden_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("bwrap", "unshare", "setpriv", "prlimit"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    result = sandbox.look()
    assert result["verdict"] == "fault"
    assert result["what"].endswith("No permissions to create new namespace")
    assert "sysctl user.max_user_namespaces" in result["help"]


def test_doctor_is_told_of_the_program_that_makes_sandboxes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", sandbox.__name__], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["verdict"] == "ok"
    assert loaded["what"].startswith("bubblewrap ")


def _sandboxes() -> set[str]:
    """Return the processes of sandboxes that live, by pid."""
    result: set[str] = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"--disable-userns" in (entry / "cmdline").read_bytes():
                result.add(entry.name)
        except OSError:
            continue
    return result


def _left(before: set[str]) -> set[str]:
    """Return the sandboxes that were not there before, after waiting for their end, which takes the kernel a moment."""
    deadline = time.monotonic() + 60
    while (left := _sandboxes() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
