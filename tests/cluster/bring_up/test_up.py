"""rlinf up on hosts: by command, by hand, and what a test host is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.hosts import Hosts, sweep
from tests.cluster.spaces import folders_below_tmp
from tests.waiting import until

if TYPE_CHECKING:
    from tests.cluster.host import Host
    from tests.cluster.hosts import Hosts


FILE = """\
cluster:
  num_nodes: 5
  ports: 21000-21199
  node_groups:
    - label: train
      node_ranks: 0-1
      hosts: trainer[0-1]
      env_configs:
        - node_ranks: 0-1
          python_interpreter_path: {ours}
          env_vars: [{{WHO: "a $(touch {made}) b"}}, {{CPATH: /opt/one}}]
    - label: "sim;$(touch>{made})"
      node_ranks: 2-3
      hosts: render[0-1]
      env_configs:
        - {{node_ranks: 2-3, python_interpreter_path: {theirs}, env_vars: [{{WHO: "`touch {made}`"}}]}}
    - label: franka
      node_ranks: 4
      hosts: robot0
      hardware: {{type: Franka, configs: [{{node_rank: 4, robot_ip: 127.0.0.9}}]}}
"""
# Run on the head: what a recipe does, in small.
DRIVER = """\
import json, os, sys
from rlinf_core import Cluster, NodePlacementStrategy, Worker, load_job

class Seer(Worker):
    def see(self):
        own = [os.environ.get(name) for name in ("WHO", "CPATH", "RLINF_NODE_RANK")]
        return self.worker_info.node_id, sys.executable, *own

    def listeners(self):
        return listeners()

def listeners():
    # (address, port) of each TCP socket on which this process listens; an address of IPv6 as its hex
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    found = []
    for table in ("tcp", "tcp6"):
        for row in map(str.split, open(f"/proc/net/{table}").readlines()[1:]):
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                address, port = row[1].split(":")
                four = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1]) if table == "tcp" else address
                found.append((four, int(port, 16)))
    return found

if __name__ == "__main__":
    job = load_job(sys.argv[1])
    with Cluster(cluster_cfg=job.cluster) as cluster:
        labels = [group.label for group in job.cluster.node_groups]
        seen, listening = [], []
        for number, (label, nodes) in enumerate(zip(labels, ([0, 1], [0, 1], [0]), strict=True)):
            group = Seer.create_group().launch(cluster, NodePlacementStrategy(nodes, label), name=f"seer{number}")
            seen += group.see().wait()
            listening += group.listeners().wait()
        # The driver listens, too, once it has spoken to its workers.
        print(json.dumps([seen, [listeners(), *listening]]))
    sys.exit(7)
