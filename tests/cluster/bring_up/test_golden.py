"""What docs/dev/whole-run.md shows of a whole run is what its commands print, on the hosts that it speaks of.

`REWRITE_PAGES=1 pytest tests/cluster/bring_up/test_golden.py` writes what was printed into the page instead.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import seer
from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(600)]

REWRITE = bool(os.environ.get("REWRITE_PAGES"))
PAGE = Path(__file__).parents[3] / "docs" / "dev" / "whole-run.md"
SECTION = "## A whole run\n"
ROBOT = "10.10.10.1"
PYTHON = "/opt/venv/rlinf/bin/python"
RUN = re.compile(r"```\n\$ rlinf (?P<arguments>.*)\n(?P<printed>(?:.*\n)*?)```\n")
YAML = re.compile(r"```yaml\n((?:.*\n)*?)```\n")
# What differs from run to run, and from machine to machine.
FIGURES = (
    (re.compile(r"\d+ +\d[\d.]* GiB"), "CORES  MEMORY"),
    (re.compile(r"\d[\d.]* (steps/s|s/step)"), "# steps/s"),
    (re.compile(r"\d[\d.]* (s|ms)\b"), r"# \1"),
    (re.compile(r"\d[\d.]* [GM]B/s"), "# B/s"),
    (re.compile(r"\d+:\d\d"), "#:##"),
    (re.compile(r"(success|return) -?\d[\d.]*(e-?\d+)?"), r"\1 #"),
    (re.compile(r"embodied-\d{8}-\d{6}"), "embodied-DAY-TIME"),
    (re.compile(r"fingerprint [0-9a-f]{16}"), "fingerprint #"),
    (re.compile(r"\b\d+\.\d+\.\d+(?!\.)\b"), "VERSION"),
    (re.compile(r"\d+ processes ended"), "# processes ended"),
    (re.compile(r" {2,}"), "  "),
)
# All nodes are worked on at once, links are told as they were measured, and what is waited for is told when it is long.
ANY_ORDER = re.compile(r"(node \d+ \(\w+\): |ok +link )")
NOW_AND_THEN = re.compile(r"(still )?waiting for ")


def stable_lines(printed: str) -> list[str]:
    """Return the lines of an output without what differs from run to run; those that come in any order are at the
    end.
    """
    for pattern, stands_for in FIGURES:
        printed = pattern.sub(stands_for, printed)
    lines = [line.rstrip() for line in printed.splitlines() if not NOW_AND_THEN.match(line)]
    moved = sorted(line for line in lines if ANY_ORDER.match(line))
    return [line for line in lines if not ANY_ORDER.match(line)] + moved


class Lab:
    """The machines of the page: what it says is below /opt and /mnt is there, on each of them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "golden"
        self.env = {"XDG_STATE_HOME": str(self.folder / "state")}
        self.shared = self.folder / "shared"
        self.shared.mkdir(parents=True)
        venvs = hosts.interpreter("sim").parents[2]
        hosts.interpreter("rlinf")
        page = PAGE.read_text()
        machines, job = YAML.findall(page)[0], YAML.findall(page[page.index(SECTION) :])[0]
        (self.shared / "machines.yaml").write_text(machines)
        (self.shared / "lab.yaml").write_text(f"extends: machines.yaml\n{job}")
        self._everywhere("mount -t tmpfs tmpfs /opt; mkdir /opt/venv")
        self._everywhere(f"mount --bind {venvs} /opt/venv; mount --bind {self.shared} /mnt")

    def _everywhere(self, script: str) -> None:
        for host in self.hosts.hosts:
            host.sh(script)
        self.hosts.control.run(["sh", "-ec", script], check=True)

    def rlinf(self, arguments: str) -> str:
        """Return all that a command prints; it ends well."""
        words = arguments.split()
        # A busy machine is not what is tested; the page is written on another.
        patience = ["--timeout", "240"] if words[0] == "up" and not REWRITE else []
        done = self.hosts.control.run(
            ["env", "-C", "/mnt", PYTHON, "-m", "rlinf_cli", *words, *patience],
            env=self.env,
            capture_output=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def printed(self, arguments: str) -> str:
        """Return the same; links are measured again where the machine was too busy for them."""
        printed, tries = self.rlinf(arguments), 1
        while " slow: " in printed and tries < 3:
            printed, tries = self.rlinf(arguments), tries + 1
        return printed

    def end(self) -> None:
        self.rlinf("down --force")
        # A connection that is held open may still be in there.
        self._everywhere("umount --lazy /mnt /opt/venv /opt")


@pytest.fixture(scope="module")
def lab(hosts: Hosts) -> Iterator[Lab]:
    made = Lab(hosts)
    robot = hosts["robot0"]
    with robot.second_address(ROBOT):
        command = [PYTHON, "-m", "recipes.embodied.robots.controller.simulated_controller"]
        controller = robot.spawn(
            [*command, "--host", ROBOT, "--speed", "20"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert controller.stdout is not None
        assert controller.stdout.readline()
        try:
            yield made
        finally:
            for pid, words in robot.processes().items():
                if "simulated_controller" in words:
                    robot.run(["kill", str(pid)], check=False)
            controller.communicate(timeout=60)
            made.end()


def test_processes_on_every_host_have_what_was_shown_before(lab: Lab) -> None:
    file = lab.shared / "seen.yaml"
    file.write_text(
        "extends: machines.yaml\ncluster: {component_placement: {seer: {node_group: node, placement: all}}}\n"
    )
    lab.rlinf("up lab.yaml")
    assert seer.compare(lab.hosts.control, "lab", file, PYTHON, lab.env) == 5
    lab.rlinf("down")


def test_the_page_shows_what_a_run_prints(lab: Lab) -> None:
    page = PAGE.read_text()
    start = page.index(SECTION)
    shown = list(RUN.finditer(page, start))
    assert [run["arguments"].split()[0] for run in shown] == ["doctor", "up", "status", "inspect", "train", "down"]
    printed = [lab.printed(run["arguments"]) for run in shown]
    if REWRITE:
        for run, text in reversed(list(zip(shown, printed, strict=True))):
            page = page[: run.start("printed")] + text + page[run.end("printed") :]
        PAGE.write_text(page)
        pytest.skip("the page was written anew: look at what has changed, and commit it")
    for run, text in zip(shown, printed, strict=True):
        assert stable_lines(text) == stable_lines(run["printed"]), f"rlinf {run['arguments']} printed\n{text}"
