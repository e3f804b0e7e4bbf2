"""Small tasks for tests, and dishonest ways to their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from recipes.agent.harbor.grading import CheckedTask
from recipes.agent.harbor.task_folder import TaskFolder

TOML: Final = """
schema_version = "1.4"
[task]
name = "made/{name}"
[environment]
memory_mb = 256
storage_mb = 64
network_mode = "no-network"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = {seconds}
"""
_GREET_TEST: Final = """#!/bin/bash
verdict=0
[ "$(cat /app/greeting 2>/dev/null)" = "good morning" ] && verdict=1
echo $verdict > /logs/verifier/reward.txt
"""
_DOUBLE_TEST: Final = """#!/bin/bash
cd /app
python3 -m unittest -q test_double
if [ $? = 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
_DOUBLE_CASES: Final = """
import sys, unittest
sys.path.insert(0, "/app")
import double


class Double(unittest.TestCase):
    def test_double(self):
        self.assertEqual([double.double(n) for n in (0, 3, -4)], [0, 6, -8])


if __name__ == "__main__":
    unittest.main()
"""


def write_files(folder: Path, files: dict[str, str]) -> Path:
    """Write text files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def greeting_task(folder: Path, *, seconds: float = 30.0, **files: str) -> Path:
    """Write a task that is done by a file, and graded by a script alone."""
    return write_files(
        folder / "greeting",
        {
            "task.toml": TOML.format(name="greeting", seconds=seconds),
            "instruction.md": "Write `good morning` into `/app/greeting`.\n",
            "environment/Dockerfile": "FROM rlinf/host\nWORKDIR /app\n",
            "solution/solve.sh": 'echo "good morning" > /app/greeting\n',
            "tests/test.sh": _GREET_TEST,
            **files,
        },
    )


def double_task(folder: Path, *, seconds: float = 30.0, **files: str) -> Path:
    """Write a task that is done by a function, which the tests load into their own process."""
    return write_files(
        folder / "double",
        {
            "task.toml": TOML.format(name="double", seconds=seconds),
            "instruction.md": "Repair `double` in `/app/double.py`.\n",
            "environment/Dockerfile": "FROM rlinf/host\nWORKDIR /app\nCOPY double.py .\n",
            "environment/double.py": "def double(n):\n    return n + n + 1\n",
            "solution/solve.sh": "printf 'def double(n):\\n    return 2 * n\\n' > /app/double.py\n",
            "tests/test.sh": _DOUBLE_TEST,
            "tests/test_double.py": _DOUBLE_CASES,
            **files,
        },
    )


def fit(task: TaskFolder, *, seconds: float = 0.1) -> CheckedTask:
    """Return the result of a check that found nothing."""
    return CheckedTask(
        name=task.name,
        digest=task.digest,
        solution=1.0,
        nothing=0.0,
        canary=0.0,
        mode="work",
        kinds=("txt",),
        running=0,
        seconds=seconds,
    )


_WRITE: Final = "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
# Each with the task that it is tried on.
FORGERIES: Final[dict[str, tuple[str, str]]] = {
    "a reward that is there before the tests": ("greeting", _WRITE),
    "a process that stays and writes the reward again and again": (
        "greeting",
        f"printf '%s' 'while true; do {_WRITE.replace(chr(39), chr(34))}; sleep 0.01; done' > /tmp/stay;"
        " setsid bash /tmp/stay >/dev/null 2>&1 &",
    ),
    "another shell": (
        "greeting",
        'cp /usr/bin/bash /usr/bin/real; printf \'#!/usr/bin/real\\n/usr/bin/real "$@"\\n'
        "echo 1 > /logs/verifier/reward.txt\\n' > /tmp/fake; chmod 755 /tmp/fake; mv /tmp/fake /usr/bin/bash",
    ),
    "a line that starts with every Python": (
        "double",
        "d=$(python3 -c 'import os; print(os.path.dirname(os.__file__))'); echo 'import os; os._exit(0)' >> $d/site.py",
    ),
    "a module of the work folder in place of the tests' own": (
        "double",
        "echo 'raise SystemExit(0)' > /app/unittest.py",
    ),
    "code under test that hangs": ("double", "echo 'while True: pass' > /app/double.py"),
    "a box that is broken": ("greeting", "rm -rf /usr/lib /lib /lib64 /usr/bin/python3 /logs /tests 2>/dev/null"),
    "code under test that writes the other file": (
        "double",
        'echo \'open("/logs/verifier/reward.json", "w").write("{\\"reward\\": 1}"); double = None\' > /app/double.py',
    ),
    "code under test that writes the reward and ends the script": (
        "double",
        'printf \'import os\\nopen("/logs/verifier/reward.txt", "w").write("1")\\nos.kill(os.getppid(), 9)\\n\''
        " > /app/double.py",
    ),
    "code under test that leaves a process which writes the reward": (
        "double",
        "printf 'import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    while True:\\n"
        '        open("/logs/verifier/reward.txt", "w").write("1")\\n        time.sleep(0.005)\\n'
        "def double(n): return 7\\n' > /app/double.py",
    ),
    "code under test that leaves a process which writes the reward after the tests, and ends": (
        "double",
        "printf 'import os, time\\ntests = os.getppid()\\nif os.fork() == 0:\\n    os.setsid()\\n"
        '    while os.path.exists(f"/proc/{tests}"):\\n        time.sleep(0.005)\\n    time.sleep(0.01)\\n'
        '    open("/logs/verifier/reward.txt", "w").write("1")\\n    os._exit(0)\\n'
        "def double(n): return 7\\n' > /app/double.py",
    ),
    "a file in place of the work folder": ("greeting", "rm -r /app; echo 'good morning' > /app"),
    "links in the work folder to the reward": (
        "greeting",
        "echo 1 > one; rm -rf /logs/verifier; ln -s /app /logs/verifier; ln -s /app/one /app/reward.txt",
    ),
}
# It cannot be told from a pass: `check` names the task.
FROM_WITHIN: Final = ("double", "printf 'import os\\nos._exit(0)\\n' > /app/double.py")
