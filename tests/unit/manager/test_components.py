from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.manager.components import knots

graphs = st.integers(0, 8).flatmap(
    lambda size: st.fixed_dictionaries({node: st.lists(st.integers(0, size - 1), max_size=3) for node in range(size)})
)


def reach(edges: dict[int, list[int]], start: int) -> frozenset[int]:
    seen, todo = {start}, [start]
    while todo:
        for successor in edges[todo.pop()]:
            if successor not in seen:
                seen.add(successor)
                todo.append(successor)
    return frozenset(seen)


@given(graphs)
def test_knots_are_the_smallest_sets_that_nothing_leaves(edges: dict[int, list[int]]) -> None:
    reached = {node: reach(edges, node) for node in edges}
    expected = {reached[node] for node in edges if all(reached[other] == reached[node] for other in reached[node])}
    found = [frozenset(knot) for knot in knots(edges)]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_long_chains_need_no_recursion() -> None:
    edges = {node: [node + 1] for node in range(50_000)} | {50_000: [49_999]}
    assert knots(edges) == [{49_999, 50_000}]
