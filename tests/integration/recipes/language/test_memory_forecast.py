"""Forecasts of memory beside the peaks of short runs of shipped configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.rlinf_command import rlinf

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
SHORT = ("runner.max_steps=2", "runner.val_check_interval=-1", "runner.save_interval=-1")
# Share of the peak by which a forecast of the host's memory may be off.
NEAR = 0.25
CONFIGURATIONS = {
    "laptop": (),
    "franka_vision_ppo": (),
    "math_laptop": (),
    "math_laptop_ppo": (),
    "agent_calculator": ("actor.warm_start.steps=50",),
    "sft_laptop": ("data.train_data_paths=shown",),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident set is read from /proc")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_forecast_is_near_the_peaks_of_a_run(name: str, tmp_path: Path) -> None:
    if name == "sft_laptop":
        rlinf(tmp_path, "record", "laptop", "-o", "shown", "-n", "4")
    rlinf(tmp_path, "train", name, *SHORT, *CONFIGURATIONS[name])
    (run,) = (tmp_path / "runs").iterdir()
    components = json.loads(rlinf(tmp_path, "inspect", "memory", str(run), "--json"))["components"]
    # Where nothing is evaluated, recipe `sft` measures its actor alone.
    measured = {component: item for component, item in components.items() if item["host_measured"] is not None}
    assert "actor" in measured
    ratios = {component: value["host"] / value["host_measured"] for component, value in measured.items()}
    print({component: round(ratio, 3) for component, ratio in ratios.items()})
    assert {component: ratio for component, ratio in ratios.items() if abs(ratio - 1) > NEAR} == {}
