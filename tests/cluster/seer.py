"""What processes were given, beside what `rlinf inspect env` showed of them before anything ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.hosts import Control

# Run on the head: what each process of each component was given.
_SEER = """\
import json, os, sys
from rlinf_core import Cluster, HybridComponentPlacement, Worker, load_job

class Seer(Worker):
    def see(self):
        return sys.executable, dict(os.environ)

if __name__ == "__main__":
    job = load_job(sys.argv[1])
    with Cluster(cluster_cfg=job.cluster) as cluster:
        placement = HybridComponentPlacement(job.cluster, cluster)
        seen = {}
        for name in job.cluster.component_placement:
            with Seer.create_group().launch(cluster, placement.get_strategy(name), name=name) as group:
                seen[name] = group.see().wait()
    print(json.dumps(seen))
"""
_ON_HEAD = (
    "import sys\nfrom rlinf_cli.cluster.node import node_requests as driver\n"
    "from rlinf_core.node import cluster_records\n"
    "sys.exit(driver.run_on_head(cluster_records.recorded(sys.argv[1]), sys.argv[2:]))"
)


def compare(
    control: Control, cluster: str, file: Path, default: str, env: Mapping[str, str], assume: Sequence[str] = ()
) -> int:
    """Run a process of every rank of a file, and hold it against what is shown offline.

    Args:
        control: where commands are run.
        cluster: the name of the one that is up.
        file: whose components run, and beside which the script is written; all hosts see it.
        default: the interpreter where the file names none.
        env: of the commands.
        assume: accelerators that the file does not declare.

    Returns:
        How many processes were compared.
    """
    script = file.with_name("seer.py")
    script.write_text(_SEER)
    done = control.run([default, "-c", _ON_HEAD, cluster, str(script), str(file)], env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for component, ranks in seen.items():
        for rank, (interpreter, environment) in enumerate(ranks):
            asked = ("--component", component, "--rank", str(rank), *(f"--assume={item}" for item in assume))
            command = [default, "-m", "rlinf_cli", "inspect", "env", str(file), *asked, "--json"]
            output = control.run(command, env=env)
            assert output.returncode == 0, output.stderr
            offline = json.loads(output.stdout)
            assert interpreter == (offline["python"] or offline["python_by_up"] or default)
            known = {
                variable["name"]: variable["value"]
                for variable in offline["variables"]
                if variable["value"] != "<at launch>"
            }
            assert len(known) >= 6
            assert {name: environment.get(name) for name in known} == known, f"{component}:{rank}"
    return sum(map(len, seen.values()))
