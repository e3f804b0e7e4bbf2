"""Promise: `rlinf up` costs little more than Ray itself, and a thousand hosts are no trouble.

Part 1: what `up` itself takes for 1,000 hosts, where a stand-in for ssh answers each request after 200 ms; and how
this process's memory grows from 100 hosts to 1,000. Part 2 (root, with sshd): `up` of five hosts that are namespaces of
this machine, against five `ray start` run on them by hand, the head first and then the other four at once. Both take
turns within one run.

    python benchmarks/runtime/bench_bring_up.py [--rounds 3] [--hosts 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CONTROL_GOAL_SECONDS = 10.0
# Peak memory for 1,000 hosts over that for 100: flat, but for what is known of each host.
MEMORY_GOAL = 1.5
MORE_THAN_BY_HAND_GOAL_SECONDS = 3.0
NAMES = ("trainer0", "trainer1", "render0", "render1", "robot0")

# Takes its 200 ms, and says what the agent would. Written for dash: an interpreter would measure itself.
FAKE_SSH = """\
#!/bin/sh
for word; do host=$last; last=$word; done
request=$(tail -n 1)
sleep 0.2
echo '{"event": "hello"}'
case $request in
*'"verb": "probe"'*) echo '{"event": "result", "machine": "'$host'", FACTS}';;
*'"verb": "start"'*) echo '{"event": "result", STARTED}';;
*) cat "$(dirname "$0")/members";;
esac
"""
FACTS = {
    "hostname": "h",
    "user": 0,
    "folder": "/tmp/x",
    "disk_free": 1 << 40,
    "shm_free": 1 << 34,
    "taken": [],
    "python": [3, 11, 7],
    "ray": "2.60.0",
    "rlinf": "0",
    "fingerprint": None,
    "places": {},
    "record": None,
    "address": "10.0.0.1",
    "primary": "10.0.0.1",
}
STARTED = {"process": "1:2", "address": "10.0.0.1", "gcs": "10.0.0.1:20000", "folder": "/tmp/x", "started": True}


def control_part(hosts: int) -> tuple[float, float, float]:
    """Return what bringing up that many hosts by the stand-in takes: seconds, peak resident MiB, seconds of our own
    work.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        script = FAKE_SSH.replace("FACTS", json.dumps(FACTS)[1:-1]).replace("STARTED", json.dumps(STARTED)[1:-1])
        (base / "ssh").write_text(script)
        (base / "ssh").chmod(0o755)
        nodes = [{"rank": str(rank), "address": "10.0.0.1", "alive": True, "reason": ""} for rank in range(hosts)]
        (base / "members").write_text(json.dumps({"event": "result", "nodes": nodes, "jobs": [], "fault": None}))
        (base / "f.yaml").write_text(f"cluster:\n  num_nodes: {hosts}\n  hosts: h[0-{hosts - 1}]\n")
        env = {**os.environ, "PATH": f"{base}:{os.environ['PATH']}", "XDG_STATE_HOME": folder}
        code = f"from benchmarks.runtime.bench_bring_up import inside; inside({str(base / 'f.yaml')!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
        )
        record = json.loads(done.stdout.splitlines()[-1])
        return record["seconds"], record["mib"], record["cpu"]


def inside(file: str) -> None:
    """One run of the control part; prints what it took."""
    from rlinf_cli.cluster.inventory import targets
    from rlinf_cli.cluster.transport import Transport, run
    from rlinf_cli.cluster.up import UpRequest, bring_up
    from rlinf_core.job.load import load_job

    cluster = load_job(file).cluster
    assert cluster is not None
    nodes = targets(cluster)

    async def work() -> Any:
        return await bring_up(UpRequest("bench", file, nodes), Transport(), lambda event: None)

    begun = time.perf_counter()
    report = run(work())
    seconds = time.perf_counter() - begun
    assert report.ok, report.failures[:1]
    assert len(report.nodes) == len(nodes)
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = time.process_time()
    print(json.dumps({"seconds": seconds, "mib": mib, "cpu": cpu}))


def by_hand(hosts: Any) -> float:
    """Return seconds of five `ray start`: the head, then the others at once; ended again afterwards."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    common = ["--disable-usage-stats", "--object-store-memory=80000000", "--temp-dir=/tmp/hand"]
    head, *others = hosts.hosts
    begun = time.perf_counter()
    head.run([*ray, "start", "--head", "--port=6379", "--include-dashboard=false", *common], timeout=300)
    joins = [
        host.spawn([*ray, "start", f"--address={head.address}:6379", *common], stdout=subprocess.PIPE)
        for host in others
    ]
    said = [join.communicate(timeout=300)[0] for join in joins]
    seconds = time.perf_counter() - begun
    assert not any(join.returncode for join in joins), said
    for host in hosts.hosts:
        # Each host has its own processes, so this reaches no other's.
        host.run([*ray, "stop", "--force"], check=False, timeout=120)
        host.sh("rm -rf /tmp/hand /tmp/ray")
    return seconds


def by_up(hosts: Any, file: str, state: str) -> float:
    """Return seconds of `rlinf up`, the start of its interpreter included; taken down again afterwards."""
    env = {"XDG_STATE_HOME": state}
    hosts.control.forget_connections()
    begun = time.perf_counter()
    done = hosts.control.rlinf("up", file, "--timeout", "240", env=env, timeout=600)
    seconds = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    down = hosts.control.rlinf("down", "--force", env=env, timeout=300)
    assert down.returncode == 0, down.stderr
    return seconds


def five_hosts(rounds: int) -> bool:
    """Return both ways in turns; whether the promise holds."""
    from tests.cluster.hosts import Hosts
    from tests.cluster.spaces import why_not

    reason = why_not()
    if reason:
        print(f"five hosts: not measured, {reason}")
        return True
    hosts = Hosts(NAMES)
    try:
        file = hosts.folder / "bench.yaml"
        file.write_text(f"cluster:\n  num_nodes: 5\n  hosts: [{', '.join(NAMES)}]\n  ports: 21000-21499\n")
        hand: list[float] = []
        up: list[float] = []
        for index in range(rounds + 1):
            taken = by_hand(hosts), by_up(hosts, str(file), str(hosts.folder / "state"))
            if index:  # the first round compiles and fills the caches
                hand.append(taken[0])
                up.append(taken[1])
    finally:
        hosts.end()
    extra = median(up) - median(hand)
    goal = f"goal {MORE_THAN_BY_HAND_GOAL_SECONDS:+.0f} s"
    print(f"five hosts: by hand {shown(hand)}, up {shown(up)}: {extra:+.1f} s ({goal})")
    return extra <= MORE_THAN_BY_HAND_GOAL_SECONDS


def shown(seconds: list[float]) -> str:
    return f"{median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--control-only", action="store_true", help="leave part 2 out")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    _, small, _ = control_part(100)
    runs = [control_part(options.hosts) for _ in range(max(1, options.rounds))]
    seconds, mib, cpu = (median(column) for column in zip(*runs, strict=True))
    goal = f"goal {CONTROL_GOAL_SECONDS:.0f} s"
    print(f"{options.hosts} hosts by a stand-in of 200 ms: {seconds:.1f} s, {cpu:.1f} s of it our own work ({goal})")
    print(f"peak memory: {mib:.0f} MiB, for 100 hosts {small:.0f} MiB: {mib / small:.2f} (goal {MEMORY_GOAL})")
    kept = seconds <= CONTROL_GOAL_SECONDS and mib / small <= MEMORY_GOAL
    if not options.control_only:
        kept &= five_hosts(options.rounds)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
