"""The sum tree against cumulative sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.replay.sum_tree import SumTree

sets = st.lists(st.tuples(st.integers(0, 12), st.floats(0, 100)), min_size=1, max_size=40)


@given(sets, st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_items_are_found_as_by_cumulative_sums(given_priorities: list[tuple[int, float]], where: list[float]) -> None:
    tree, plain = SumTree(13), np.zeros(13)
    for item, priority in given_priorities:
        tree.set(np.array([item]), np.array([priority]))
        plain[item] = priority
    np.testing.assert_array_equal(tree.priorities, plain)
    np.testing.assert_allclose(tree.total, plain.sum(), rtol=1e-12)
    if not plain.any():
        return
    positions = np.array(where) * tree.total
    result = tree.find(positions)
    assert (plain[result] > 0).all()
    ends = np.cumsum(plain)
    slack = 1e-9 * tree.total
    assert (positions <= ends[result] + slack).all()
    assert (positions >= ends[result] - plain[result] - slack).all()


def test_many_items_are_set_at_once() -> None:
    tree = SumTree(1000)
    tree.set(np.arange(1000), np.arange(1000.0))
    assert tree.total == 499_500
    assert tree.find(np.array([0.0, 0.5, 1.5, 499_499.5])).tolist() == [1, 1, 2, 999]
