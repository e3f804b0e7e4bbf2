"""Memory of environments: what they observe, and what a step of them holds."""

from __future__ import annotations

import pytest

from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.memory.env_memory import EnvironmentSizes, env_forecast, environment_sizes
from rlinf_core import ConfigError

BASE = {"start": 50}


def environments(**values: object) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"total_num_envs": 8, **values})


def test_rendered_step_holds_more_than_its_picture() -> None:
    small, large = (
        environment_sizes(
            environments(env_type="franka_vision", task="touch", options={"image_size": pixels}, total_num_envs=8)
        )
        for pixels in (32, 64)
    )
    assert large.observed == 4 * 10 + 64 * 64 * 3
    # Shares of four outlines and the table are float32.
    assert large.stepping > 5 * 4 * 64 * 64
    assert 3 < large.stepping / small.stepping < 4.5
    assert large.modules == ("recipes.embodied.envs.franka.franka_vision",)


def test_a_worker_holds_its_share_of_the_environments() -> None:
    config = environments(env_type="franka_kin", task="pick")
    sizes = environment_sizes(config)
    one, two = (env_forecast(config, "interact", sizes, BASE, count).phases[1].parts for count in (1, 2))
    assert one["base"] == two["base"] == 50
    assert one["environments"] == 2 * two["environments"] == 8 * sizes.stepping
    # Being sent, and sent before.
    assert one["observations"] == 2 * 8 * 4 * 21


def test_choices_are_stepped_too() -> None:
    assert environment_sizes(environments(env_type="gymnasium", task="CartPole-v1")).spec.num_choices == 2


def test_an_environment_of_your_own_is_not_stepped() -> None:
    sizes = environment_sizes(
        environments(env_type="recipes.embodied.envs.franka.franka_kin:FrankaKinEnv", task="reach")
    )
    assert sizes.stepping == 0
    assert sizes.notes == (
        "what a step of `recipes.embodied.envs.franka.franka_kin:FrankaKinEnv` holds in between is not counted",
    )


@pytest.mark.parametrize(("processes", "counted"), [(None, 1), (4, 4), (100, 8)])
def test_simulator_processes_follow_their_measurement(processes: int | None, counted: int) -> None:
    config = environments(env_type="libero", task="libero_spatial", num_processes=processes)
    found = env_forecast(config, "interact", environment_sizes(config), BASE, 1)
    assert found.phases[1].parts["simulators"] == counted * int(1.8 * 2**30)
    assert ("a process of `libero` is counted as it holds one environment" in found.notes) == (counted < 8)


@pytest.mark.parametrize(
    ("values", "states", "notes"),
    [
        ({"env_type": "libero", "task": "libero_spatial"}, 8, ()),
        ({"env_type": "metaworld", "task": "reach-v3"}, 39, ()),
        ({"env_type": "robosuite", "task": "Lift"}, 32, ("the states of `robosuite` are taken to be 32 numbers",)),
        (
            {"env_type": "libero", "task": "libero_goal", "options": {"observe_objects": True}},
            32,
            ("the states of `libero` are taken to be 32 numbers",),
        ),
    ],
)
def test_states_of_simulators_are_those_they_have(values: dict[str, object], states: int, notes: object) -> None:
    sizes = environment_sizes(environments(**values))
    assert (sizes.spec.state_size, sizes.notes) == (states, notes)


def test_an_environment_that_cannot_be_made_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot be made here"):
        environment_sizes(environments(env_type="franka_kin", task="juggle"))


def test_an_arm_elsewhere_is_not_made() -> None:
    sizes = environment_sizes(environments(env_type="franka_robot"))
    assert isinstance(sizes, EnvironmentSizes)
    assert sizes.stepping == 0
