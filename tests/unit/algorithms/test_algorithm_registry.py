"""Algorithms by name: ours, registered ones, and a user's own by import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes.sections.algorithm import ADVANTAGES, LOSSES
from rlinf_core.algorithms.advantages import Advantages, AdvantageSettings, Trajectories, gae
from rlinf_core.algorithms.losses import actor_critic
from rlinf_core.algorithms.options import (
    get_advantage,
    get_policy_loss,
    register_advantage,
)
from rlinf_core.errors import ConfigError


def test_every_name_of_the_configuration_is_there() -> None:
    assert all(callable(get_advantage(name)) for name in ADVANTAGES)
    assert all(callable(get_policy_loss(name)) for name in LOSSES)
    assert get_advantage("gae") is gae
    assert get_policy_loss("rlinf_core.algorithms.losses:actor_critic") is actor_critic


def test_users_add_their_own() -> None:
    @register_advantage("test_rewards_themselves")
    def rewards_themselves(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
        return Advantages(trajectories.rewards)

    assert get_advantage("test_rewards_themselves") is rewards_themselves


def test_wrong_names_say_what_is_known() -> None:
    with pytest.raises(ConfigError, match="did you mean `grpo`"):
        get_advantage("grpoo")
    with pytest.raises(ConfigError, match=r"no_such_package.*cannot be loaded"):
        get_advantage("no_such_package:thing")


def test_looking_names_up_imports_no_torch() -> None:
    """Environments and configurations use registries in interpreters that have no torch."""
    code = "import sys, rlinf_core.algorithms.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
