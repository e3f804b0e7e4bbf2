"""A job script for Slurm: it brings the cluster up on machines chosen by Slurm, runs the job, and ends both."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.schedulers import SchedulerOption, one_line
from rlinf_core.config.ranks import format_ranks
from rlinf_core.errors import ConfigError

# The name of a cluster has at most 64 characters, and the script appends the ids of job and attempt.
_NAME_LENGTH: Final = 40
_REQUEUE: Final = "requeue"
# Seconds before the time limit at which Slurm signals a job that may be requeued.
_WARNING_SECONDS: Final = 120
# Options of sbatch that users must not set because the script does, with the reason.
_OWN: Final = {
    "nodes": "it follows from `cluster` of the file",
    "ntasks": "each node runs one task",
    "ntasks-per-node": "each node runs one task",
    "gpus-per-node": "it follows from the accelerators of the file",
    "nodelist": "it follows from `hosts` of the file",
    "exclusive": "it is always asked for",
    "open-mode": "`--with requeue` sets it",
}


def _pieces_of(nodes: Sequence[NodeTarget]) -> list[list[NodeTarget]]:
    """Return runs of nodes, by rank, that can be one request each: with equal groups, interpreters and accelerators,
    and with hosts in the order of their names, since Slurm numbers the nodes of a request in that order.
    """
    pieces: list[list[NodeTarget]] = []
    for node in nodes:
        if pieces and _kind(pieces[-1][-1]) == _kind(node) and _in_order(_name(pieces[-1][-1]), _name(node)):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return pieces


def _kind(node: NodeTarget) -> tuple[Any, ...]:
    count = node.accelerators.per_node if node.accelerators else None
    return (node.groups, node.interpreter, node.declared_interpreter, count)


def _in_order(name: str | None, other: str | None) -> bool:
    """Return whether Slurm numbers host `name` before `other`, however it sorts the numbers within names."""
    if name is None or other is None:
        return True
    return all(first < second for first, second in zip(_sort_keys(name), _sort_keys(other), strict=True))


def _sort_keys(name: str) -> tuple[Any, Any]:
    """Return the key of a host by its last number alone, and by all of its numbers: `n2` comes before `n10`."""
    prefix = name.rstrip("0123456789")
    parts = re.findall(r"(\D*)(\d*)", name)
    return (prefix, int(name[len(prefix) :] or 0)), [(text, int(number or 0)) for text, number in parts]


def _name(node: NodeTarget) -> str | None:
    return None if node.host is None else node.host.rpartition("@")[2]


def _title(piece: Sequence[NodeTarget]) -> str:
    """Return a title on one line, as in `nodes 0-7: a800`."""
    ranks = format_ranks([node.rank for node in piece])
    groups = ", ".join(piece[0].groups)
    return one_line(f"node{'' if len(piece) == 1 else 's'} {ranks}" + (f": {groups}" if groups else ""))


_START: Final = r"""
set -euo pipefail
umask 077
file={file}
overrides=({overrides})

# Each attempt of each job has a cluster of its own: copies of a job, and leftovers of a killed one, stay apart.
export RLINF_CLUSTER={name}-$SLURM_JOB_ID${{SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}}
# All nodes share the token through the home folder, which every node must mount; it lives as long as the job.
token=$HOME/.rlinf-$RLINF_CLUSTER.token
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$token"
# At the end the steps are asked to end, by Slurm: an srun that is asked kills its step.
finish() {{
  rm -f "$token"
  scancel --signal=TERM "$SLURM_JOB_ID" 2> /dev/null || true
  # A signal ends the wait.
  while [[ $(jobs -pr) ]]; do wait || true; done
}}
trap finish EXIT
# When Slurm ends the job it asks the steps, too. This script waits for them, so that the driver can save.
trap : TERM

{head}
nodes=()
"""
_HEAD: Final = r"""# The address of node 0 is queried there: its name may resolve to loopback.
head=$(srun {first_group}--nodes=1 --ntasks=1 hostname -I | awk '{{print $1}}')"""
# The trap keeps a warning signal from ending `up` while its interpreter starts.
_PIECE: Final = r"""
# {title}
srun {group}--nodes={count} --ntasks={count} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  bash -c 'trap "" USR1 USR2
    exec "$1" -m rlinf_cli up --name "$2" --node-rank "$(($3 + SLURM_NODEID))" --head-address "$4" \
    --token-file "$5" --block "${{@:6}}"' \
  node {interpreter} "$RLINF_CLUSTER" {first} "$head" "$token" "$file" "${{overrides[@]}}" &
nodes+=($!)
"""
_END: Final = r"""
# The driver runs on node 0 once all nodes are up.
srun {first_group}--nodes=1 --ntasks=1 --overlap --cpu-bind=none \
  bash -c 'trap "echo \"warned of the time limit before the nodes were up: ask for more time\" >&2; exit 3" USR1 USR2
    for try in {{1..90}}; do
      "$1" -m rlinf_cli status --name "$2" --quiet > /dev/null 2>&1 && exec "$1" -m rlinf_cli train "${{@:3}}"
      sleep 2
    done
    "$1" -m rlinf_cli status --name "$2"; exit 3' \
  driver {interpreter} "$RLINF_CLUSTER" "$file" "${{overrides[@]}}"{resume} &
