"""Jobs of `rlinf up --print slurm` under a real Slurm: each ends as it should, and leaves nothing on its nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.cluster.bring_up.slurm_hosts import SlurmHost, SlurmHosts, why_no_slurm

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(1800)]

LAB = """\
recipe: embodied
cluster:
  num_nodes: 2
  node_groups:
    - {label: trainer, node_ranks: 0}
    - {label: sim, node_ranks: 1}
  component_placement: {"actor,rollout": {node_group: trainer, placement: 0}, env: {node_group: sim, placement: 0}}
env:
  train:
    {env_type: franka_kin, task: pick, total_num_envs: 8, max_episode_steps: 10, max_steps_per_rollout_epoch: 10}
actor: {global_batch_size: 80}
runner:
  max_steps: 4
  val_check_interval: -1
  logger: {log_path: runs}
"""
ALONE = LAB.replace("num_nodes: 2", "num_nodes: 1").replace("    - {label: sim, node_ranks: 1}\n", "")
ALONE = ALONE.replace("node_group: sim", "node_group: trainer")
# Two nodes in one component of the job.
THREE = LAB.replace("num_nodes: 2", "num_nodes: 3").replace("node_ranks: 1}", "node_ranks: 1-2}")
THREE = THREE.replace("{node_group: sim, placement: 0}", "{node_group: sim, placement: 0-1}")
FOREVER = "runner.max_steps=1000000"
# The cache of torch's compiler: of the user, and kept from job to job.
KEPT = re.compile(r"/tmp/torchinductor_\w+$")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmHosts]:
    reason = why_no_slurm()
    if reason:
        pytest.skip(reason)
    made = SlurmHosts(["n1", "n2", "n3"])
    try:
        yield made
    finally:
        made.end()


class Job:
    """A job of a file."""

    def __init__(self, slurm: SlurmHosts, name: str, text: str, *arguments: str) -> None:
        self.slurm = slurm
        self.folder = slurm.jobs / name
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "lab.yaml"
        file.write_text(text)
        printed = slurm.rlinf("up", str(file), "--print", "slurm", *arguments)
        assert printed.returncode == 0, printed.stderr
        script = self.folder / "job.sh"
        script.write_text(printed.stdout)
        self.id = slurm.submit(script)
        self.out = self.folder / f"slurm-{self.id}.out"

    def printed(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def until(self, pattern: str, seconds: float = 300.0) -> None:
        self.slurm.until(lambda: re.search(pattern, self.printed()), f"`{pattern}` in the output", seconds)

    def newest_checkpoint(self) -> int:
        names = [path.name for path in (self.folder / "runs").glob("*/checkpoints/global_step_*")]
        return max((int(name.rpartition("_")[2]) for name in names), default=0)


def assert_clean(slurm: SlurmHosts, *, driver_killed: bool = False) -> None:
    """Check that jobs have left no process, no file, and no record."""
    for node in slurm.nodes:
        slurm.until(lambda node=node: not node.processes(), f"the end of all processes on {node.name}", 120)
        # A driver that is killed leaves two small files, which its user's next driver on the machine removes.
        own = re.compile(r"/tmp/rlinf-0(/\w{8}(/(job|owner))?)?$") if driver_killed else re.compile(r"$^")
        files = [file for file in node.left()["files"] if not KEPT.match(file) and not own.match(file)]
        assert files == [], node.name
    home = [path for path in slurm.home.rglob("*") if path.is_file() and ".cache" not in path.parts]
    assert home == []


def kill(host: SlurmHost, words: str) -> None:
    """Kill the process whose command line begins with `python3 -m rlinf_cli` and these words."""
    pids = [pid for pid, args in host.processes().items() if re.match(rf"\S*python3 -m rlinf_cli {words}", args)]
    assert len(pids) == 1, host.processes()
    host.run("kill", "-KILL", str(pids[0]))


@pytest.mark.parametrize(("text", "nodes"), [(LAB, 2), (THREE, 3)])
def test_a_heterogeneous_job_trains(slurm: SlurmHosts, text: str, nodes: int) -> None:
    job = Job(slurm, f"trains{nodes}", text, "--with", "time=30", "--with", "sim:comment=simulators")
    assert slurm.wait(job.id) == "COMPLETED", job.printed()
    assert slurm.field(job.id, "TimeLimit") == "00:30:00"
    assert "finished" in job.printed()
    assert job.printed().count("nothing left") == nodes
    assert job.newest_checkpoint() == 4
    assert_clean(slurm)


def test_scancel_saves_and_leaves_nothing(slurm: SlurmHosts) -> None:
    job = Job(slurm, "cancelled", LAB, FOREVER)
    job.until(r"step \d+/")
    slurm.master.run("scancel", job.id)
    assert slurm.wait(job.id) == "CANCELLED"
    assert job.newest_checkpoint() > 0, job.printed()
    assert_clean(slurm)


def test_scancel_before_the_nodes_are_up_leaves_nothing(slurm: SlurmHosts) -> None:
    job = Job(slurm, "early", LAB, FOREVER)
    job.until(r"node 0 .*: probe ok")
    slurm.master.run("scancel", job.id)
    assert slurm.wait(job.id) == "CANCELLED"
    assert_clean(slurm)


def test_a_warned_job_saves_and_goes_on_in_its_next_attempt(slurm: SlurmHosts) -> None:
    job = Job(slurm, "requeued", LAB, FOREVER, "--with", "requeue", "--with", "time=3", "--with", "signal=USR1@60")
    slurm.until(lambda: slurm.field(job.id, "Restarts") == "1", "the requeue", 300)
    ended = time.time()
    saved = job.newest_checkpoint()
    assert saved > 0, job.printed()
    assert_clean(slurm)
    # Slurm holds a requeued job back for two minutes; a node refuses it in the second in which its attempt ended.
    slurm.until(lambda: slurm.state(job.id) == "PENDING", "the next attempt")
    slurm.until(lambda: time.time() > ended + 2, "the second after that of the end")
    slurm.master.run("scontrol", "update", f"job={job.id}", "StartTime=now")
    job.until(rf"continued from \S*/global_step_{saved}\b[\s\S]*step \d+/")
    slurm.master.run("scancel", job.id)
    assert slurm.wait(job.id) == "CANCELLED"
    assert_clean(slurm)


def test_copies_of_a_job_run_side_by_side(slurm: SlurmHosts) -> None:
    jobs = [Job(slurm, "copies", ALONE) for _ in range(2)]
    assert [slurm.wait(job.id) for job in jobs] == ["COMPLETED", "COMPLETED"], slurm.logs()
    assert all("finished" in job.printed() for job in jobs)
    assert_clean(slurm)


def test_a_driver_that_is_killed_ends_the_job(slurm: SlurmHosts) -> None:
    job = Job(slurm, "driver", LAB, FOREVER)
    job.until(r"step \d+/")
    kill(slurm.nodes[0], "train")
    assert slurm.wait(job.id) == "FAILED"
    assert job.printed().count("nothing left") == 2
    assert_clean(slurm, driver_killed=True)


def test_a_node_whose_front_process_is_killed_ends_the_job(slurm: SlurmHosts) -> None:
    job = Job(slurm, "front", LAB, FOREVER)
    job.until(r"step \d+/")
    kill(slurm.nodes[1], "up")
    assert slurm.wait(job.id) == "FAILED"
    assert "a node ended before the driver" in job.printed()
    assert_clean(slurm, driver_killed=True)
