"""Demonstrations that a test writes, and actors that learn from them in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.loop.protocols import Layout
from recipes.sft.config import SftConfig
from recipes.sft.sft_program import SftActor
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, in_thread

# Of `franka_kin`, task `pick`.
STATES, ACTIONS = 21, 8
LENGTHS = (6, 4)
ALONE = (
    "~cluster.component_placement.'actor,rollout,env'",
    "cluster.component_placement.actor={node_group: node, placement: 0}",
)
SMALL = ("actor.model.hidden_dim=16", "actor.global_batch_size=16", "data.batches_per_step=4", "runner.max_steps=3")
LAYOUT = Layout(1, 1, 1, "trajectories")


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """Two episodes in which the hand moves to where the state says."""
    features = {
        "observation.state": Feature("float32", (STATES,)),
        "observation.images.main": Feature("image", (16, 16, 3)),
        "action": Feature("float32", (ACTIONS,)),
        "next.success": Feature("bool", (1,)),
    }
    random = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "shown", 20, features) as writer:
        for length in LENGTHS:
            states = random.normal(size=(length, STATES)).astype(np.float32)
            columns = {
                "observation.state": states,
                "observation.images.main": random.integers(0, 255, (length, 16, 16, 3), np.uint8),
                "action": np.tanh(states[:, :ACTIONS]),
                "next.success": np.arange(length) >= length - 2,
            }
            writer.add(columns, "pick it up")
    return tmp_path / "shown"


@pytest.fixture
def config_of(shown: Path) -> Callable[..., SftConfig]:
    def config(*overrides: str) -> SftConfig:
        job = load_job("sft/pick-laptop", (*SMALL, f"data.train_data_paths={shown}", *overrides), environ={})
        job.raise_if_bad()
        return cast("SftConfig", job.config)

    return config


@pytest.fixture
def actor_of(config_of: Callable[..., SftConfig]) -> Callable[..., Any]:
    """Makes an actor, which has read the data and made its policy, without environments."""

    def actor(*overrides: str, spec: Any = None) -> Any:
        config = config_of(*ALONE, *overrides)
        made: Any = in_thread(SftActor, config.actor.group_name, Hub(), 0, 1)(config)
        made.warnings = []
        made.log_warning = lambda message, *args: made.warnings.append(message % args)
        made.init_actor(LAYOUT, spec)
        return made

    return actor
