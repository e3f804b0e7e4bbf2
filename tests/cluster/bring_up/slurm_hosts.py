"""A real Slurm on hosts made of namespaces: Debian's `slurmctld`, a `slurmd` on each node, `munged`, and one home.

Root on Linux only. All hosts share the home, as Slurm's nodes do; each has its own processes, network, /tmp and
/dev/shm. The network is `10.78.0.*`, in namespaces of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.cluster.spaces import MOUNTS, SWITCH, Space, die_with_parent, folders_below_tmp, why_not
from tests.waiting import until

_PROGRAMS: Final = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
_FOLDERS: Final = Path("/var/tmp")
_PREFIX: Final = "rlinf-slurm-"
_NETWORK: Final = "10.78.0"
_MASTER: Final = "ctl"
# `linuxproc` needs no control groups: what leaves the tree of a step stays alive. A real cluster's `cgroup` ends that,
# too; so this is the harder case.
_CONF: Final = """\
ClusterName=lab
SlurmctldHost={master}({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=9
"""
_TMP: Final = """
for folder in "${@:4}"; do
  mkdir -p "$1/kept$folder"
  mount --bind "$folder" "$1/kept$folder"
done
mount -t tmpfs -o size=4g tmpfs /tmp
chmod 1777 /tmp
for folder in "${@:4}"; do
  mkdir -p "$folder"
  mount --bind "$1/kept$folder" "$folder"
done
ip link set lo up
export SLURM_CONF="$1/../slurm.conf" HOME="$3"
"""
# bash stays the first process: it collects the orphans.
_NODE: Final = """
echo ready
read -r _ < "$1/plugged"
slurmd -D -N "$2" -f "$SLURM_CONF" 2> "$1/slurmd.err" &
wait
"""
_CONTROLLER: Final = """
echo ready
read -r _ < "$1/plugged"
slurmctld -D -f "$SLURM_CONF" 2> "$1/slurmctld.err" &
wait
"""


def why_no_slurm() -> str | None:
    """Return why there can be no Slurm on this machine, or None when there can be."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
    return why_not()


class SlurmHost:
    """A host of the cluster: a node, or the controller's."""

    def __init__(self, name: str, number: int, network: SlurmHosts) -> None:
        self.name = name
        self.address = f"{_NETWORK}.{number}"
        self.folder = network.folder / name
        self.folder.mkdir()
        (self.folder / "passwd").symlink_to(network.folder / "passwd")
        os.mkfifo(self.folder / "plugged")
        script = MOUNTS + _TMP + (_CONTROLLER if name == _MASTER else _NODE)
        arguments = (str(self.folder), name, str(network.home), *folders_below_tmp())
        spaces = ("net", "mount", "uts", "ipc", "pid")
        self._space = Space(script, arguments, spaces=spaces, log=self.folder / "init.log")
        self._network = network

    def plug(self, switch: int) -> None:
        """Connect it to the switch, and let its daemon start."""
        self._space.wait_ready()
        pid, port = self._space.pid, f"s{self.name}"
        _batch(switch, f"link add {port} type veth peer name eth0 netns {pid}", f"link set {port} master br0 up")
        lines = (f"addr add {self.address}/24 dev eth0", "link set eth0 up", f"route add default via {_NETWORK}.1")
        _batch(pid, *lines[: 2 if self.name == _MASTER else 3])
        (self.folder / "plugged").write_text("\n")

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on it."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 60, **options}
        enter = ["nsenter", "-t", str(self._space.pid), "-n", "-m", "-u", "-i", "-p", "--"]
        return subprocess.run([*enter, *argv], env=self._network.environment(), **settings)

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes by their own pids, those of the host and of Slurm left out."""
        listed: list[str] = self.run("ps", "-eo", "pid=,ppid=,stat=,args=", "--no-headers").stdout.splitlines()
        rows = [line.split(None, 3) for line in listed if line.strip()]
        return {
            int(pid): args
            for pid, _, state, args in rows
            if pid != "1"
            and not state.startswith("Z")
            and not args.startswith(("slurmd", "slurmctld", "slurmstepd", "ps -eo"))
        }

    def left(self) -> dict[str, Any]:
        """Return what is left on it of jobs: processes, and files in /tmp and /dev/shm."""
        files = self.run("find", "/tmp", "/dev/shm", "-mindepth", "1", "-xdev").stdout.split()
        return {"processes": list(self.processes().values()), "files": [file for file in files if _is_left(file)]}

    def end(self) -> None:
        self._space.end()


def _is_left(file: str) -> bool:
    folders = folders_below_tmp()
    return not any(file.startswith(folder) or folder.startswith(file) for folder in folders)


class SlurmHosts:
    """The controller and the nodes.

    Args:
        names: of the nodes.
        kill_wait: seconds between SIGTERM and SIGKILL to a job that is cancelled or over its time.
    """

    def __init__(self, names: Sequence[str], *, kill_wait: int = 30) -> None:
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_FOLDERS))
        self.folder.chmod(0o755)
        self.home = self.folder / "home"
        self.jobs = self.folder / "jobs"
        self._write_files(names, kill_wait)
        self._munge = subprocess.Popen(
            [
                *("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"),
                *(f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")),
            ],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._switch = Space(SWITCH, spaces=("net",), log=self.folder / "switch.log")
        self.master = SlurmHost(_MASTER, 1, self)
        self.nodes = [SlurmHost(name, number, self) for number, name in enumerate(names, 2)]
        try:
            self._switch.wait_ready()
            until(lambda: (self.folder / "munge.socket").exists(), "munged")
            for host in (self.master, *self.nodes):
                host.plug(self._switch.pid)
            idle = ["sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"]
            self.until(lambda: self.master.run(*idle, check=False).stdout.strip() == str(len(self.nodes)), "idle nodes")
        except BaseException:
            self.end()
            raise

    def environment(self) -> dict[str, str]:
        path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Return what `rlinf` answers on the controller's host."""
        return self.master.run(sys.executable, "-m", "rlinf_cli", *arguments, check=False, timeout=120)

    def submit(self, script: Path, *options: str) -> str:
        """Hand a script to `sbatch`, in the folder of the script; return the job's id."""
        folder = str(script.parent)
        return self.master.run("sbatch", "--parsable", f"--chdir={folder}", *options, str(script)).stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, as of `scontrol`."""
        return self.field(job, "JobState")

    def field(self, job: str, key: str) -> str:
        """Return a field of a job, as `scontrol show job` tells it."""
        words = self.master.run("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()[0].split()
        return next(value for name, _, value in (word.partition("=") for word in words) if name == key)

    def wait(self, job: str, seconds: float = 240.0) -> str:
        """Wait for the end of a job; return its state."""
        active = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING")
        self.until(lambda: self.state(job) not in active, f"the end of job {job}", seconds)
        return self.state(job)

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Return as soon as `condition` holds.

        Raises:
            AssertionError: it does not hold in time; with the ends of all logs.
        """
        try:
            until(condition, what, seconds, pause=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted([*self.folder.glob("*.log"), *self.jobs.glob("**/*.out")])
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def end(self) -> None:
        """End all of it, and leave nothing."""
        for host in (*self.nodes, self.master):
            host.end()
        self._switch.end()
        self._munge.send_signal(signal.SIGTERM)
        try:
            self._munge.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._munge.kill()
            self._munge.wait(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self, names: Sequence[str], kill_wait: int) -> None:
        for folder in (self.home, self.jobs, self.folder / "state", *(self.folder / f"spool-{name}" for name in names)):
            folder.mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        passwd = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        (self.folder / "passwd").write_text("\n".join([f"root:x:0:0:root:{self.home}:/bin/bash", *passwd, ""]))
        addresses = {_MASTER: f"{_NETWORK}.1"} | {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 2)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items()), ""]
        (self.folder / "hosts").write_text("\n".join(lines))
        nodes = [f"NodeName={name} NodeAddr={addresses[name]} CPUs=2 RealMemory=4000" for name in names]
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                folder=self.folder, network=_NETWORK, master=_MASTER, nodes="\n".join(nodes), kill_wait=kill_wait
            )
        )
        # Without, slurmd asks for control groups even if it tracks by processes alone.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _batch(pid: int, *commands: str) -> None:
    argv = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
    subprocess.run(argv, input="\n".join(commands), text=True, check=True)


def _sweep() -> None:
    """Remove the folders of runs that were killed. Their processes ended with them."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
