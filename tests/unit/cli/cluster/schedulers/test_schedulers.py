"""Job scripts of Slurm and manifests of KubeRay."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from rlinf_cli.cluster import inventory
from rlinf_cli.cluster.inventory import NodeTarget, targets
from rlinf_cli.cluster.schedulers import SchedulerOption, parse
from rlinf_cli.cluster.schedulers.kuberay import RAY_VERSION, kuberay
from rlinf_cli.cluster.schedulers.slurm import slurm
from rlinf_core.errors import ConfigError
from rlinf_core.job.load import load_job
from tests.waiting import until

Nodes = Callable[..., tuple[NodeTarget, ...]]
REQUEUE = SchedulerOption(None, "requeue", None)
EVIL = "$(touch {0}) `touch {0}` '; touch {0}; ' \" $HOME: $$ {{x}}"
ROOT = Path(__file__).parents[5]


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


def test_hosts_keep_their_ranks_whatever_slurms_order(make_nodes: Nodes) -> None:
    # Slurm numbers the nodes of one request by their names.
    nodes = make_nodes(text="cluster: {num_nodes: 9, hosts: [n2, me@n10, b, a, c, r9n1, r10n1, r10n02, r10n2]}")
    script = checked_shell(slurm("x", "x.yaml", nodes))
    assert re.findall("--nodelist=(.*)", script) == ["n2,n10", "b", "a,c,r9n1", "r10n1,r10n02", "r10n2"]
    assert re.findall(r'"\$RLINF_CLUSTER" (\d) ', script) == ["0", "2", "3", "6", "8"]
    assert "hostname -I" in script
    named = checked_shell(slurm("x", "x.yaml", nodes, head_address="10.1.0.2"))
    assert "\nhead=10.1.0.2\n" in named
    assert "hostname" not in named


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


def test_ray_is_the_version_that_is_installed(make_nodes: Nodes) -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={RAY_VERSION}\n" in pinned
    # A name that is none for Kubernetes becomes one.
    names = {"My_Lab.Cluster-": "my-lab-cluster", "2nodes": "rlinf-2nodes", "__": "rlinf"}
    for name, of_kubernetes in names.items():
        assert read(kuberay(name, "x.yaml", make_nodes(1)))["metadata"]["name"] == of_kubernetes


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
    assert by_name["EVIL"] == evil.replace("$", "$$")


VALIDATOR = Draft202012Validator(json.loads((ROOT / "tests/data/kuberay.schema.json").read_text(encoding="utf-8")))
SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
EVERYTHING = (
    *("image=registry.lab/rlinf:1", "volume=runs:/runs", "volume=models.v2:/models", "cpu=16", "memory=64Gi"),
    *("toleration=pool=robots:NoSchedule", "toleration=nvidia.com/gpu", "secret=wandb"),
)
LAB = """\
cluster:
  num_nodes: 2
  node_groups: [{label: trainer, node_ranks: 0}, {label: sim, node_ranks: 1}]
