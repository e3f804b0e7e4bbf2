"""The job script of Slurm, run with stand-ins for Slurm's programs: who ends whom, and with which exit status."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.schedulers.scheduler_options import SchedulerOption
from rlinf_cli.cluster.schedulers.slurm import slurm
from tests.waiting import until

# A step is named by what its bash is called: `node` or `driver`. A node ends when it is asked to, by `scancel`.
SRUN = """\
#!/bin/bash
for word in "$@"; do
  case $word in
    hostname) echo 10.0.0.1; exit 0 ;;
    driver) echo "driver ${*: -1}" >> "$LOG"; exec bash -c "$DRIVER" ;;
    node) echo node >> "$LOG"; exec bash -c "$NODE" ;;
  esac
done
"""
NODE = (
    """echo $$ > "$FOLDER/node.pid"; trap 'echo "node ended" >> "$LOG"; exit 143' TERM; while :; do sleep 0.05; done"""
)
SCANCEL = """\
#!/bin/bash
echo "scancel $*" >> "$LOG"
while [[ ! -s $FOLDER/node.pid ]]; do sleep 0.02; done
kill -TERM "$(cat "$FOLDER/node.pid")"
"""
SCONTROL = '#!/bin/bash\necho "scontrol $*" >> "$LOG"\n'


class Ended(NamedTuple):
    code: int
    log: list[str]
    left: list[str]


class Job:
    """A job of one node, from the script of its template."""

    def __init__(self, folder: Path, script: str, *, driver: str, node: str = NODE) -> None:
        self.log = folder / "log"
        self.home = folder / "home"
        self.home.mkdir()
        for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        env = {"HOME": str(self.home), "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        env |= {"LOG": str(self.log), "FOLDER": str(folder), "DRIVER": driver, "NODE": node}
        (folder / "job.sh").write_text(script)
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sh")], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def ended(self) -> Ended:
        self.process.communicate(timeout=60)
        return Ended(self.process.returncode, self.log.read_text().splitlines(), os.listdir(self.home))


@pytest.fixture
def start(tmp_path: Path, make_nodes: Callable[..., tuple[NodeTarget, ...]]) -> Callable[..., Job]:
    def start(*wishes: str, **commands: str) -> Job:
        asked = [SchedulerOption(None, key, None) for key in wishes]
        return Job(tmp_path, slurm("lab", "lab.yaml", make_nodes(1), (), asked), **commands)

    return start


@pytest.mark.parametrize("code", [0, 2, 138])
def test_the_drivers_end_is_the_jobs(start: Callable[..., Job], code: int) -> None:
    ended = start(driver=f"exit {code}").ended()
    assert ended.code == code
    assert [line for line in ended.log if line.startswith("sc")] == ["scancel --signal=TERM 7"]
    assert ended.log[-1] == "node ended"
    assert ended.left == []


def test_a_node_that_ends_first_fails_the_job(start: Callable[..., Job]) -> None:
    driver = """trap 'exit 143' TERM; echo $$ > "$FOLDER/node.pid"; while :; do sleep 0.05; done"""
    ended = start(driver=driver, node="exit 1").ended()
    assert (ended.code, ended.left) == (3, [])
    assert "scancel --signal=TERM 7" in ended.log


def test_a_job_that_is_warned_is_requeued_after_its_nodes(start: Callable[..., Job]) -> None:
    ended = start("requeue", driver="exit 138").ended()
    assert ended.code == 138
    assert ended.log[-2:] == ["node ended", "scontrol requeue 7"]


@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_job_that_was_not_warned_is_not_requeued(start: Callable[..., Job], code: int) -> None:
    ended = start("requeue", driver=f"exit {code}").ended()
    assert ended.code == code
    assert not [line for line in ended.log if line.startswith("scontrol")]


def test_a_script_that_is_asked_to_end_waits_for_the_driver(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(driver="""touch "$FOLDER/began"; while [[ ! -e $FOLDER/saved ]]; do sleep 0.05; done; exit 143""")
    until((tmp_path / "began").exists, "the driver")
    job.process.send_signal(signal.SIGTERM)
    # As when Slurm asks twice.
    job.process.send_signal(signal.SIGTERM)
    (tmp_path / "saved").touch()
    ended = job.ended()
    assert ended.code == 143
    assert ended.log[-1] == "node ended"
