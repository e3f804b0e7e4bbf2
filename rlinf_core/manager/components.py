"""The knots of a directed graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

N = TypeVar("N")


def knots(edges: Mapping[N, Sequence[N]]) -> list[set[N]]:
    """Return the strongly connected components that no edge leaves, a single node without edges included.

    Every node reaches at least one of them. Tarjan's algorithm (Depth-first search and linear graph algorithms, 1972)
    without recursion, as chains may be longer than Python's stack; time and space are linear.

    Args:
        edges: for each node the nodes that it leads to, all of which are keys.
    """
    number: dict[N, int] = {}
    low: dict[N, int] = {}
    component: dict[N, int] = {}
    stack: list[N] = []
    found: list[set[N]] = []
    for root in edges:
        if root in number:
            continue
        path: list[tuple[N, Iterator[N]]] = []
        _visit(root, edges, number, low, stack, path)
        while path:
            node, successors = path[-1]
            for successor in successors:
                if successor not in number:
                    _visit(successor, edges, number, low, stack, path)
                    break
                if successor not in component:
                    low[node] = min(low[node], number[successor])
            else:
                path.pop()
                if path:
                    parent = path[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == number[node]:
                    members = _pop_to(node, stack)
                    component.update(dict.fromkeys(members, len(found)))
                    found.append(members)
    return [
        members
        for index, members in enumerate(found)
        if all(component[successor] == index for node in members for successor in edges[node])
    ]


def _visit(
    node: N,
    edges: Mapping[N, Sequence[N]],
    number: dict[N, int],
    low: dict[N, int],
    stack: list[N],
    path: list[tuple[N, Iterator[N]]],
) -> None:
    number[node] = low[node] = len(number)
    stack.append(node)
    path.append((node, iter(edges[node])))


def _pop_to(node: N, stack: list[N]) -> set[N]:
    members: set[N] = set()
    while node not in members:
        members.add(stack.pop())
    return members
