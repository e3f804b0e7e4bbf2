"""Templates for Slurm and KubeRay: what they are read by reads them, and no value of a file is taken for more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlinf_cli.cluster import inventory
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.schedulers.kuberay import RAY_VERSION, kuberay
from rlinf_cli.cluster.schedulers.scheduler_options import SchedulerOption, parse
from rlinf_cli.cluster.schedulers.slurm import slurm
from rlinf_core.errors import ConfigError
from rlinf_core.job.load import load_job

Nodes = Callable[..., tuple[NodeTarget, ...]]
REQUEUE = SchedulerOption(None, "requeue", None)
EVIL = "$(touch {0}) `touch {0}` '; touch {0}; ' \" $HOME: {{x}}"


@pytest.fixture
def hetero() -> tuple[NodeTarget, ...]:
    job = load_job("hetero18")
    assert job.cluster is not None
    return inventory.targets(job.cluster)


def checked_shell(script: str) -> str:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return script


def read(manifest: str) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(manifest)


def test_slurm_asks_for_each_kind_of_machine(hetero: tuple[NodeTarget, ...]) -> None:
    script = checked_shell(slurm("hetero18", "hetero18.yaml", hetero))
    requests, _, rest = script.partition("set -euo pipefail")
    parts = requests.split("#SBATCH hetjob")
    assert [re.findall(r"--(nodes|gpus-per-node)=(\d+)", part) for part in parts] == [
        [("nodes", "8"), ("gpus-per-node", "8")],
        [("nodes", "8"), ("gpus-per-node", "8")],
        [("nodes", "2")],
    ]
    # Slurm reads no request behind the first command.
    assert "#SBATCH" not in rest
    assert "export RLINF_CLUSTER=hetero18-$SLURM_JOB_ID" in rest
    assert re.findall(r'node (\S+) "\$RLINF_CLUSTER" (\d+)', rest) == [
        ("/opt/venv/openpi/bin/python3", "0"),
        ("python3", "8"),
        ("python3", "16"),
    ]


def test_slurm_with_like_machines_is_no_heterogeneous_job(make_nodes: Nodes) -> None:
    script = checked_shell(slurm("plain", "plain.yaml", make_nodes(4)))
    assert "het" not in script
    assert "#SBATCH --nodelist=h0,h1,h2,h3" in script


def requests_of(script: str) -> list[list[str]]:
    """Return the options that a script asks Slurm for, by component."""
    parts = script.split("#SBATCH hetjob")
    return [re.findall(r"^#SBATCH --(\S+)$", part, re.MULTILINE) for part in parts]


def test_slurm_asks_for_what_is_wished_by_group(hetero: tuple[NodeTarget, ...]) -> None:
    wishes = parse(["time=24:00:00", "franka:partition=lab", "comment=it's"], hetero)
    first, second, robots = requests_of(checked_shell(slurm("x", "x.yaml", hetero, (), wishes)))
    assert "partition=lab" not in (*first, *second)
    assert "partition=lab" in robots
    for part in (first, second, robots):
        assert {"time=24:00:00", "comment='it'\"'\"'s'"} <= set(part)


def test_slurm_requeues_only_where_it_is_wished(make_nodes: Nodes) -> None:
    plain, again = (checked_shell(slurm("x", "x.yaml", make_nodes(1), (), wished)) for wished in ((), [REQUEUE]))
    assert not re.search(r"requeue|resume_dir|--signal=USR1", plain)
    assert {"requeue", "open-mode=append", "signal=USR1@120"} <= set(requests_of(again)[0])
    assert "${SLURM_RESTART_COUNT:+runner.resume_dir=auto}" in again
    own = slurm("x", "x.yaml", make_nodes(1), (), [REQUEUE, SchedulerOption(None, "signal", "USR2@600")])
    assert [option for option in requests_of(own)[0] if "signal" in option] == ["signal=USR2@600"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("time", None),
        ("nodes=3", "it follows from `cluster` of the file"),
        ("signal=B:TERM@60", "write `--with signal=TERM@60`"),
        ("requeue=yes", "has no value"),
        ("Time=1", "write it as in"),
        ("nowhere:partition=x", "names no group of the file"),
        ("comment=a\n#SBATCH --uid=0", "line break"),
    ],
)
def test_slurm_refuses_wishes_that_cannot_be(make_nodes: Nodes, word: str, says: str | None) -> None:
    nodes = make_nodes(1)
    if says is None:
        assert f"#SBATCH --{word}\n" in slurm("x", "x.yaml", nodes, (), parse([word], nodes))
        return
    with pytest.raises(ConfigError) as refused:
        slurm("x", "x.yaml", nodes, (), parse([word], nodes))
    assert says in str(refused.value)


def test_kuberay_has_a_pod_for_each_rank(hetero: tuple[NodeTarget, ...]) -> None:
    manifest = read(kuberay("hetero18", "hetero18.yaml", hetero))
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("RayCluster", "hetero18")
    spec = manifest["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    groups = spec["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == [f"node-{rank}" for rank in range(1, 18)]
    pods = [spec["headGroupSpec"]["template"]["spec"], *(group["template"]["spec"] for group in groups)]
    envs = [{item["name"]: item["value"] for item in pod["containers"][0]["env"]} for pod in pods]
    assert [env["RLINF_NODE_RANK"] for env in envs] == [str(rank) for rank in range(18)]
    # What is run in the head's pod finds the cluster; the others join it by KubeRay's own means.
    assert [env.get("RLINF_ADDRESS") for env in envs] == ["127.0.0.1:6379"] + [None] * 17
    assert envs[0]["PATH"].startswith("/opt/venv/openpi/bin:")
    assert "PATH" not in envs[8]
    limits = [pod["containers"][0].get("resources", {}).get("limits") for pod in pods]
    assert limits == [{"nvidia.com/gpu": "8"}] * 16 + [None] * 2
    assert [pod.get("nodeSelector") for pod in pods[15:]] == [None, {"rlinf.io/rank": "16"}, {"rlinf.io/rank": "17"}]


def test_ray_is_the_version_that_is_installed() -> None:
    pinned = (Path(__file__).parents[5] / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={RAY_VERSION}\n" in pinned


def test_secrets_are_not_written_out(make_nodes: Nodes) -> None:
    text = "cluster: {num_nodes: 1, hosts: h0, forward_env: [WANDB_API_KEY, PLAIN]}"
    environ = {"WANDB_API_KEY": "hunter2", "PLAIN": "seen"}
    manifest = kuberay("x", "x.yaml", make_nodes(text=text), environ=environ)
    assert "hunter2" not in manifest
    assert "--from-literal=WANDB_API_KEY=..." in manifest
    env = read(manifest)["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    by_name = {item["name"]: item for item in env}
    assert by_name["PLAIN"]["value"] == "seen"
    assert by_name["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "x-env", "key": "WANDB_API_KEY"}


def test_values_of_a_file_stay_values(make_nodes: Nodes, tmp_path: Path) -> None:
    mark = tmp_path / "touched"
    evil = EVIL.format(mark)
    environ = {"EVIL": evil}
    nodes = make_nodes(
        text=f"""\
