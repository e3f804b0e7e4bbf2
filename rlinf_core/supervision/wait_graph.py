"""The wait-for graph, and the detection of deadlocks in it.

The nodes are waiting operations, and the code of processes. An operation can end when one of its peers can act (or all
of them, for a call on a whole group). Code can act when it runs, or when one of the operations that it waits in can
end. All nodes that running code can free in this way are free; the others are stuck. The knots of the stuck nodes, that
is, the parts that wait only for themselves, are the deadlocks.

Unknown nodes count as able to act, so that a healthy job is never reported as deadlocked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rlinf_core.waiting import Operation, OperationKind, spell_seconds

N = TypeVar("N")

# The code of a process, or one of its operations by serial, from 1.
Node: TypeAlias = tuple[str, int]
_CODE = 0
# Stands for the code of all processes, in edges of operations that any process may end.
_ANYONE: Node = ("", _CODE)
# The most sentences in a description, and lines about the resources of one process.
_PICTURE_LINES = 12
_HELD_LINES = 2


@dataclass(frozen=True, slots=True)
class Wait:
    """A waiting operation, and the processes that could end it.

    Attributes:
        waits_for: the processes whose code could end it.
        every: whether all of them are needed, as for a call on a whole group; else one suffices.
        anyone: whether processes beyond `waits_for` could end it, too, as on a channel to which any process may
            connect. Any process may call a method of an idle one.
        wakes: the processes whose operations may end when this detached operation ends.
        failing: whether it will fail anyway, by a pending error or a deadline set by its process.
        role: the role of these peers, for example `producer`; empty for plain peers.
        state: the state of the channel or peer that it waits on, for example `empty`.
    """

    operation: Operation
    waits_for: tuple[str, ...] = ()
    every: bool = False
    anyone: bool = False
    wakes: frozenset[str] = frozenset()
    failing: bool = False
    role: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A snapshot of a process.

    Attributes:
        progress: a number that changes with any progress.
        running: whether some of its code runs without waiting.
        doing: its activity for the description, for example `runs `train` for 3 s`.
        died: seconds since its death, or None while it lives.
        holds: descriptions of further resources that it holds, also while it waits.
    """

    name: str
    waits: tuple[Wait, ...] = ()
    progress: int = 0
    running: bool = False
    doing: str = "runs"
    died: float | None = None
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A set of processes that wait only for one another, so that their operations must fail."""

    members: tuple[str, ...]
    operations: tuple[Node, ...]
    picture: str


class WaitGraph:
    """A snapshot of the waits of all processes.

    Waits of processes in `moving`, which made progress lately, may be over already, and do not count.

    Args:
        silent: processes that did not answer, with the seconds that they had.
    """

    def __init__(
        self,
        processes: Iterable[Process],
        moving: Collection[str] = (),
        silent: Mapping[str, float] | None = None,
    ) -> None:
        self._silent: Mapping[str, float] = {} if silent is None else silent
        self._processes: Mapping[str, Process] = {process.name: process for process in processes}
        self._dead = {process.name for process in self._processes.values() if process.died is not None}
        self._waits: dict[Node, Wait] = {
            (process.name, wait.operation.serial): wait
            for process in self._processes.values()
            if process.died is None
            for wait in process.waits
        }
        self._detached = [(node, wait) for node, wait in self._waits.items() if wait.operation.detached]
        self._edges: dict[Node, list[Node]] = {node: self._edges_of(node, wait) for node, wait in self._waits.items()}
        for process in self._processes.values():
            if process.died is None:
                own = [(process.name, wait.operation.serial) for wait in process.waits if not wait.operation.detached]
                self._edges[process.name, _CODE] = own
        self._stuck = self._find_stuck(frozenset(moving))

    def _edges_of(self, node: Node, wait: Wait) -> list[Node]:
        # If any process may end the operation, `_ANYONE` stands for the known ones.
        edges = [(name, _CODE) for name in wait.waits_for if not _anyone(wait) or name not in self._processes]
        if not wait.every:
            edges += [
                other
                for other, detached in self._detached
                if node[0] in detached.wakes and (wait.anyone or other[0] in wait.waits_for)
            ]
        return edges

    def _free(self, moving: frozenset[str]) -> Iterator[Node]:
        """Yield the nodes that can act or end on their own."""
        for process in self._processes.values():
            if process.died is None and (
                process.running or process.name in moving or not self._edges[process.name, _CODE]
            ):
                yield (process.name, _CODE)
        for node, wait in self._waits.items():
            if node[0] in moving or self._fails(wait) or (wait.every and not wait.waits_for):
                yield node
            # An unknown process may act.
            yield from (edge for edge in self._edges[node] if edge[0] not in self._processes)

    def _fails(self, wait: Wait) -> bool:
        """Return whether a wait will fail anyway, also because all of its peers (with `every`, one) are dead."""
        dead = sum(name in self._dead for name in wait.waits_for) if self._dead else 0
        return wait.failing or (dead > 0 and (wait.every or (dead == len(wait.waits_for) and not _anyone(wait))))

    def _find_stuck(self, moving: frozenset[str]) -> frozenset[Node]:
        waited_by: dict[Node, list[Node]] = {}
        for node, edges in self._edges.items():
            for edge in edges:
                waited_by.setdefault(edge, []).append(node)
        waited_by[_ANYONE] = [node for node, wait in self._waits.items() if _anyone(wait) and not wait.every]
        missing = {node: len(self._edges[node]) for node, wait in self._waits.items() if wait.every}
        able: set[Node] = set()
        todo = deque(self._free(moving))
        while todo:
            node = todo.popleft()
            if node in able:
                continue
            able.add(node)
            if node[1] == _CODE:
                todo.append(_ANYONE)
            for waiter in waited_by.get(node, ()):
                missing[waiter] = missing.get(waiter, 1) - 1
                if missing[waiter] <= 0:
                    todo.append(waiter)
        return frozenset(node for node in self._edges if node not in able)

    @property
    def stuck(self) -> frozenset[Node]:
        """The stuck operations: (process, serial)."""
        return frozenset(node for node in self._stuck if node[1] != _CODE)

    def deadlocks(self) -> list[Deadlock]:
        """Return the knots, each of which is stuck independently of the rest."""
        edges = {node: [to for to in self._edges[node] if to in self._stuck] for node in self._stuck}
        edges[_ANYONE] = [node for node in self._stuck if node[1] == _CODE]
        for node in self._stuck:
            if node in self._waits and _anyone(self._waits[node]):
                edges[node].append(_ANYONE)
        deadlocks: list[Deadlock] = []
        for knot in knots(edges):
            # Being idle is not an operation that could fail.
            operations = sorted(
                (node for node in knot if node in self._waits and not _idle(self._waits[node])),
                key=lambda node: (_natural(node[0]), node[1]),
            )
            if operations:
                members = tuple(dict.fromkeys(name for name, _ in operations))
                deadlocks.append(Deadlock(members, tuple(operations), self._picture(operations)))
        return sorted(deadlocks, key=lambda deadlock: deadlock.members)

    def explain(self, name: str, serial: int | None = None) -> str:
        """Return a description of what a process, or one of its operations, waits for, down to the root cause.

        For example "env:3 waits on channel `action`, empty, for 12 s; its only producer rollout:1 waits in recv from
        actor:0 for 14 s; actor:0 died 12 s ago". Empty if it does not wait.
        """
        process = self._processes.get(name)
        waits = process.waits if process else ()
        serials = [wait.operation.serial for wait in waits if serial in (None, wait.operation.serial)]
        return self._picture([(name, serial) for serial in serials])

    def _picture(self, start: Iterable[Node]) -> str:
        sentences: list[str] = []
        visited: set[Node] = set()
        for node in start:
            if node in self._waits:
                self._describe(node, sentences, visited)
        if len(sentences) > _PICTURE_LINES:
            omitted = len(sentences) - _PICTURE_LINES + 1
            sentences[_PICTURE_LINES - 1 :] = [f"and {omitted} more"]
        return "; ".join(sentences)

    def _describe(self, start: Node, sentences: list[str], visited: set[Node]) -> None:
        todo: deque[tuple[Node, str]] = deque()

        def follow(node: Node, role: str) -> None:
            if node not in visited:
                visited.add(node)
                todo.append((node, role))

        follow(start, "")
        while todo:
            node, role = todo.popleft()
            process = self._processes.get(node[0])
            if node in self._waits:
                wait = self._waits[node]
                held = "" if process is None else _held(process)
                sentences.append(f"{role}{node[0]} {wait.operation.waits(wait.state)}{held}")
                if wait.role and not wait.waits_for:
                    sentences.append(f"it has had no {wait.role} so far")
                only = "only " if len(wait.waits_for) == 1 else ""
                towards = f"its {only}{wait.role} " if wait.role else ""
                for name in wait.waits_for:
                    follow((name, _CODE), towards)
            elif process is None:
                seconds = self._silent.get(node[0])
                silence = "is unknown" if seconds is None else f"did not answer within {spell_seconds(seconds)}"
                sentences.append(f"{role}{node[0]} {silence}")
            elif process.died is not None:
                sentences.append(f"{role}{node[0]} died {spell_seconds(process.died)} ago")
            elif process.running or not self._edges[node]:
                sentences.append(f"{role}{node[0]} {process.doing}{_held(process)}")
            else:
                for operation in self._edges[node]:
                    follow(operation, role)


class DeadlockDetector:
    """A detector of deadlocks: knots that have not changed over repeated snapshots.

    One snapshot is not enough: processes are sampled one after another, and a message may have been in transit between
    them.

    Args:
        patience: seconds for which every process of a knot must be unchanged.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        # By process: its observed state, and the time since which it is unchanged.
        self._seen: dict[str, tuple[object, float]] = {}

    def look(self, processes: Collection[Process], now: float) -> list[Deadlock]:
        """Return the deadlocks of a job, given a snapshot taken at `now` (monotonic seconds)."""
        observed: dict[str, tuple[object, float]] = {}
        moving: set[str] = set()
        for process in processes:
            signature = (
                process.progress,
                process.running,
                process.died is None,
                tuple(
                    (wait.operation.serial, wait.operation.detached, wait.waits_for, wait.state)
                    for wait in process.waits
                ),
            )
            before = self._seen.get(process.name)
            since = before[1] if before is not None and before[0] == signature else now
            observed[process.name] = (signature, since)
            if now - since < self._patience:
                moving.add(process.name)
        self._seen = observed
        return WaitGraph(processes, moving).deadlocks()


