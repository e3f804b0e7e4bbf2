"""What can go wrong while a cluster is brought up over real ssh: each ends in time, and says node, phase and remedy."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import until

if TYPE_CHECKING:
    from tests.cluster.host import Host
    from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

PORTS = range(23000, 23200)


class Site:
    """Clusters of some of the hosts, from the control host; what a test leaves up is taken down after it."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.env = {"XDG_STATE_HOME": str(folder / "state")}

    def file(self, *names: str, interpreter: Path | str = sys.executable, **extra: str) -> str:
        """Return a file of these hosts; the last has `interpreter`."""
        last = len(names) - 1
        lines = [
            "cluster:",
            f"  num_nodes: {len(names)}",
            f"  ports: {PORTS.start}-{PORTS.stop - 1}",
            "  ssh: {connect_timeout: 3}",
            "  node_groups:",
            "    - label: g",
            "      node_ranks: all",
            f"      hosts: [{', '.join(names)}]",
            "      env_configs:",
            f"        - {{node_ranks: {last}, python_interpreter_path: {interpreter}}}",
        ]
        if last:
            lines.append(f"        - {{node_ranks: 0-{last - 1}, python_interpreter_path: {sys.executable}}}")
        path = self.folder / "site.yaml"
        path.write_text("\n".join([*lines, *(f"  {key}: {value}" for key, value in extra.items()), ""]))
        return str(path)

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env=self.env, timeout=280)

    def fails(self, file: str, *arguments: str) -> tuple[dict[str, Any], str]:
        """Return the one failure of an `up` that ends with status 3, and what it said to people."""
        done = self.rlinf("up", file, "--json", *arguments)
        assert done.returncode == 3, done.stderr
        assert "Traceback" not in done.stderr
        [failure] = json.loads(done.stdout)["failures"]
        assert failure["help"], failure
        for part in (failure["node"], failure["message"], failure["help"].splitlines()[0]):
            assert part in done.stderr
        return failure, done.stderr