cluster:
  num_nodes: 2
  forward_env: [EVIL]
  node_groups:
    - label: {evil.replace(":", "").replace(",", "").replace(" ", "")!r}
      node_ranks: 0-1
      env_configs: [{{node_ranks: 0-1, python_interpreter_path: "/opt/it's $(touch {mark})/python"}}]
""".replace("\\'", "''")
    )
    file = f"it's {evil}\nrm.yaml"
    script = checked_shell(slurm("x", file, nodes, [f"a.b={evil}"]))
    # Run for what it would do, with everything that it calls replaced. Some calls are in the background: each process
    # has a file of its own.
    stubs = (
        'srun() { printf "%s\\n" "$@" >> "$HOME/srun.$BASHPID"; }; '
        "trap() { :; }; hostname() { :; }; test() { :; }; kill() { return 1; }; scancel() { :; }; "
        f"SLURM_JOB_ID=1 SLURM_NODEID=0 HOME={tmp_path}\n"
    )
    subprocess.run(["bash"], input=stubs + script, text=True, capture_output=True, check=True, timeout=60)
    said = "".join(file.read_text(encoding="utf-8") for file in tmp_path.glob("srun.*"))
    assert not mark.exists()
    assert f"\n{file}\na.b={evil}\n" in said
    assert f"/opt/it's $(touch {mark})/python" in said
    env = read(kuberay("x", file, nodes, environ=environ))["spec"]["headGroupSpec"]["template"]["spec"]["containers"][
        0
    ]["env"]
    by_name = {item["name"]: item.get("value") for item in env}
    # What Kubernetes would replace is written so that it replaces it by itself.
    assert by_name["EVIL"] == evil.replace("$(", "$$(")


def test_a_name_that_is_none_for_kubernetes_becomes_one(make_nodes: Nodes) -> None:
    name = read(kuberay("My_Lab.Cluster-", "x.yaml", make_nodes(1)))["metadata"]["name"]
    assert name == "my-lab-cluster"