def _held(process: Process) -> str:
    return f" and {'; '.join(process.holds[:_HELD_LINES])}" if process.holds else ""


def _idle(wait: Wait) -> bool:
    return wait.operation.kind is OperationKind.IDLE


def _anyone(wait: Wait) -> bool:
    return wait.anyone or _idle(wait)


def _natural(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a sort key that orders `env:2` before `env:10`."""
    group, *ranks = name.split(":")
    return group, tuple(int(rank) for rank in ranks if rank.isdigit())


def knots(edges: Mapping[N, Sequence[N]]) -> list[set[N]]:
    """Return the strongly connected components that no edge leaves, including single nodes without edges.

    Every node reaches at least one of these components.

    Args:
        edges: the successors of each node, all of which are keys.
    """
    reversed_edges: dict[N, list[N]] = {node: [] for node in edges}
    for node, successors in edges.items():
        for successor in successors:
            reversed_edges[successor].append(node)
    closed: list[set[N]] = []
    # The nodes that reach one of these components.
    settled: set[N] = set()
    for start in edges:
        node = start
        while node not in settled:
            after, before = _reached(node, edges), set(_reached(node, reversed_edges))
            beyond = [other for other in after if other not in before]
            if beyond:
                # Continue at a node that does not reach this one, so it reaches fewer nodes. The farthest such node is
                # the likeliest to be in a component that no edge leaves.
                node = beyond[-1]
            else:
                closed.append(set(after))
                settled |= before
    return closed


def _reached(start: N, edges: Mapping[N, Sequence[N]]) -> list[N]:
    """Return a node and all nodes that it reaches, the nearest first."""
    reached = {start: None}
    todo = deque(reached)
    while todo:
        for node in edges[todo.popleft()]:
            if node not in reached:
                reached[node] = None
                todo.append(node)
    return list(reached)
