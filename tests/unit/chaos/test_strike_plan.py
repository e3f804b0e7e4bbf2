"""Plans of faults: functions of their seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.errors import ConfigError
from tests.chaos.fault_table import FAULTS, Deed, chosen_faults
from tests.chaos.strike_plan import plan_of

names = st.lists(st.sampled_from(list(FAULTS)), min_size=1, unique=True)


@given(st.integers(), st.integers(1, 1000), names, st.integers(1, 9))
def test_plan_keeps_its_bounds(seed: int, steps: int, faults: list[str], most: int) -> None:
    plan = plan_of(seed, steps, faults, most)
    assert 1 <= len(plan.strikes) <= most
    assert [strike.step for strike in plan.strikes] == sorted(strike.step for strike in plan.strikes)
    for strike in plan.strikes:
        assert strike.fault in faults
        assert 0 <= strike.step < steps
        assert 0 <= strike.pick < 1
        assert 0 <= strike.delay <= 1
        assert (strike.seconds > 0) == (FAULTS[strike.fault].deed in (Deed.PAUSE, Deed.FILL))
    # A run that may restart nothing ends with its first death, and has no second.
    assert plan.max_restarts or len(plan.strikes) == 1


@given(st.integers(), st.integers(1, 1000))
def test_plan_is_a_function_of_its_seed(seed: int, steps: int) -> None:
    assert plan_of(seed, steps) == plan_of(seed, steps)


def test_plan_is_the_same_in_another_process() -> None:
    code = "from tests.chaos.strike_plan import plan_of; print([plan_of(seed, 30) for seed in range(20)])"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str([plan_of(seed, 30) for seed in range(20)])


def test_seeds_draw_every_fault() -> None:
    drawn = Counter(strike.fault for seed in range(300) for strike in plan_of(seed, 30).strikes)
    assert drawn.keys() == FAULTS.keys()
    assert drawn["kill-worker"] == max(drawn.values())


def test_names_choose_faults() -> None:
    assert chosen_faults([]) == tuple(FAULTS)
    assert chosen_faults(["fill-actor", "freeze"]) == ("fill-actor", "freeze-worker")
    with pytest.raises(ConfigError, match="there is no fault `kill-wroker`") as caught:
        chosen_faults(["kill-wroker"])
    assert caught.value.help == "did you mean `kill-worker`?"