driver=$!

# The driver's end is the job's. A node that ends before it fails the job.
while kill -0 "$driver" 2> /dev/null; do
  for node in "${{nodes[@]}}"; do
    if ! kill -0 "$node" 2> /dev/null; then
      echo "a node ended before the driver: the job ends" >&2
      exit 3
    fi
  done
  sleep 1
done
code=0
wait "$driver" || code=$?
{requeue}exit "$code"
"""
_RESUME: Final = " ${SLURM_RESTART_COUNT:+runner.resume_dir=auto}"
_AGAIN: Final = r"""# Warned of the time limit, the driver has saved: the job goes on from there in a new attempt.
if ((code == 128 + $(kill -l USR1))); then
  finish
  trap - EXIT
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


def slurm(
    name: str,
    file: str,
    nodes: Sequence[NodeTarget],
    overrides: Sequence[str] = (),
    options: Iterable[SchedulerOption] = (),
    head_address: str | None = None,
) -> str:
    """Return an `sbatch` script that brings the cluster up on machines chosen by Slurm, and runs the job.

    Args:
        name: the name of the cluster, to which the job's id is appended.
        file: the configuration file as named on the command line.
        nodes: the nodes of the file.
        overrides: the overrides for `rlinf train`.
        options: options of `sbatch`, and `requeue`.
        head_address: `cluster.head_address` of the file, or None.

    Raises:
        ConfigError: an option conflicts with the script, or `requeue` has a value or a group.
    """
    options = _checked(options)
    requeue = any(option.key == _REQUEUE for option in options)
    name = name[:_NAME_LENGTH]
    pieces = _pieces_of(nodes)
    heads = ["#!/bin/bash"]
    if not any(option.key == "job-name" for option in options):
        heads.append(f"#SBATCH --job-name={name}")
    if requeue:
        heads += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
        if not any(option.key == "signal" for option in options):
            heads.append(f"#SBATCH --signal=USR1@{_WARNING_SECONDS}")
    starts: list[str] = []
    for index, piece in enumerate(pieces):
        title, first = _title(piece), piece[0]
        heads += ["#SBATCH hetjob"] if index else []
        heads += [f"# {title}", *_requests(piece), *_asked(first, options)]
        group = f"--het-group={index} " if len(pieces) > 1 else ""
        interpreter = _interpreter(first)
        starts.append(
            _PIECE.format(title=title, group=group, count=len(piece), interpreter=interpreter, first=first.rank)
        )
    first_group = "--het-group=0 " if len(pieces) > 1 else ""
    start = _START.format(
        file=shlex.quote(file),
        overrides=shlex.join(overrides),
        name=shlex.quote(name),
        head=f"head={head_address}" if head_address else _HEAD.format(first_group=first_group),
    )
    end = _END.format(
        first_group=first_group,
        interpreter=_interpreter(nodes[0]),
        resume=_RESUME if requeue else "",
        requeue=_AGAIN if requeue else "",
    )
    return "".join(["\n".join(heads), "\n", start, *starts, end])


def _checked(options: Iterable[SchedulerOption]) -> list[SchedulerOption]:
    checked = list(options)
    for option in checked:
        if option.key in _OWN:
            raise ConfigError(f"`--with {option.key}` is not possible", why=_OWN[option.key])
        if option.key == _REQUEUE and (option.value is not None or option.group is not None):
            raise ConfigError("`--with requeue` is for the whole job, and has no value", help="write `--with requeue`")
        if option.key == "signal" and (option.value or "").startswith("B:"):
            raise ConfigError(
                f"`--with signal={option.value}` warns the script alone",
                why="the driver is a step of the job",
                help=f"write `--with signal={str(option.value)[2:]}`, which warns the steps",
            )
    return checked


def _asked(node: NodeTarget, options: Sequence[SchedulerOption]) -> list[str]:
    return [
        f"#SBATCH --{option.key}" + ("" if option.value is None else f"={shlex.quote(option.value)}")
        for option in options
        if option.key != _REQUEUE and option.covers(node)
    ]


def _interpreter(node: NodeTarget) -> str:
    """Return the declared interpreter, else `python3` of the job's environment."""
    return shlex.quote(node.interpreter) if node.declared_interpreter else "python3"


def _requests(piece: Sequence[NodeTarget]) -> list[str]:
    lines = [f"#SBATCH --nodes={len(piece)}", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive"]
    declared = piece[0].accelerators
    if declared is not None and declared.per_node:
        lines.append(f"#SBATCH --gpus-per-node={declared.per_node}")
    hosts = [name for name in map(_name, piece) if name is not None]
    if hosts:
        lines.append(f"#SBATCH --nodelist={','.join(hosts)}")
    elif any(node.robots for node in piece):
        lines.append("# The machines of the robots, in rank order; or list them in `hosts` of the file:")
        lines.append("##SBATCH --nodelist=ROBOT_HOSTS")
    return lines
