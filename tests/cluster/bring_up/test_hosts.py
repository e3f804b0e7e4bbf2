"""The hosts that other tests stand on: each is a machine of its own, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, sweep
from tests.cluster.spaces import folders_below_tmp

pytestmark = pytest.mark.netns
# What an empty /tmp holds: the way to this checkout, where that lies there.
KEPT = {Path(folder).parts[2] for folder in folders_below_tmp()}
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2")


def test_each_host_has_its_own_name_processes_tmp_and_home(hosts: Hosts) -> None:
    script = "hostname; echo $HOME; touch /tmp/mine /dev/shm/mine; ps ax | wc -l"
    seen = [hosts.control.run([*_SSH, host.name, script]) for host in hosts.hosts[:2]]
    names, homes, counts = zip(*(done.stdout.split() for done in seen), strict=True)
    assert names == ("trainer0", "trainer1")
    assert homes[0] != homes[1]
    assert all(int(count) < 12 for count in counts)
    assert set(hosts["render0"].run(["ls", "/tmp"]).stdout.split()) == KEPT
    for host in hosts.hosts[:2]:
        host.sh("rm /tmp/mine /dev/shm/mine")


def test_a_host_that_is_killed_is_gone_and_comes_back_empty(hosts: Hosts) -> None:
    host = hosts["render1"]
    host.sh("touch /tmp/before")
    host.kill()
    assert hosts.control.run([*_SSH, host.name, "true"]).returncode == 255
    host.restart()
    assert set(hosts.control.run([*_SSH, host.name, "ls /tmp"]).stdout.split()) == KEPT


def test_a_key_that_is_unknown_wrong_or_refused_keeps_one_out(hosts: Hosts) -> None:
    def said(name: str) -> str:
        return hosts.control.run([*_SSH, name, "true"]).stderr

    with hosts.control.known_hosts(without="render0"):
        assert "Host key verification failed" in said("render0")
    with hosts.control.known_hosts(wrong="render0"):
        assert "IDENTIFICATION HAS CHANGED" in said("render0")
        assert said("render1") == ""
    with hosts["render0"].refusing_keys():
        assert "Permission denied" in said("render0")
    assert said("render0") == ""


def test_nothing_stays_of_a_run_that_was_killed(hosts: Hosts) -> None:
    code = (
        "import time; from tests.cluster.hosts import Hosts\n"
        "made = Hosts(['alone'])\n"
        "print(made['alone'].pid, made.folder, flush=True)\n"
        "time.sleep(600)"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=30)
    end = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    sweep()
    assert not os.path.exists(folder)
