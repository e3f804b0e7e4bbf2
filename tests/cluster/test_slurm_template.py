"""The script of `up --print slurm`, run on hosts with a stand-in for `srun`: the nodes find each other by it."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

LAB = """\
cluster:
  num_nodes: 3
  node_groups:
    - {{label: trainer, node_ranks: 0-1, hosts: "trainer[0-1]"}}
    - label: render
      node_ranks: 2
      hosts: render0
      env_configs: [{{node_ranks: 2, python_interpreter_path: {render}}}]
"""
# What Slurm promises, and no more: a task on each node of a component, its number in SLURM_NODEID, the same home.
SRUN = """\
#!/bin/bash
group=0 nodes=1
while [[ ${{1-}} == --* ]]; do
  case $1 in
    --het-group=*) group=${{1#*=}} ;;
    --nodes=*) nodes=${{1#*=}} ;;
  esac
  shift
done
case $group in 0) hosts=(trainer0 trainer1) ;; 1) hosts=(render0) ;; esac
pids=()
trap 'kill "${{pids[@]}}"' TERM
for ((node = 0; node < nodes; node++)); do
  env=("HOME=$HOME" "RLINF_CLUSTER=${{RLINF_CLUSTER-}}" "PATH={path}" "SLURM_NODEID=$node" SLURM_JOB_ID=7)
  words=$(printf '%q ' env "${{env[@]}}" "$@")
  ssh -o BatchMode=yes "${{hosts[$node]}}" "$words" < /dev/null &
  pids+=($!)
done
rc=0
for pid in "${{pids[@]}}"; do wait "$pid" || rc=$?; done
exit $rc
"""


def test_the_nodes_of_a_slurm_job_become_a_cluster(hosts: Hosts) -> None:
    folder = hosts.folder / "slurm"
    folder.mkdir()
    file = folder / "it's a lab.yaml"
    file.write_text(LAB.format(render=hosts.interpreter("render")))
    control = hosts.control
    script = control.rlinf("up", str(file), "--print", "slurm", "--name", "lab", "cluster.ports=23000-23999")
    assert script.returncode == 0, script.stderr
    # Undeclared, the interpreter is the environment's own `python3`.
    path = f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"
    srun = folder / "srun"
    srun.write_text(SRUN.format(path=path))
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    (folder / "job.sh").write_text(script.stdout)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    try:
        # To files: what is left in the background would hold a pipe open.
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            job = control.spawn(["bash", str(folder / "job.sh")], env=env, stdout=out, stderr=err)
            code = job.wait(timeout=200)
        said, errors = (folder / "out").read_text(), (folder / "err").read_text()
        # The file has no recipe: the driver was reached, which it is only once all nodes are there.
        assert code == 2, errors
        assert "recipe" in errors
        assert len(re.findall(r"cluster lab is up: 1 node", said)) == 3
        shared = control.home / ".local" / "state" / "rlinf" / "clusters" / "lab.json"
        assert json.loads(shared.read_text())["ports"] == [23000, 23999]
        assert not (control.home / ".rlinf-7.token").exists()
    finally:
        for name in ("trainer0", "trainer1", "render0"):
            hosts[name].restart()
        for left in (control.home / ".local" / "state" / "rlinf" / "clusters").glob("lab*"):
            left.unlink()