"""


ON_HEAD = """
import sys
from rlinf_cli.cluster.node import node_requests
from rlinf_core.node import cluster_records
sys.exit(node_requests.run_on_head(cluster_records.recorded("five"), sys.argv[1:]))
"""


class Five:
    """The cluster of `FILE`, from the control host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "five"
        self.folder.mkdir()
        self.made = self.folder / "made-by-a-shell"
        self.theirs = hosts.interpreter("sim")
        self.file = self.folder / "five.yaml"
        self.file.write_text(FILE.format(ours=sys.executable, theirs=self.theirs, made=self.made))
        self.state = self.folder / "state"
        self.env = {"XDG_STATE_HOME": str(self.state)}

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env=self.env, timeout=280)

    def up(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        done = self.rlinf("up", str(self.file), "--json", "--timeout", "90", *arguments)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def on_head(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a script on the head, as its driver."""
        return self.hosts.control.run([sys.executable, "-c", ON_HEAD, *arguments], env=self.env)

    @property
    def token(self) -> str:
        return (self.state / "rlinf" / "clusters" / "five.token").read_text()


@pytest.fixture(scope="module")
def foreign(hosts: Hosts) -> Iterator[tuple[Host, str]]:
    """A Ray that somebody else started on one of the hosts, by the ports that Ray likes best."""
    host = hosts["trainer1"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=6379"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=80000000", "--num-cpus=1"]
    command += ["--temp-dir=/tmp/foreign"]
    log = hosts.folder / "foreign.log"
    with log.open("w") as file:
        process = host.spawn(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    until(lambda: "Ray runtime started" in log.read_text(), "the foreign Ray", seconds=90)
    yield host, "/tmp/foreign"
    process.kill()
    process.wait()


def of_ray(host: Host, folder: str) -> dict[int, str]:
    return {pid: args for pid, args in host.processes().items() if folder in args}


@pytest.fixture(scope="module")
def five(hosts: Hosts, foreign: Any) -> Iterator[Five]:
    made = Five(hosts)
    code, report, said = made.up()
    assert code == 0, said
    assert report["ok"]
    yield made
    made.rlinf("down", "--force")


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_all_nodes_are_up_under_their_ranks(five: Five) -> None:
    code, report, said = five.up()
    assert code == 0, said
    assert [(node["rank"], node["host"], node["up"], node["changed"]) for node in report["nodes"]] == [
        (rank, host, True, False) for rank, host in enumerate(("trainer0", "trainer1", "render0", "render1", "robot0"))
    ]
    assert report["address"] == f"{five.hosts['trainer0'].address}:21000"
    assert [node["address"] for node in report["nodes"]] == [host.address for host in five.hosts.hosts]


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_ray_listens_within_the_files_ports_and_shares_no_folder(five: Five) -> None:
    # One host has the Ray of somebody else besides.
    for host in five.hosts.hosts:
        if host.name != "trainer1":
            ports = {int(line.split()[3].rpartition(":")[2]) for line in host.sh("ss -ltnH").splitlines()}
            assert ports - {22} <= set(range(21000, 21200)), host.name
        # Ray gives its own folders to everybody, again with each worker: the one around them keeps others out.
        assert host.sh("stat -c '%U %a' /tmp/rlinf-0") == "root 700\n"


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_driver_on_the_head_reaches_all_interpreters(five: Five) -> None:
    script = five.folder / "driver.py"
    script.write_text(DRIVER)
    done = five.on_head(str(script), str(five.file))
    assert done.returncode == 7, done.stderr
    seen, (of_driver, *of_workers) = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = sys.executable, str(five.theirs)
    assert [node for node, *_ in seen] == [0, 1, 2, 3, 4]
    assert [python for _, python, *_ in seen] == [ours, ours, theirs, theirs, ours]
    whos = [who for _, _, who, *_ in seen]
    assert [path for *_, path, _ in seen] == ["/opt/one"] * 2 + [None] * 3
    assert (whos[0], whos[2]) == (f"a $(touch {five.made}) b", f"`touch {five.made}`")
    assert [rank for *_, rank in seen] == ["0", "1", "2", "3", "4"]
    assert not five.made.exists()
    # Ray's core of each process listens everywhere, which nobody can change; the data plane at the node's address only.
    data = range(21139, 21200)
    for host, result in zip([five.hosts.hosts[0], *five.hosts.hosts], [of_driver, *of_workers], strict=True):
        assert [address for address, port in result if port in data] == [host.address]
        assert all(port in range(21000, 21200) for _, port in result)


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_ctrl_c_here_interrupts_the_driver_there(five: Five) -> None:
    script = five.folder / "waits.py"
    script.write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    run = five.hosts.control.spawn(
        [sys.executable, "-c", ON_HEAD, str(script)], env=five.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "waits\n"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "KeyboardInterrupt" in said
    assert not any("waits.py" in args for args in five.hosts["trainer0"].processes().values())


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_the_token_is_in_no_process_list_and_no_log(five: Five) -> None:
    token = five.token
    for host in five.hosts.hosts:
        assert not any(token in args for args in host.processes().values())
        result = host.run(["grep", "-rl", token, "/tmp"], check=False).stdout.split()
        assert [Path(path).name for path in result] == ["token"]
        assert host.run(["stat", "-c", "%a", *result]).stdout.strip() == "600"
    shown = five.rlinf("up", str(five.file), "--dry-run")
    assert token not in shown.stdout + shown.stderr


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_a_client_without_the_token_is_refused(five: Five) -> None:
    code = (
        "from ray._raylet import GcsClient; import sys\n"
        "try: print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    address = f"{five.hosts['trainer0'].address}:21000"
    for env in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        variables = [f"{name}={value}" for name, value in env.items()]
        said = five.hosts["robot0"].run(["env", *variables, sys.executable, "-c", code, address]).stdout
        assert "5" not in said.split(), said
        assert "auth" in said.lower(), said


@pytest.mark.netns
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_code_is_shipped_where_it_is_asked_for(hosts: Hosts) -> None:
    folder = hosts.folder / "sync"
    (folder / "code" / "of_the_users").mkdir(parents=True)
    (folder / "code" / "of_the_users" / "__init__.py").write_text("")
    file = folder / "sync.yaml"
    file.write_text("cluster: {num_nodes: 1, hosts: robot0, ports: 24000-24199}\n")
    env = {"XDG_STATE_HOME": str(folder / "state")}
    done = hosts.control.rlinf("up", str(file), "--sync", str(folder / "code"), "--timeout", "90", env=env)
    assert done.returncode == 0, done.stderr
    code = (
        "import sys\nfrom rlinf_cli.cluster.node import node_requests as driver\n"
        "from rlinf_core.node import cluster_records\n"
        "see = 'import of_the_users, rlinf_core; print(of_the_users.__file__, rlinf_core.__file__)'\n"
        "sys.exit(driver.run_on_head(cluster_records.recorded('sync'), ['-c', see]))"
    )
    done = hosts.control.run([sys.executable, "-c", code], env=env)
    assert done.returncode == 0, done.stderr
    assert [".code/" in path for path in done.stdout.split()] == [True, True]
    assert hosts.control.rlinf("down", env=env).returncode == 0
    assert "of_the_users" not in hosts["robot0"].sh("find /tmp")


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_what_contradicts_the_file_is_named_and_nothing_changes(five: Five) -> None:
    before = [host.processes() for host in five.hosts.hosts]
    done = five.rlinf("up", str(five.file), "cluster.ports=22000-22199")
    assert done.returncode == 1
    assert "`ports` is `21000-21199`, the file says `22000-22199`" in done.stderr
    for host, processes in zip(five.hosts.hosts, before, strict=True):
        assert set(of_ray(host, "/up-")) <= set(processes)


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_a_killed_raylet_is_repaired_and_nothing_else_touched(five: Five) -> None:
    victim = five.hosts["render1"]
    raylets = [pid for pid, args in victim.processes().items() if "/raylet/raylet" in args]
    assert len(raylets) == 1
    victim.run(["kill", "-9", str(raylets[0])])
    until(lambda: not of_ray(victim, "/up-"), "the end of the node's Ray", seconds=90)
    code, report, said = five.up()
    assert code == 0, said
    assert [node["rank"] for node in report["nodes"] if node["changed"]] == [3]
    # The head goes on listing the dead raylet beside the new one, which a driver does not count.
    script = five.folder / "counts.py"
    script.write_text(
        "import sys\nfrom rlinf_core import Cluster, load_job\n"
        "print(Cluster(cluster_cfg=load_job(sys.argv[1]).cluster).num_nodes)"
    )
    counted = five.on_head(str(script), str(five.file))
    assert counted.stdout.splitlines()[-1:] == ["5"], counted.stderr
    done = five.rlinf("status", "--json")
    assert (done.returncode, [node["state"] for node in json.loads(done.stdout)["nodes"]]) == (0, ["up"] * 5)


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_down_is_proven_and_twice_is_fine(five: Five, foreign: tuple[Host, str]) -> None:
    host, folder = foreign
    theirs = of_ray(host, folder)
    assert theirs, (host.folder.parent / "foreign.log").read_text()
    done = five.rlinf("down", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert all(node["found"] and not node["left"] for node in report["nodes"])
    for item in five.hosts.hosts:
        assert not of_ray(item, "/up-"), item.name
        assert item is host or not of_ray(item, "ray"), item.name
        assert "rlinf" not in item.run(["ls", "/tmp", "/dev/shm"]).stdout
    assert of_ray(host, folder).keys() >= theirs.keys()
    again = five.rlinf("down")
    assert (again.returncode, again.stdout) == (0, "no cluster is up\n")
    assert five.rlinf("down", str(five.file)).returncode == 0


# What an empty /tmp holds: the way to this checkout, where that lies there.
KEPT = {Path(folder).parts[2] for folder in folders_below_tmp()}
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2")


@pytest.mark.netns
def test_each_host_has_its_own_name_processes_tmp_and_home(hosts: Hosts) -> None:
    script = "hostname; echo $HOME; touch /tmp/mine /dev/shm/mine; readlink /proc/self/ns/pid"
    seen = [hosts.control.run([*_SSH, host.name, script]) for host in hosts.hosts[:2]]
    names, homes, processes = zip(*(done.stdout.split() for done in seen), strict=True)
    assert names == ("trainer0", "trainer1")
    assert homes[0] != homes[1]
    assert len({*processes, os.readlink("/proc/self/ns/pid")}) == 3
    assert set(hosts["render0"].run(["ls", "/tmp"]).stdout.split()) == KEPT
    for host in hosts.hosts[:2]:
        host.sh("rm /tmp/mine /dev/shm/mine")


@pytest.mark.netns
def test_a_host_that_is_killed_is_gone_and_comes_back_empty(hosts: Hosts) -> None:
    host = hosts["render1"]
    host.sh("touch /tmp/before")
    host.kill()
    assert hosts.control.run([*_SSH, host.name, "true"]).returncode == 255
    host.restart()
    assert set(hosts.control.run([*_SSH, host.name, "ls /tmp"]).stdout.split()) == KEPT


@pytest.mark.netns
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


@pytest.mark.netns
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