"""


def manifests(
    nodes: Sequence[NodeTarget],
    *words: str,
    overrides: Sequence[str] = (),
    text: str | None = None,
    log_path: str | None = None,
) -> list[dict[str, Any]]:
    environ = {name: "x" for node in nodes for name in node.forwarded}
    printed = kuberay("lab", "lab.yaml", nodes, overrides, parse(words, nodes), environ, text, log_path)
    return list(YAML(typ="safe", pure=True).load_all(printed))


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.fixture
def lab(make_nodes: Callable[..., tuple[NodeTarget, ...]]) -> tuple[NodeTarget, ...]:
    return make_nodes(text=LAB)


@pytest.mark.parametrize("name", SHIPPED)
def test_manifests_of_shipped_files_are_valid(name: str) -> None:
    job = load_job(name)
    assert job.cluster is not None
    nodes = targets(job.cluster)
    for words in ((), EVERYTHING, (*EVERYTHING, "job")):
        for manifest in manifests(nodes, *words, text="recipe: embodied", log_path="/runs/lab"):
            assert [error.message for error in VALIDATOR.iter_errors(manifest)] == []


def test_volumes_and_secrets_are_in_every_pod(lab: tuple[NodeTarget, ...]) -> None:
    [manifest] = manifests(lab, "volume=runs:/runs", "volume=runs:/more", "secret=wandb", "image=x/y:2")
    for pod in pods(manifest["spec"]):
        [container] = pod["containers"]
        claims = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert claims == [{"name": "claim-runs", "persistentVolumeClaim": {"claimName": "runs"}}]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {"/dev/shm": "shm", "/runs": "claim-runs", "/more": "claim-runs"}
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        assert container["image"] == "x/y:2"


def test_a_manifest_without_a_volume_says_that_runs_end_with_it(lab: tuple[NodeTarget, ...]) -> None:
    note = "# Runs end with the head's pod: `--with volume=CLAIM:/PATH`"
    assert note in kuberay("lab", "lab.yaml", lab)
    printed = kuberay("lab", "lab.yaml", lab, options=parse(["volume=runs:/runs"], lab))
    assert note not in printed
    assert "rlinf train lab.yaml runner.logger.log_path=/runs" in printed


@pytest.mark.parametrize(
    ("words", "log_path", "written"),
    [
        ("volume=runs:/runs", None, "/runs"),
        ("volume=runs:/runs", "results", "/runs"),
        ("trainer:volume=runs:/runs sim:volume=models:/models", None, "/runs"),
        ("volume=runs:/runs", "/runs", None),
        ("volume=models:/models volume=runs:/runs", "/runs", None),
        ("volume=models:/models volume=runs:/runs", "/runs/lab", None),
    ],
)
def test_a_job_writes_its_results_to_a_volume_of_the_head(
    lab: tuple[NodeTarget, ...], words: str, log_path: str | None, written: str | None
) -> None:
    [job] = manifests(lab, "job", *words.split(), log_path=log_path)
    override = f" runner.logger.log_path={written}" if written else ""
    assert job["spec"]["entrypoint"] == f"rlinf train lab.yaml{override}"


@pytest.mark.parametrize(
    ("words", "log_path", "says"),
    [
        ((), None, "no volume is mounted in the head's pod"),
        (("sim:volume=runs:/runs",), None, "no volume is mounted in the head's pod"),
        (("volume=runs:/runs",), "/results", "(`/results`) is in no volume"),
        (("volume=runs:/runs",), "/runs2", "(`/runs2`) is in no volume"),
        (("volume=models:/models", "volume=runs:/runs"), "results", "mounted at `/models`, `/runs`"),
    ],
)
def test_a_job_whose_results_would_end_with_its_pods_is_refused(
    lab: tuple[NodeTarget, ...], words: tuple[str, ...], log_path: str | None, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        manifests(lab, "job", *words, log_path=log_path)
    assert "the results of the job would be deleted with its pods" in str(refused.value)
    assert says in str(refused.value)


def test_requests_and_tolerations_are_of_their_group(lab: tuple[NodeTarget, ...]) -> None:
    wishes = ["cpu=4", "sim:memory=64Gi", "memory=8Gi", "sim:toleration=pool=robots:NoExecute", "sim:image=sim:1"]
    [manifest] = manifests(lab, *wishes)
    head, sim = pods(manifest["spec"])
    assert head["containers"][0]["resources"] == {"requests": {"cpu": "4", "memory": "8Gi"}}
    assert sim["containers"][0]["resources"] == {"requests": {"cpu": "4", "memory": "64Gi"}}
    assert "tolerations" not in head
    assert sim["tolerations"] == [{"key": "pool", "operator": "Equal", "value": "robots", "effect": "NoExecute"}]
    assert [pod["containers"][0]["image"] for pod in (head, sim)] == ["rlinf:latest", "sim:1"]
    # The schema refuses other types.
    assert VALIDATOR.is_valid(manifest)
    head["containers"][0]["resources"]["requests"]["cpu"] = 16
    assert not VALIDATOR.is_valid(manifest)


def test_a_job_carries_its_file_to_the_head(lab: tuple[NodeTarget, ...]) -> None:
    text = "cluster: {num_nodes: 2}  # it's $(rm)\n"
    file, job = manifests(lab, "job", "volume=runs:/runs", overrides=["a.b=it's $(A) $$"], text=text, log_path="/runs")
    assert file["data"] == {"job.yaml": text}
    assert job["kind"] == "RayJob"
    assert job["spec"]["entrypoint"] == """rlinf train /etc/rlinf/job.yaml 'a.b=it'"'"'s $$(A) $$$$'"""
    head, worker = pods(job["spec"]["rayClusterSpec"])
    assert {"name": "file", "configMap": {"name": file["metadata"]["name"]}} in head["volumes"]
    assert {"name": "file", "mountPath": "/etc/rlinf"} in head["containers"][0]["volumeMounts"]
    assert "file" not in [volume["name"] for volume in worker["volumes"]]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("volum=runs:/runs", "did you mean `volume`?"),
        ("volume=runs", "--with volume=runs:/runs"),
        ("volume=Runs:/runs", "--with volume=runs:/runs"),
        ("cpu=many", "--with cpu=16"),
        ("memory", "there is no value for `--with memory`"),
        ("toleration=a=b:Sometimes", "is not a value of `--with toleration`"),
        ("job=now", "has no value"),
        ("sim:job", "is for all nodes"),
    ],
)
def test_wishes_that_cannot_be_are_refused(lab: tuple[NodeTarget, ...], word: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        manifests(lab, word)
    assert says in str(refused.value)


# A step is named by what its bash is called: `node` or `driver`. A node ends when it is asked to, by `scancel`.
SRUN = """\
#!/bin/bash
for word in "$@"; do
  case $word in
    hostname) echo 10.0.0.1; exit 0 ;;
    driver) echo "driver ${*: -1}" >> "$LOG"; exec bash -c "$DRIVER" ;;
    node) echo node >> "$LOG"; exec bash -c "$NODE" ;;
  esac
