"""The claims of one job on accelerators and robots, taken on all nodes or none before anything starts there.

First all nodes are checked, and nothing is taken unless all devices look free: a job that waits holds nothing. Then
devices are taken node by node in the order of ranks, all of a node or none; a job that comes too late on a node gives
back all that it took. So no job holds one device while it waits for another, and of jobs that start at the same time
one always succeeds. On its own node the driver is the holder; on other nodes it is an actor that ends with the job, and
between two attempts of a run an actor that waits for the next. Workers keep copies of the claims of their devices, so
that a claim ends with the last process of the job there, in whatever way that ends. The names of claims are the same
for every job.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, cast

from rlinf_core import env_vars
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import ClusterError, DeviceHeldError, RLinfError
from rlinf_core.hardware.robots import variable_of
from rlinf_core.node.device_claims import ClaimResult, DeviceHolder, HolderInfo
from rlinf_core.node.holder_words import held_words, job_words, waits_for
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology, NodeInfo

Devices = Mapping[str, str]
"""The devices of a node, for example `NVIDIA:GPU-5d5b`, each with its readable name, for example `accelerator 0`."""


def devices_of(topology: ClusterTopology, placements: Iterable[Placement]) -> dict[int, dict[str, str]]:
    """Return the accelerators and robots of processes, by node."""
    devices: dict[int, dict[str, str]] = {}
    for placement in placements:
        node = topology.nodes[placement.cluster_node_rank]
        if named := dict(_devices(node, placement)):
            devices.setdefault(node.rank, {}).update(named)
    return devices


def labels_of(node: NodeInfo) -> dict[str, str]:
    """Return the readable names of a node's accelerators, for example `NVIDIA:0`, by their names in claims."""
    return {
        f"{node.accelerator_type}:{name}": f"{node.accelerator_type}:{_visible_id(node, unit)}"
        for unit in range(node.num_accelerators or 0)
        for name in _identities(node, unit)
    }


def _identities(node: NodeInfo, unit: int) -> Sequence[str]:
    """Return the machine-wide names of an accelerator: two jobs may see it under different numbers."""
    return node.accelerator_identities[unit] if node.accelerator_identities else (_visible_id(node, unit),)


def _visible_id(node: NodeInfo, unit: int) -> str:
    return node.accelerator_ids[unit] if node.accelerator_ids else str(unit)


def _devices(node: NodeInfo, placement: Placement) -> Iterable[tuple[str, str]]:
    if placement.local_accelerator_rank is not None:
        for unit in placement.local_hardware_ranks:
            for name in _identities(node, unit):
                yield f"{placement.hardware_type}:{name}", f"accelerator {unit}"
        return
    robots = [robot for robot in node.robots if robot.type == placement.hardware_type]
    for unit in placement.local_hardware_ranks if robots else ():
        config = robots[unit].config
        for field in type(config).exclusive:
            value: Any = getattr(config, field)
            several = isinstance(value, tuple | list)
            for single in map(str, cast("Sequence[object]", value) if several else [value] if value else ()):
                # The value of a variable of the node is not known here; the robot's own claim guards that device.
                if variable_of(single) is None:
                    # A camera has the same name whichever robot declares it.
                    kind = "camera" if field.endswith("camera_serials") else placement.hardware_type
                    yield f"{kind}:{single}", f"{kind} {single}"


class ClaimsOn(Protocol):
    """The interface of a cluster to claims."""

    @property
    def topology(self) -> ClusterTopology: ...
    @property
    def own_rank(self) -> int | None: ...
    def allocate(self, actor_class: type, *, node_rank: int, outlives: bool = False) -> Any: ...
    def announce_wait(self, what: str, *, again: bool = False, instead: str = "") -> None: ...


class NodeHolder(DeviceHolder):
    """The holder of claims on a node without the driver: an actor, which ends with the job unless it keeps claims."""

    def pid(self) -> int:
        """Return the pid of this process."""
        return os.getpid()

    def keep(
        self, names: Mapping[str, str], pid: int, labels: Mapping[str, str], about: Mapping[str, Any], seconds: float
    ) -> tuple[int, list[str]]:
        """Hold claims until the next attempt adopts them, at most `seconds`, and then end this process.

        Returns:
            The pid of this process, and the devices whose claims it has.
        """
        self.tell(about)
        devices = self.adopt(names, pid, labels)
        self.when_empty(_end_process)
        end = threading.Timer(seconds, self.drop)
        end.daemon = True
        end.start()
        return os.getpid(), devices


def _end_process() -> None:
    os._exit(0)


class LeftClaims(NamedTuple):
    """The claims that an attempt of a run has left on a node for the next attempt.

    Attributes:
        pid: the pid of the process that holds them there.
        names: the names of the claims, by device.
    """

    pid: int
    names: Mapping[str, str]


