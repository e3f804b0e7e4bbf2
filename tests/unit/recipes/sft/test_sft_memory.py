"""The forecast of memory of recipe `sft`: sizes by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.sft import sft_memory
from recipes.sft.config import SftConfig
from rlinf_core import ConfigError
from tests.unit.recipes.sft.conftest import ACTIONS, ALONE, LENGTHS, STATES

Configured = Callable[..., SftConfig]


def test_an_actor_holds_weights_and_demonstrations(config_of: Configured, shown: Path) -> None:
    actor, rollout, env = sft_memory.forecast(config_of(), {"actor": 1, "rollout": 1, "env": 1})
    # Two networks of two hidden layers of 16; 21 states, 8 actions and their deviations, one value.
    hidden = STATES * 16 + 16 + 16 * 16 + 16
    numbers = 2 * hidden + ACTIONS * 16 + ACTIONS + ACTIONS + 16 + 1
    assert actor.parts["weights"] == actor.parts["gradients"] == actor.parts["sent weights"] == 4 * numbers
    assert actor.parts["optimizer"] == 8 * numbers
    files = sum(path.stat().st_size for path in shown.glob("data/*/*.parquet"))
    # A flag of success stands beside states and actions; all is there twice while it is read.
    assert actor.parts["demonstrations"] == 2 * (sum(LENGTHS) * 4 * (STATES + ACTIONS + 1) + files)
    assert (rollout.component, env.component) == ("rollout", "env")
    assert "trajectories" not in {name for name, size in rollout.parts.items() if size}


def test_activations_grow_with_the_micro_batch(config_of: Configured) -> None:
    few, many = (sft_memory.forecast(config_of(f"actor.micro_batch_size={rows}"), {})[0].parts for rows in (4, 8))
    assert many["activations"] > few["activations"]
    assert many["batch"] == 2 * few["batch"]


def test_without_environments_there_is_an_actor_alone(config_of: Configured) -> None:
    (actor,) = sft_memory.forecast(config_of(*ALONE), {"actor": 1})
    assert actor.component == "actor"
    assert actor.parts["sent weights"] == 0


def test_an_hdf5_file_declares_no_sizes(config_of: Configured) -> None:
    config = config_of(*ALONE)
    unread = config.model_copy(update={"data": config.data.model_copy(update={"train_data_paths": ("shown.hdf5",)})})
    with pytest.raises(ConfigError, match="not known"):
        sft_memory.forecast(unread, {})
