"""Rollouts that run ahead on the accelerators that train are named, in a group or not, where both must fit at once."""

from __future__ import annotations

import pytest

from rlinf_core.job.load import load_job

PLACED = "cluster.component_placement"
ON_ALL = f"{PLACED}.rollout={{node_group: gpus, placement: 0-7}}"


@pytest.mark.parametrize(
    ("file", "overrides", "warned"),
    [
        ("collocated", ("runner.max_staleness=1",), True),
        ("collocated", (), False),
        ("collocated", ("runner.max_staleness=2", f"{PLACED}.rollout={{node_group: gpus, placement: 3}}"), True),
        ("disaggregated", (), False),
        ("disaggregated", (ON_ALL,), False),
        ("disaggregated", (ON_ALL, "actor.enable_offload=true"), True),
        ("math_async_disaggregated", (), False),
        ("math_async_disaggregated", (f"{PLACED}.rollout=all", f"{PLACED}.actor=all"), True),
    ],
)
def test_accelerators_that_hold_both_sides_at_once_are_named(
    file: str, overrides: tuple[str, ...], warned: bool
) -> None:
    messages = [str(finding.message) for finding in load_job(file, overrides).diagnostics]
    assert any("must hold both" in message for message in messages) == warned
