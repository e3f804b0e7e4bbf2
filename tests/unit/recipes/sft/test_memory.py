"""The forecast of memory of recipe `sft`: sizes by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.embodied.memory.heap_gaps import Gaps
from recipes.sft import sft_memory
from recipes.sft.config import SftConfig
from rlinf_core import ConfigError
from rlinf_core.job.process_forecast import ProcessForecast
from tests.unit.recipes.sft.conftest import ACTIONS, ALONE, LENGTHS, STATES

# An empty process of each kind, in bytes.
BASES = {"actor": {"init": 100, "train": 120}, "rollout": {"init": 90, "act": 95}, "env": {"start": 50}}
Configured = Callable[..., SftConfig]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """What an empty process of each component was asked to import."""
    found: dict[str, tuple[str, ...]] = {}

    def base(component: str, model_type: str, modules: tuple[str, ...] = ()) -> dict[str, int]:
        found[component] = modules
        return BASES[component]

    monkeypatch.setattr(sft_memory, "empty_process", base)
    monkeypatch.setattr(sft_memory, "known_gaps", lambda *given, imitates: (Gaps(10**8, 10**9), ("a note",)))  # pyright: ignore
    return found


def parts(found: ProcessForecast, phase: str) -> dict[str, int]:
    return dict(next(each.parts for each in found.phases if each.phase == phase))


@pytest.mark.usefixtures("imported")
def test_an_actor_holds_weights_and_demonstrations(config_of: Configured, shown: Path) -> None:
    actor, rollout, env = sft_memory.forecast(config_of(), {"actor": 1, "rollout": 1, "env": 1})
    # Two networks of two hidden layers of 16; 21 states, 8 actions and their deviations, one value.
    hidden = STATES * 16 + 16 + 16 * 16 + 16
    numbers = 2 * hidden + ACTIONS * 16 + ACTIONS + ACTIONS + 16 + 1
    found = parts(actor, "learn")
    assert found["base"] == 120
    assert found["weights"] == found["gradients"] == 4 * numbers
    assert found["optimizer"] == 8 * numbers
    assert found["activations"] > 0
    assert found["gaps"] == 10**8
    assert "a note" in actor.notes
    files = sum(each.stat().st_size for each in shown.glob("data/*/*.parquet"))
    # A flag of success stands beside states and actions.
    assert found["demonstrations"] == sum(LENGTHS) * 4 * (STATES + ACTIONS + 1) + files
    assert [each.phase for each in rollout.phases] == ["init_worker", "evaluate"]
    assert [each.phase for each in env.phases] == ["init_worker", "evaluate"]


@pytest.mark.usefixtures("imported")
def test_activations_grow_with_the_micro_batch(config_of: Configured) -> None:
    few, many = (
        parts(sft_memory.forecast(config_of(f"actor.micro_batch_size={rows}"), {})[0], "learn") for rows in (4, 8)
    )
    assert many["activations"] > few["activations"]
    assert many["batch"] == 2 * few["batch"]


def test_without_environments_there_is_an_actor_alone(
    config_of: Configured, imported: dict[str, tuple[str, ...]]
) -> None:
    (actor,) = sft_memory.forecast(config_of(*ALONE), {"actor": 1})
    assert actor.component == "actor"
    assert imported == {"actor": ("recipes.sft.sft_actor", "pyarrow.parquet", "PIL.Image")}


@pytest.mark.usefixtures("imported")
def test_an_hdf5_file_does_not_tell_the_sizes_of_its_rows(config_of: Configured) -> None:
    config = config_of(*ALONE)
    unread = config.model_copy(update={"data": config.data.model_copy(update={"train_data_paths": ("shown.hdf5",)})})
    with pytest.raises(ConfigError, match="not known"):
        sft_memory.forecast(unread, {})