@pytest.fixture
def site(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    # Hosts see this machine's files, but not its /tmp.
    folder = hosts.folder / f"site-{tmp_path_factory.mktemp('site').name}"
    folder.mkdir()
    made = Site(hosts, folder)
    yield made
    if (folder / "state").exists():
        made.rlinf("down", "--force")


def ours_on(host: Host) -> list[str]:
    # Some of Ray's processes give themselves a title, and name no folder in it.
    return [args for args in host.processes().values() if "/up-" in args or args.startswith("ray::")]


def test_a_wrong_and_an_unknown_host_key(site: Site) -> None:
    with site.hosts.control.known_hosts(wrong="render0"):
        failure, _ = site.fails(site.file("render0"))
    assert (failure["phase"], failure["message"]) == ("connect", "host key changed")
    assert "ssh-keygen -R render0" in failure["help"]
    with site.hosts.control.known_hosts(without="render0"):
        failure, _ = site.fails(site.file("render0"))
    assert (failure["phase"], failure["message"]) == ("connect", "unknown host key")
    assert "known_hosts" in failure["help"]


def test_a_refused_key(site: Site) -> None:
    site.hosts.control.forget_connections()
    with site.hosts["render0"].refusing_keys():
        failure, _ = site.fails(site.file("render0"))
    assert (failure["phase"], failure["message"], failure["exit_code"]) == ("connect", "key refused", 255)
    assert "ssh-copy-id" in failure["help"]


def test_a_host_that_never_answers_leaves_the_others_up(site: Site) -> None:
    site.hosts.control.forget_connections()
    with site.hosts["render1"].unplugged():
        file = site.file("render0", "render1")
        failure, said = site.fails(file, "--timeout", "90")
    assert (failure["rank"], failure["phase"], failure["message"]) == (1, "connect", "unreachable")
    assert ours_on(site.hosts["render0"])
    assert "stay up" in said
    done = site.rlinf("down")
    assert done.returncode == 0, done.stderr
    assert not ours_on(site.hosts["render0"])


def test_an_interpreter_that_is_missing_or_without_ray(site: Site) -> None:
    failure, _ = site.fails(site.file("render0", interpreter="/nowhere/bin/python"))
    assert (failure["phase"], failure["exit_code"]) == ("probe", 127)
    assert failure["message"] == "the interpreter `/nowhere/bin/python` does not exist"
    bare = site.hosts.interpreter("bare", ray=False)
    failure, _ = site.fails(site.file("render0", interpreter=bare))
    assert (failure["phase"], failure["message"]) == ("probe", f"`{bare}` has no ray")
    assert f"{bare} -m pip install" in failure["help"]


def test_a_taken_port(site: Site) -> None:
    host = site.hosts["render0"]
    with host.listening(PORTS.start + 1):
        failure, _ = site.fails(site.file("render0"))
    assert (failure["phase"], failure["message"]) == ("probe", f"port {PORTS.start + 1} is taken")
    assert re.match(r"pid \d+, `python", failure["why"])
    assert "cluster.ports" in failure["help"]
    assert not ours_on(host)


def test_a_second_up_while_ssh_drops_in_the_middle_of_the_first(site: Site) -> None:
    host = site.hosts["robot0"]
    file = site.file("robot0")
    with host.frozen():
        first = site.hosts.control.spawn(
            [sys.executable, "-m", "rlinf_cli", "up", file, "--json"],
            env=site.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        lock = site.folder / "state" / "rlinf" / "clusters" / "site.lock"
        until(lambda: lock.exists() and lock.read_text() != "", "the first `up`", seconds=60)
        second = site.rlinf("up", file)
        assert second.returncode == 1
        assert "another `rlinf up` or `rlinf down` is working" in second.stderr
        out, said = first.communicate(timeout=120)
    assert first.returncode == 3, said
    [failure] = json.loads(out)["failures"]
    assert failure["phase"] == "connect"
    assert failure["message"] in ("unreachable", "connection lost")


@pytest.mark.nightly
def test_a_host_that_dies_while_it_joins(site: Site) -> None:
    host = site.hosts["render1"]
    file = site.file("render0", "render1")
    run = site.hosts.control.spawn(
        [sys.executable, "-m", "rlinf_cli", "up", file, "--json"],
        env=site.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: bool(ours_on(host)), "the start on the second host", seconds=120)
        host.kill()
        out, said = run.communicate(timeout=150)
    finally:
        host.restart()
    assert run.returncode == 3, said
    [failure] = json.loads(out)["failures"]
    assert failure["rank"] == 1
    assert failure["phase"] in ("join", "verify")
    done = site.rlinf("up", file, "--json")
    assert done.returncode == 0, done.stderr
    assert [node["changed"] for node in json.loads(done.stdout)["nodes"]] == [False, True]


@pytest.mark.nightly
def test_ssh_that_drops_while_a_node_joins(site: Site) -> None:
    host = site.hosts["render1"]
    file = site.file("render0", "render1")
    run = site.hosts.control.spawn(
        [sys.executable, "-m", "rlinf_cli", "up", file, "--json", "--timeout", "90"],
        env=site.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until(lambda: bool(ours_on(host)), "the start on the second host", seconds=120)
    with host.unplugged():
        out, said = run.communicate(timeout=150)
    assert run.returncode == 3, said
    [failure] = json.loads(out)["failures"]
    assert failure["rank"] == 1
    assert failure["phase"] in ("join", "verify")
    assert failure["help"]
    done = site.rlinf("up", file, "--json")
    assert done.returncode == 0, done.stderr
    assert all(node["up"] for node in json.loads(done.stdout)["nodes"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first_line", "message"),
    [
        ("import sys; sys.version_info = (3, 12, 1, 'final', 0)", "is Python 3.12.1, the head runs"),
        (
            "import importlib.metadata as m\n"
            "m.version = (lambda v: lambda n: '2.59.0' if n == 'ray' else v(n))(m.version)",
            "has ray 2.59.0, the head runs",
        ),
    ],
    ids=["python", "ray"],
)
def test_an_interpreter_of_another_version(site: Site, first_line: str, message: str) -> None:
    other = site.hosts.interpreter(f"other-{len(first_line)}", first_line=first_line)
    failure, _ = site.fails(site.file("render0", "render1", interpreter=other))
    assert (failure["rank"], failure["phase"]) == (1, "probe")
    assert message in failure["message"]
    assert not ours_on(site.hosts["render1"])


@pytest.mark.nightly
def test_a_full_disk(site: Site) -> None:
    host = site.hosts["render0"]
    with host.small_disk(8):
        failure, _ = site.fails(site.file("render0"))
    assert failure["message"] == "the disk is full"
    assert "free some space" in failure["help"]
    with host.small_shm(16):
        failure, _ = site.fails(site.file("render0"))
    assert failure["message"] == "/dev/shm is full or too small"


@pytest.mark.nightly
def test_failing_ray_reports_its_exit_code_and_last_lines(site: Site) -> None:
    breaks = "import os, sys\nif 'ray.scripts.scripts' in sys.orig_argv: os.write(2, b'last words'); os._exit(9)"
    failure, said = site.fails(site.file("render0", interpreter=site.hosts.interpreter("breaks", first_line=breaks)))
    assert (failure["phase"], failure["exit_code"]) == ("start head", 9)
    assert "last words" in said
    assert site.hosts["render0"].run(["ls", "/tmp"]).stdout == ""


@pytest.mark.nightly
def test_rollback_takes_down_what_this_run_started(site: Site) -> None:
    file = site.file("render0", "render1", interpreter="/nowhere/python")
    failure, _ = site.fails(file, "--rollback")
    assert failure["rank"] == 1
    assert not ours_on(site.hosts["render0"])
    assert "no cluster is up" in site.rlinf("down").stdout


@pytest.mark.nightly
def test_down_with_the_head_gone_and_a_node_unreachable(site: Site) -> None:
    names = ("render0", "render1", "robot0")
    file = site.file(*names)
    done = site.rlinf("up", file)
    assert done.returncode == 0, done.stderr
    site.hosts["render0"].restart()
    site.hosts.control.forget_connections()
    with site.hosts["robot0"].unplugged():
        done = site.rlinf("down", "--json")
    assert done.returncode == 3
    [failure] = json.loads(done.stdout)["failures"]
    assert failure["rank"] == 2
    assert not ours_on(site.hosts["render1"])
    done = site.rlinf("down", "--json")
    assert done.returncode == 0, done.stderr
    assert [node["host"] for node in json.loads(done.stdout)["nodes"]] == ["robot0"]
    assert not ours_on(site.hosts["robot0"])


@pytest.mark.nightly
def test_a_running_job_is_asked_about(site: Site) -> None:
    file = site.file("render0")
    assert site.rlinf("up", file).returncode == 0
    host = site.hosts["render0"]
    code = "import time, rlinf_core; rlinf_core.Cluster(); print('ready', flush=True); time.sleep(600)"
    job = host.spawn([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    done = site.rlinf("down")
    assert done.returncode == 1
    assert "1 job running on cluster site" in done.stderr
    assert ours_on(host)
    assert site.rlinf("down", "--force").returncode == 0
    assert not ours_on(host)
    job.kill()
    job.communicate()


@pytest.mark.nightly
def test_ctrl_c_ends_at_once_and_the_same_command_finishes(site: Site) -> None:
    file = site.file("render0", "render1")
    run = site.hosts.control.spawn(
        [sys.executable, "-m", "rlinf_cli", "up", file], env=site.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until(lambda: bool(ours_on(site.hosts["render0"])), "the start of the head", seconds=60)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=20)
    assert run.returncode == 130, said
    assert "nodes that are up stay up" in said
    done = site.rlinf("up", file)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_self_started_and_hand_started_nodes_join(site: Site) -> None:
    path = site.folder / "alone.yaml"
    path.write_text(f"cluster:\n  num_nodes: 2\n  ports: {PORTS.start}-{PORTS.stop - 1}\n")
    head, second = site.hosts["render0"], site.hosts["render1"]
    rlinf = [sys.executable, "-m", "rlinf_cli"]
    token = "/tmp/token"
    joins = second.spawn(
        [*rlinf, "up", str(path), "--node-rank", "1", "--head-address", head.address, "--token-file", token],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = joins.communicate(timeout=60)
    assert joins.returncode == 1
    assert "this node has no token of the cluster" in said
    done = head.run([*rlinf, "up", str(path), "--node-rank", "0"], timeout=120)
    assert "is up" in done.stdout
    secret = head.sh("cat ~/.local/state/rlinf/clusters/alone.token")
    second.run(["sh", "-c", f"umask 077; cat > {token}"], input=secret)
    done = second.run(
        [*rlinf, "up", str(path), "--node-rank", "1", "--head-address", head.address, "--token-file", token],
        timeout=120,
    )
    assert "is up" in done.stdout
    # The record is the head's; on the other one its own Ray tells.
    for host in (head, second):
        seen = json.loads(host.run([*rlinf, "status", "--json"], timeout=120).stdout)
        assert (seen["cluster"], seen["whole"]) == ("alone", True)
        assert [node["state"] for node in seen["nodes"]] == ["up", "up"]
    job = f"load_job({str(path)!r}).cluster"
    code = f"from rlinf_core import Cluster, load_job; print(Cluster(cluster_cfg={job}).num_nodes)"
    assert head.run([sys.executable, "-c", code], timeout=120).stdout.strip() == "2"
    for host, rank in ((second, "1"), (head, "0")):
        assert host.run([*rlinf, "down", str(path), "--node-rank", rank], timeout=60).returncode == 0
        assert not ours_on(host)
