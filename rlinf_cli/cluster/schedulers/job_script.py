"""The job script of Slurm, or the manifest of KubeRay, that `rlinf up --print` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.inventory import targets
from rlinf_cli.cluster.schedulers.kuberay import kuberay
from rlinf_cli.cluster.schedulers.scheduler_options import parse
from rlinf_cli.cluster.schedulers.slurm import slurm
from rlinf_cli.job.job_file import load_sound
from rlinf_core.config.tree import ScalarNode, find


def job_script(
    scheduler: str, file: str, overrides: Sequence[str] | None, name: str | None, options: Sequence[str]
) -> str:
    """Return the script or manifest with which `slurm` or `kuberay` starts the cluster of a file."""
    job = load_sound(file, overrides)
    nodes = targets(job.cluster)
    cluster = identity.cluster_name(file, name)
    checked = parse(options, nodes)
    if scheduler == "slurm":
        return slurm(cluster, file, nodes, overrides or (), checked).rstrip("\n")
    path = Path(file)
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    log_path = find(job.tree, ("runner", "logger", "log_path"))
    runs = log_path.raw if isinstance(log_path, ScalarNode) else None
    return kuberay(cluster, file, nodes, overrides or (), checked, text=text, log_path=runs).rstrip("\n")