LOGGER = logging.getLogger("rlinf")
# The longest pause between two attempts, which is randomized so that two jobs do not try in step.
_PAUSE_SECONDS: Final = 1.0
# Seconds before a wait is reported: a job that has just ended keeps its devices until its last process is gone.
_SILENT_SECONDS: Final = 10.0
# Seconds between two messages about a wait, unless the holder changes.
_WORD_SECONDS: Final = 60.0
_TELL_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 180.0
# Seconds for which claims outlast an attempt, besides the time to join; and within which they are left to keepers.
_RETURN_SECONDS: Final = 120.0
_LEAVE_SECONDS: Final = 60.0
# The prefix of the value `group:NAME` of `RLINF_CLAIMS`.
_GROUP: Final = "group:"


class JobClaims:
    """All claims of a process and its workers, by node."""

    def __init__(self) -> None:
        self._own = DeviceHolder()
        # The holders on other nodes, by rank.
        self._actors: dict[int, Any] = {}
        # The name of each claim, by rank and device.
        self.names: dict[tuple[int, str], str] = {}
        self._words: dict[tuple[int, str], str] = {}
        # The claims of each use, such as a launch. A claim without a use is given back with the cluster.
        self._uses: dict[object, set[tuple[int, str]]] = {}
        self._about: dict[str, Any] = {}
        self._described = 0.0
        # The rank of the driver's node in this cluster; None if the job has no process there.
        self._own_rank: int | None = None
        self._entered = False
        # Whether claims last longer than the cluster, and whether the current ones are from an earlier cluster.
        self.kept, self._from_before = False, False
        # Whether the run has had its devices: then it must get them again, and waits even with `no-wait`.
        self.had = False
        # The claims that the previous attempt has left on other nodes, by the node's address.
        self._left: dict[str, LeftClaims] = {}
        self._left_words: dict[str, str] = {}

    def enter(self, cluster: ClaimsOn) -> None:
        """Assign kept claims to the node's rank in this cluster; give them back if the node is not part of the job."""
        if self._entered:
            return
        self._entered, rank = True, cluster.own_rank
        self._own_rank = rank
        if rank is None:
            self._own.drop()
            self.names.clear()
        else:
            self._words = {(rank, device): self._words[before, device] for before, device in self.names}
            self.names = {(rank, device): name for (_, device), name in self.names.items()}
        self._adopt(cluster)

    def leave(self, cluster: ClaimsOn) -> None:
        """Leave the claims on other nodes to processes there, which hold them until the next attempt has joined.

        The claims on a node that does not answer are lost.
        """
        ray = ray_api()
        seconds = _RETURN_SECONDS + env_vars.CONNECT_TIMEOUT.get()
        by_rank: dict[int, dict[str, str]] = {}
        for (rank, device), name in self.names.items():
            if rank != self._own_rank and rank in self._actors:
                by_rank.setdefault(rank, {})[device] = name
        pending: dict[int, Any] = {}
        for rank, names in by_rank.items():
            with suppress(RLinfError, ray.exceptions.RayError):
                keeper = cluster.allocate(NodeHolder, node_rank=rank, outlives=True)
                labels = labels_of(cluster.topology.nodes[rank])
                pending[rank] = keeper.keep.remote(names, self._actors[rank].pid.remote(), labels, self._about, seconds)
        self._left, end = {}, time.monotonic() + _LEAVE_SECONDS
        for rank, answer in pending.items():
            with suppress(ray.exceptions.RayError, TimeoutError):
                pid, devices = ray.get(answer, timeout=max(0.0, end - time.monotonic()))
                address = cluster.topology.nodes[rank].ip
                if devices and address is not None:
                    self._left[address] = LeftClaims(pid, {device: by_rank[rank][device] for device in devices})
        self._left_words = {device: words for (_, device), words in self._words.items()}

    def _adopt(self, cluster: ClaimsOn) -> None:
        """Take over the claims that the previous attempt has left on the nodes of this cluster."""
        left, self._left = self._left, {}
        pending: dict[int, tuple[LeftClaims, Any]] = {}
        for node in cluster.topology.nodes:
            there = left.get(node.ip or "")
            if there is None or node.rank == self._own_rank:
                continue
            with suppress(RLinfError, ray_api().exceptions.RayError):
                # Start all holders before waiting for any: each is a new process.
                self._hold_on(cluster, node.rank)
                answer = self._actors[node.rank].adopt.remote(there.names, there.pid, labels_of(node))
                pending[node.rank] = there, answer
        for rank, (there, answer) in pending.items():
            # The claims on a node that does not answer are lost.
            with suppress(ClusterError):
                for device in self._answer(rank, answer):
                    self.names[rank, device] = there.names[device]
                    self._words[rank, device] = self._left_words[device]
                    self._from_before = True

    def _hold_on(self, cluster: ClaimsOn, rank: int) -> None:
        """Start the holder of claims on another node."""
        self._actors[rank] = cluster.allocate(NodeHolder, node_rank=rank)
        self._actors[rank].tell.remote(self._about)

    def take(self, cluster: ClaimsOn, wanted: Mapping[int, Devices]) -> None:
        """Take devices of nodes, all or none; wait while other jobs hold them, if `RLINF_CLAIMS` allows it.

        Raises:
            DeviceHeldError: another job holds one, and this one does not wait, or must not because it holds others.
            ClusterError: a node does not answer.
        """
        if not self.names:
            self.tell(since=time.time())
        try:
            self._take(cluster, wanted, env_vars.CLAIMS.get())
        finally:
            if "waits_for" in self._about:
                self._own.stop_waiting()
                del self._about["waits_for"]
                self.tell(since=time.time())

    def _take(self, cluster: ClaimsOn, wanted: Mapping[int, Devices], mode: str) -> None:
        waits = mode != "no-wait" or (self.kept and self.had)
        began, last_word, last_holders = time.monotonic(), 0.0, ""
        while (refused := self._try(cluster, wanted, mode)) is not None:
            rank, others = refused
            now = time.monotonic()
            # A holder that waits itself will release soon, and processes of the previous attempt are about to end.
            standing = [one for one in others if one.about and not waits_for(one) and not self._is_own(one)]
            if standing or now - began > _SILENT_SECONDS:
                words = held_words(rank, wanted[rank], standing or others)
                holders = ", ".join(map(job_words, standing or others))
                if not waits or (self.names and not self._from_before):
                    raise _refusal(words, wanted[rank], waits=waits)
                wanted = self._with_the_kept(wanted)
                again = holders == last_holders and "waits_for" in self._about
                if not again or now - last_word > _WORD_SECONDS:
                    last_word, last_holders = now, holders
                    if "waits_for" not in self._about:
                        self._own.wait()
                    self.tell(waits_for=words)
                    cluster.announce_wait(words, again=again, instead=self._instead(wanted[rank]))
            time.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.0))

    def _instead(self, devices: Devices) -> str:
        """Return a text on what the user of a waiting job can do instead; empty if it must wait anyway."""
        if self.kept and self.had:
            return ""
        variable = env_vars.CLAIMS.name
        if _may_share(devices):
            return f"`--share` starts beside it now, `--no-wait` ends at once (`{variable}=share` or `no-wait`)"
        return f"`--no-wait` ends at once (`{variable}=no-wait`)"

    def _is_own(self, one: HolderInfo) -> bool:
        about = one.about or {}
        return all(about.get(key) == self._about[key] for key in ("pid", "host", "run") if key in self._about)

    def _with_the_kept(self, wanted: Mapping[int, Devices]) -> Mapping[int, Devices]:
        """Give back the claims kept from the previous cluster, since a waiting job holds none; add them to `wanted`."""
        merged = {rank: dict(devices) for rank, devices in wanted.items()}
        for rank, device in self.names:
            merged.setdefault(rank, {})[device] = self._words[rank, device]
            self._drop_on(rank, [device])
        self.names.clear()
        return merged

    def _try(
        self, cluster: ClaimsOn, wanted: Mapping[int, Devices], mode: str
    ) -> tuple[int, Sequence[HolderInfo]] | None:
        """Try once; return the first node that refused and the holders of its devices, or None if all were taken."""
        for rank in sorted(wanted):
            if rank != self._own_rank and rank not in self._actors:
                # Start all holders before waiting for any: each is a new process.
                self._hold_on(cluster, rank)
        group = mode.removeprefix(_GROUP) if mode.startswith(_GROUP) else ""
        if mode != "share":
            for rank, others in self._look(wanted, group).items():
                if others:
                    return rank, others
        got: dict[int, ClaimResult] = {}
        asked: list[int] = []
        try:
            for rank in sorted(wanted):
                asked.append(rank)
                labels = labels_of(cluster.topology.nodes[rank])
                got[rank] = self._take_on(rank, sorted(wanted[rank]), group, labels, share=mode == "share")
                if not got[rank].ok:
                    self._drop_all(asked, wanted)
                    return rank, got[rank].others
        except BaseException:
            self._drop_all(asked, wanted)
            raise
        self._from_before, self.had = False, True
        for rank, taken in got.items():
            self.names |= {(rank, device): name for device, name in taken.names.items()}
            self._words |= {(rank, device): words for device, words in wanted[rank].items()}
            if taken.others:
                LOGGER.warning("shared with other jobs: %s", held_words(rank, wanted[rank], taken.others))
        return None

    def _look(self, wanted: Mapping[int, Devices], group: str) -> dict[int, Sequence[HolderInfo]]:
        """Return the other holders of devices of each node; all nodes are asked at the same time."""
        pending = {
            rank: self._actors[rank].look.remote(sorted(devices), group=group)
            for rank, devices in sorted(wanted.items())
            if rank != self._own_rank
        }
        seen: dict[int, Sequence[HolderInfo]] = {}
        for rank, devices in wanted.items():
            if rank == self._own_rank:
                seen[rank] = self._own.look(devices, group=group)
        return seen | {rank: self._answer(rank, reference) for rank, reference in pending.items()}

    def _drop_all(self, ranks: Iterable[int], wanted: Mapping[int, Devices]) -> None:
        for rank in ranks:
            self._drop_on(rank, list(wanted[rank]))

    def _take_on(
        self, rank: int, devices: Sequence[str], group: str, labels: Mapping[str, str], *, share: bool
    ) -> ClaimResult:
        options: dict[str, Any] = {"share": share, "group": group}
        options["labels"] = {device: labels[device] for device in devices if device in labels}
        if rank != self._own_rank:
            return self._answer(rank, self._actors[rank].take.remote(devices, **options))
        try:
            return self._own.take(devices, **options)
        except OSError as error:
            raise ClusterError(
                "this machine makes no claims on devices",
                why=str(error),
                help=f"a sandbox must allow abstract Unix sockets, and `{env_vars.CLAIMS.name}` cannot do without",
            ) from None

    def _answer(self, rank: int, reference: Any) -> Any:
        """Return the answer of the holder on a node; if it does not answer, the next attempt starts a new one."""
        ray = ray_api()
        try:
            return ray.get(reference, timeout=_ANSWER_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._actors.pop(rank, None)
            raise ClusterError(
                f"node {rank} does not say who holds its devices",
                why=(str(error).strip().splitlines() or [type(error).__name__])[-1],
                help="`rlinf status` probes every node",
            ) from None

    def _drop_on(self, rank: int, devices: Sequence[str]) -> None:
        if rank == self._own_rank:
            self._own.drop(devices)
        elif rank in self._actors:
            self._actors[rank].drop.remote(devices)

    def use(self, use: object, keys: Iterable[tuple[int, str]]) -> None:
        """Record a use of claims: a claim lasts until all of its uses have ended."""
        self._uses.setdefault(use, set()).update(keys)

    def end_use(self, use: object) -> None:
        """End a use, and give back the claims that have no other use."""
        ended = self._uses.pop(use, set[tuple[int, str]]())
        for rank, device in ended.difference(*self._uses.values()):
            if self.names.pop((rank, device), None) is not None:
                self._drop_on(rank, [device])

    def tell(self, *, often: bool = False, **changes: object) -> None:
        """Change the reply to questions; with `often`, update holders on other nodes at most every 2 s."""
        if not self._about:
            self._about = {"pid": os.getpid(), "host": socket.gethostname(), "command": _command()}
        self._about |= changes
        self._own.tell(self._about)
        now = time.monotonic()
        if self._actors and not (often and now - self._described < _TELL_SECONDS):
            self._described = now
            for actor in self._actors.values():
                with suppress(ray_api().exceptions.RayError):
                    actor.tell.remote(self._about)

    def renew(self) -> None:
        """Count the claims kept from the previous cluster as claims of this one."""
        self._from_before = False

    def release(self) -> None:
        """Give all claims back, except kept ones on the driver's node, which stay for the next cluster."""
        # Claims on other nodes end with their actors, which end with the job.
        self.names = {key: name for key, name in self.names.items() if self.kept and key[0] == self._own_rank}
        self._actors, self._from_before, self._entered = {}, bool(self.names), False
        self._uses.clear()
        if not self.kept:
            self._own.drop()


def _may_share(devices: Devices) -> bool:
    """Return whether two jobs can use these devices at once: accelerators, not robots."""
    return all(name.startswith("accelerator ") for name in devices.values())


def _command() -> str:
    """Return the first two words of this process's command: further arguments may hold secrets."""
    program, *arguments = sys.argv or [""]
    name = os.path.basename(program)
    return f"rlinf {arguments[0]}" if arguments and name in ("rlinf", "__main__.py") else name or "python"


def _refusal(words: str, devices: Devices, *, waits: bool) -> DeviceHeldError:
    share = f", or set `{env_vars.CLAIMS.name}=share` (`--share`) to run beside it" if _may_share(devices) else ""
    why, instead = None, "start it later"
    if waits:
        why = "this job holds other devices already, and two jobs that wait so could wait for each other"
        instead = "claim all devices at once by `cluster.claim(...)`"
    return DeviceHeldError(f"another job holds {words}", why=why, help=f"{instead}{share}")
