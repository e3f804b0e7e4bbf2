"""The order in which the processes of a group are started."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.worker.group.launch import WAVE, waves


@given(st.lists(st.integers(0, 3), max_size=120))
def test_wave_starts_few_processes_per_node_until_all_run(nodes: list[int]) -> None:
    result = waves(nodes)
    for wave in result:
        assert 0 < max(Counter(nodes[index] for index in wave).values()) <= WAVE
    assert sorted(index for wave in result for index in wave) == list(range(len(nodes)))
    most = max(Counter(nodes).values(), default=0)
    assert len(result) == -(-most // WAVE)
