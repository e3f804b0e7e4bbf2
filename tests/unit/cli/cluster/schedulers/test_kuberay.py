"""Manifests of KubeRay: what is asked for by `--with` is in them, and every one is valid by its fields and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from rlinf_cli.cluster.inventory import NodeTarget, targets
from rlinf_cli.cluster.schedulers.kuberay import kuberay
from rlinf_cli.cluster.schedulers.scheduler_options import parse
from rlinf_core.errors import ConfigError
from rlinf_core.job.load import load_job

ROOT = Path(__file__).parents[5]
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


def test_the_schema_refuses_other_fields_and_types(lab: tuple[NodeTarget, ...]) -> None:
    [manifest] = manifests(lab, *EVERYTHING)
    assert VALIDATOR.is_valid(manifest)
    container = manifest["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["resources"]["requests"]["cpu"] = 16
    assert not VALIDATOR.is_valid(manifest)
    container["resources"]["requests"]["cpu"] = "16"
    container["volumeMount"] = []
    assert not VALIDATOR.is_valid(manifest)


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


def entrypoint(nodes: Sequence[NodeTarget], *words: str, log_path: str | None = None) -> str:
    [job] = manifests(nodes, "job", *words, log_path=log_path)
    return str(job["spec"]["entrypoint"])


def test_a_job_writes_its_results_to_a_volume_of_the_head(lab: tuple[NodeTarget, ...]) -> None:
    written = "rlinf train lab.yaml runner.logger.log_path=/runs"
    assert entrypoint(lab, "volume=runs:/runs") == written
    assert entrypoint(lab, "volume=runs:/runs", log_path="results") == written
    assert entrypoint(lab, "trainer:volume=runs:/runs", "sim:volume=models:/models") == written
    for path in ("/runs", "/runs/lab"):
        assert entrypoint(lab, "volume=models:/models", "volume=runs:/runs", log_path=path) == "rlinf train lab.yaml"


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
    [manifest] = manifests(lab, "cpu=4", "sim:memory=64Gi", "sim:toleration=pool=robots:NoExecute", "sim:image=sim:1")
    head, sim = pods(manifest["spec"])
    assert head["containers"][0]["resources"] == {"requests": {"cpu": "4"}}
    assert sim["containers"][0]["resources"] == {"requests": {"cpu": "4", "memory": "64Gi"}}
    assert "tolerations" not in head
    assert sim["tolerations"] == [{"key": "pool", "operator": "Equal", "value": "robots", "effect": "NoExecute"}]
    assert [pod["containers"][0]["image"] for pod in (head, sim)] == ["rlinf:latest", "sim:1"]


def test_a_job_carries_its_file_to_the_head(lab: tuple[NodeTarget, ...]) -> None:
    text = "cluster: {num_nodes: 2}  # it's $(rm)\n"
    file, job = manifests(lab, "job", "volume=runs:/runs", overrides=["a.b=it's"], text=text, log_path="/runs")
    assert file["data"] == {"job.yaml": text}
    assert job["kind"] == "RayJob"
    assert job["spec"]["entrypoint"] == """rlinf train /etc/rlinf/job.yaml 'a.b=it'"'"'s'"""
    head, worker = pods(job["spec"]["rayClusterSpec"])
    assert {"name": "file", "configMap": {"name": file["metadata"]["name"]}} in head["volumes"]
    assert {"name": "file", "mountPath": "/etc/rlinf"} in head["containers"][0]["volumeMounts"]
    assert "file" not in [volume["name"] for volume in worker["volumes"]]


def test_a_job_of_a_shipped_file_carries_none(lab: tuple[NodeTarget, ...]) -> None:
    assert entrypoint(lab, "volume=runs:/runs", log_path="/runs") == "rlinf train lab.yaml"


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