done
"""
NODE = (
    """echo $$ > "$FOLDER/node.pid"; trap 'echo "node ended" >> "$LOG"; exit 143' TERM; while :; do sleep 0.05; done"""
)
SCANCEL = """\
#!/bin/bash
echo "scancel $*" >> "$LOG"
while [[ ! -s $FOLDER/node.pid ]]; do sleep 0.02; done
kill -TERM "$(cat "$FOLDER/node.pid")"
"""
SCONTROL = '#!/bin/bash\necho "scontrol $*" >> "$LOG"\n'


class Ended(NamedTuple):
    code: int
    log: list[str]
    left: list[str]


class Job:
    """A job of one node, from the script of its template."""

    def __init__(self, folder: Path, script: str, *, driver: str, node: str = NODE) -> None:
        self.log = folder / "log"
        self.home = folder / "home"
        self.home.mkdir()
        for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        env = {"HOME": str(self.home), "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        env |= {"LOG": str(self.log), "FOLDER": str(folder), "DRIVER": driver, "NODE": node}
        (folder / "job.sh").write_text(script)
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sh")], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def ended(self) -> Ended:
        self.process.communicate(timeout=60)
        return Ended(self.process.returncode, self.log.read_text().splitlines(), os.listdir(self.home))


@pytest.fixture
def start(tmp_path: Path, make_nodes: Callable[..., tuple[NodeTarget, ...]]) -> Callable[..., Job]:
    def start(*wishes: str, **commands: str) -> Job:
        asked = [SchedulerOption(None, key, None) for key in wishes]
        return Job(tmp_path, slurm("lab", "lab.yaml", make_nodes(1), (), asked), **commands)

    return start


@pytest.mark.parametrize(
    ("wishes", "code", "requeued"),
    [
        *(((), code, False) for code in (0, 2, 138)),
        # Requeued is a job that was warned, after its nodes.
        *((("requeue",), code, code == 138) for code in (0, 1, 138, 143)),
    ],
)
def test_the_drivers_end_is_the_jobs(
    start: Callable[..., Job], wishes: tuple[str, ...], code: int, requeued: bool
) -> None:
    ended = start(*wishes, driver=f"exit {code}").ended()
    assert (ended.code, ended.left) == (code, [])
    asked = ["scancel --signal=TERM 7", *(["scontrol requeue 7"] if requeued else [])]
    assert [line for line in ended.log if line.startswith("sc")] == asked
    assert ended.log[-1 - requeued] == "node ended"


def test_a_node_that_ends_first_fails_the_job(start: Callable[..., Job]) -> None:
    driver = """trap 'exit 143' TERM; echo $$ > "$FOLDER/node.pid"; while :; do sleep 0.05; done"""
    ended = start(driver=driver, node="exit 1").ended()
    assert (ended.code, ended.left) == (3, [])
    assert "scancel --signal=TERM 7" in ended.log


def test_a_script_that_is_asked_to_end_waits_for_the_driver(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(driver="""touch "$FOLDER/began"; while [[ ! -e $FOLDER/saved ]]; do sleep 0.05; done; exit 143""")
    until((tmp_path / "began").exists, "the driver")
    job.process.send_signal(signal.SIGTERM)
    # As when Slurm asks twice.
    job.process.send_signal(signal.SIGTERM)
    (tmp_path / "saved").touch()
    ended = job.ended()
    assert ended.code == 143
    assert ended.log[-1] == "node ended"
