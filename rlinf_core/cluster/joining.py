"""The nodes of a job: the wait for them, the replacement of lost nodes by spares, and the probe of each."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from rlinf_core import env_vars
from rlinf_core.cluster.engine import RayEngine
from rlinf_core.cluster.membership import (
    ABSENT,
    NodeMember,
    Seats,
    departed,
    members,
    missing_ranks,
    probe,
    rank_members,
    take_seats,
)
from rlinf_core.cluster.ray_api import gcs_client, ray_api, session_folder
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, RLinfError
from rlinf_core.node import node_env
from rlinf_core.node.environment import PATH_LISTS
from rlinf_core.node.node_facts import WITHOUT_WORKING_FOLDER
from rlinf_core.waiting import contact_seconds, stretched

RunOn: TypeAlias = Callable[[NodeMember, Any], Any]
"""Runs a function on a node; returns a reference to its result."""

_POLL_SECONDS: Final = 0.25
_LIST_SECONDS: Final = 5
_CONNECT_SECONDS: Final = 2.0
# The time limit for an answer: an overloaded node starts processes slowly, and Ray reports a lost one within a minute.
_ANSWER_SECONDS: Final = 180.0


def join(engine: RayEngine, session: Session, config: ClusterConfig | None, wanted: int | None, run_on: RunOn) -> Seats:
    """Return the nodes by rank, probed; spares replace nodes that are lost or do not join within the time limit.

    Args:
        config: the cluster section of the file, if there is one.
        wanted: the number of nodes, with spares; None for all that have joined.

    Raises:
        ClusterError: nodes are missing at `RLINF_CONNECT_TIMEOUT`, there are too many, or one does not answer.
    """
    ray = ray_api()
    driver_id = ray.get_runtime_context().get_node_id()
    deadline = time.monotonic() + contact_seconds()
    while True:
        seats = _wait(engine, session, config, wanted, deadline)
        # Probe this process's node directly, others in a task, since the environment of their Ray counts.
        here = driver_id if engine.embedded or session.member is not None else None
        try:
            probed = tuple(_probed(seats.members, here, run_on))
        except ClusterError:
            alive = {member.ray_id for member in members(ray.nodes())}
            lost = any(member.ray_id not in alive for member in seats.members if member is not ABSENT)
            if config is None or not config.survives_losses or not lost:
                raise
            # Ray has given up a node meanwhile: a spare may replace it, or the job may run without it.
            deadline = max(deadline, time.monotonic() + _POLL_SECONDS)
            continue
        if seats.ranked:
            return seats._replace(members=probed)
        ip_of_driver = next((member.ip for member in probed if member.ray_id == driver_id), "")
        ranked = rank_members(probed, ip_of_driver)
        return Seats(tuple(ranked[: None if config is None else config.num_active_nodes]))


def answer(reference: Any, member: NodeMember, asked_at: float) -> Any:
    """Return the result of a task on a node; `asked_at` is its start, in seconds since 1970.

    Raises:
        ClusterError: the node does not answer, or cannot run the task.
    """
    ray = ray_api()
    try:
        return ray.get(reference, timeout=max(_ANSWER_SECONDS, contact_seconds()))
    except (ray.exceptions.RayError, TimeoutError) as error:
        errors = ray.exceptions
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, RLinfError):
            raise ClusterError(
                cause.message, where=f"the node at {member.ip}", why=cause.why, help=cause.help
            ) from None
        why = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
        if isinstance(error, (errors.RayTaskError, errors.RuntimeEnvSetupError, errors.WorkerCrashedError)):
            raise ClusterError(
                f"the node at {member.ip} joined, but cannot run rlinf",
                why=why,
                help="install the same rlinf in the interpreter that Ray was started with there",
            ) from None
        raise ClusterError(
            f"the node at {member.ip} has not answered since {time.strftime('%H:%M:%S', time.localtime(asked_at))}",
            why=why,
            help="check that the machine runs and reaches the head (`rlinf status` probes every node); if its Ray has"
            " ended, `rlinf up FILE` starts it again",
        ) from None


def _wait(
    engine: RayEngine, session: Session, config: ClusterConfig | None, wanted: int | None, deadline: float
) -> Seats:
    """Return the nodes to probe, once every node has joined, been replaced by a spare, or may be missing."""
    while True:
        nodes = _listed(engine)
        joined = members(nodes)
        if wanted is None and session.nodes:
            by_id = {member.ray_id: member for member in joined}
            return Seats(tuple(by_id.get(ray_id, ABSENT) for ray_id in session.nodes), ranked=True)
        if wanted is not None and len(joined) > wanted:
            raise ClusterError(
                f"{wanted} nodes are requested, but the cluster has {len(joined)}",
                where=engine.address,
                help="correct `num_nodes`, or take the other nodes down",
            )
        late, lost = time.monotonic() > deadline, departed(nodes)
        if config is not None and config.survives_losses:
            seats = take_seats(config, joined, lost, late=late)
            if seats is not None:
                return seats
        if wanted is None or len(joined) == wanted:
            return Seats(tuple(joined))
        if engine.embedded:
            raise ClusterError(
                f"{wanted} nodes are requested, but the embedded Ray of this process has one",
                help='start Ray on the nodes and pass `address="HOST:PORT"`',
            )
        if late:
            raise ClusterError(
                f"{len(joined)} of {wanted} nodes joined within {contact_seconds():g} s",
                where=engine.address,
                why="; ".join([missing_ranks(joined, wanted), *lost.values()]),
                help="start the missing ones, as `rlinf up FILE` does without touching the others, or allow more"
                f" time with `{env_vars.CONNECT_TIMEOUT.name}`",
            )
        time.sleep(_POLL_SECONDS)


def _listed(engine: RayEngine) -> list[dict[str, Any]]:
    """Return Ray's node list, with replaced raylets marked as dead.

    For up to a minute, Ray lists a killed raylet as alive beside its successor at the same address.
    """
    nodes: list[dict[str, Any]] = ray_api().nodes()
    living = [node for node in nodes if node["Alive"]]
    addresses = Counter(node["NodeManagerAddress"] for node in living)
    doubtful = [node for node in living if addresses[node["NodeManagerAddress"]] > 1]
    if not doubtful:
        return nodes
    listed = gcs_client(engine.address).get_all_node_info(timeout=_LIST_SECONDS)
    ended = _ended(doubtful, {key.hex(): info.start_time_ms for key, info in listed.items()})
    return [{**node, "Alive": False} if node["NodeID"] in ended else node for node in nodes]


def _ended(raylets: Iterable[Mapping[str, Any]], started: Mapping[str, int]) -> set[str]:
    """Return the raylets that have certainly ended: a later raylet has their port, or no process listens on it.

    Args:
        raylets: their entries in `ray.nodes()`.
        started: the start of each in milliseconds since 1970, by Ray's id.
    """
    newest: dict[tuple[str, int], str] = {}
    for node in sorted(raylets, key=lambda node: started.get(node["NodeID"], 0)):
        newest[node["NodeManagerAddress"], node["NodeManagerPort"]] = node["NodeID"]
    there: set[str] = set()
    for place, ray_id in newest.items():
        try:
            socket.create_connection(place, _CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            pass  # no proof that it has ended
        there.add(ray_id)
    return {node["NodeID"] for node in raylets} - there


def _probed(joined: Iterable[NodeMember], here: str | None, run_on: RunOn) -> Iterable[NodeMember]:
    """Yield the nodes with their facts, each asked once; absent nodes unchanged."""
    asked_at = time.time()
    pending = [
        (member, None if member is ABSENT or member.ray_id == here else run_on(member, probe)) for member in joined
    ]
    for member, reference in pending:
        if member is ABSENT:
            yield member
        else:
            facts, declared_rank = probe() if reference is None else answer(reference, member, asked_at)
            yield replace(member, facts=facts, declared_rank=declared_rank)


def has_returned(absent: frozenset[int]) -> bool:
    """Return whether one of these nodes has joined again."""
    return any(member.label_rank in absent for member in members(ray_api().nodes()))


# The command that starts a process on a node: its interpreter and variables, checked before Ray uses them.
#
# Ray waits forever for an interpreter that does not exist or lacks ray, and for an environment that does not fit in one
# process argument. It also expands `$NAME` in variables, and inherits those of a launching worker. So the whole
# environment is written to a file on the node, which `node/node_env.py` reads there.


# Linux rejects an argument or variable of more than 128 KiB; this leaves room for the rest.
MAX_ENVIRONMENT_BYTES = 64 * 1024
_PREFLIGHT_SECONDS = 60.0
_PREFLIGHT = (
    WITHOUT_WORKING_FOLDER + "import json, ray, rlinf_core; print(json.dumps([*sys.version_info[:2], ray.__version__]))"
)


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """The interpreter and the variables of a process, as sent to its node.

    Without an interpreter, Ray's own is used. Variables are pairs of name and value, exactly as in the process.
    """

    interpreter: str | None
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, variables: Mapping[str, str], interpreter: str | None, where: str) -> ProcessCommand | None:
        """Return the command for variables and an interpreter; None if there are neither.

        Raises:
            ClusterError: the variables are too large for a process.
        """
        size = sum(len(name) + len(os.fsencode(value)) + 2 for name, value in variables.items())
        if size > MAX_ENVIRONMENT_BYTES:
            largest = max(variables, key=lambda name: len(variables[name]))
            raise ClusterError(
                f"the environment variables take {size} bytes, the limit for a process is {MAX_ENVIRONMENT_BYTES}",
                where=where,
                help=f"shorten them; the largest is `{largest}` with {len(os.fsencode(variables[largest]))} bytes",
            )
        if not variables and interpreter is None:
            return None
        return cls(interpreter, tuple(variables.items()))


def prepare(command: ProcessCommand) -> tuple[str, str | None]:
    """Write the environment of a command to a private file on this node, and check its interpreter.

    Returns: the command line for Ray to run in place of its own Python, and what is wrong with it, or None.
    """
    interpreter = command.interpreter or sys.executable
    words = [interpreter]
    if command.variables:
        variables = dict(command.variables)
        lists = [name for name in variables if name in PATH_LISTS]
        path = node_env.write(session_folder(), {"interpreter": interpreter, "env": variables, "prepended": lists})
        words = node_env.command(sys.executable, path)
    fault = _fault_of(interpreter, words) if command.interpreter is not None else None
    return shlex.join(words), fault


def _fault_of(interpreter: str, words: list[str]) -> str | None:
    """Return why an interpreter, which the command `words` starts, cannot run workers of this node's Ray, or None if it
    can.

    It must have the same minor version of Python, the same version of ray, and rlinf.
    """
    if not os.access(interpreter, os.X_OK):
        return "it is not executable" if os.path.exists(interpreter) else "it does not exist"
    ray, seconds = ray_api(), stretched(_PREFLIGHT_SECONDS)
    try:
        done = subprocess.run(
            [*words, "-c", _PREFLIGHT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not answer within {seconds:g} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {done.returncode}"
    *python, version = json.loads(done.stdout.splitlines()[-1])
    if python != list(sys.version_info[:2]):
        return f"it is Python {'.'.join(map(str, python))}, Ray runs on {sys.version_info[0]}.{sys.version_info[1]}"
    if version != ray.__version__:
        return f"it has ray {version}, the cluster runs {ray.__version__}"
    return None
