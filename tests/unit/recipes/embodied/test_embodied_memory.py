"""The forecast of an embodied job's memory: sizes by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.config import EmbodiedActorConfig
from recipes.embodied.config.env_config import EnvSection, RecordedEnvironmentConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.embodied_memory import env_forecast, environment_spec, forecast, policy_sizes
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.policy_folder import BACKBONE, WEIGHTS, save_policy
from recipes.embodied.models.registry import make_model
from rlinf_core import ConfigError, load_job
from rlinf_core.job.recipe import ProcessForecast

STATES, ACTIONS = 21, 8
VISION = ("env.train.env_type=franka_vision", "env.train.task=touch")


def config_of(*overrides: str, file: str = "laptop") -> Any:
    job = load_job(file, overrides)
    job.raise_if_bad()
    return job.config


def forecasts(*overrides: str, file: str = "laptop", **counts: int) -> dict[str, ProcessForecast]:
    return {item.component: item for item in forecast(config_of(*overrides, file=file), counts)}


def parts(component: str, *overrides: str, **counts: int) -> dict[str, int]:
    return dict(forecasts(*overrides, **counts)[component].parts)


def test_weights_and_states_are_counted_by_hand() -> None:
    # Two networks of two hidden layers; 21 states, 8 actions and their deviations, one value.
    width = 64
    hidden = STATES * width + width + width * width + width
    numbers = 2 * hidden + ACTIONS * width + ACTIONS + ACTIONS + width + 1
    actor = parts("actor", f"actor.model.hidden_dim={width}")
    assert actor["weights"] == actor["gradients"] == actor["sent weights"] == 4 * numbers
    assert actor["optimizer"] == 8 * numbers


@pytest.mark.parametrize(
    ("kind", "cameras"),
    [("mlp_policy", {}), ("cnn_policy", {"main": (64, 64, 3)}), ("openvla", {"main": (32, 32, 3)})],
)
def test_parameters_equal_those_of_the_built_policy(kind: str, cameras: Any) -> None:
    spec = EnvSpec(STATES, ACTIONS, cameras=cameras, has_instructions=True)
    model = {"model_type": kind, "hidden_dim": 32}
    built = make_model(policy_model(model), spec)
    sizes = policy_sizes(EmbodiedActorConfig.model_validate({"model": model}), spec)
    assert sizes.weights == 4 * sum(weight.numel() for weight in built.parameters())
    assert sizes.trained == 4 * sum(weight.numel() for weight in built.parameters() if weight.requires_grad)


def test_rollouts_grow_with_the_environments() -> None:
    few, many = (forecasts(f"env.train.total_num_envs={count}") for count in (64, 128))
    grown = {"actor": ("trajectories", "advantages", "batch"), "rollout": ("trajectories",), "env": ("environments",)}
    for component, names in grown.items():
        for name in names:
            assert many[component].parts[name] == 2 * few[component].parts[name]
    # 21 states and 8 actions with their log-probabilities, a reward, three flags, two values; held twice.
    assert few["rollout"].parts["trajectories"] == 2 * 64 * 50 * (4 * (21 + 2 * 8 + 1 + 2) + 3)


def test_shards_divide_weights_and_are_sent_by_the_piece() -> None:
    wide = "actor.model.hidden_dim=4096"
    whole, half = (parts("actor", wide, actor=count) for count in (1, 2))
    assert half["weights"] == whole["weights"] // 2
    assert half["sent weights"] == whole["sent weights"] < whole["weights"]
    # A policy of small layers has no blocks: it is gathered whole.
    assert half["gathered weights"] == whole["weights"]
    assert "gathered weights" not in whole


def test_weights_sent_behind_rollouts_are_copied() -> None:
    waiting, behind = (parts("actor", f"runner.max_staleness={staleness}") for staleness in (0, 1))
    assert behind["sent weights"] == 2 * waiting["sent weights"]


def test_precision_halves_the_weights_that_act() -> None:
    actor = EmbodiedActorConfig.model_validate({"model": {"precision": "bf16"}})
    sizes = policy_sizes(actor, EnvSpec(STATES, ACTIONS))
    assert 2 * sizes.acting == sizes.weights


def test_adapters_alone_are_trained() -> None:
    model = "actor.model={model_type: openvla, hidden_dim: 32}"
    actor = parts("actor", *VISION, model, "actor.model.is_lora=true")
    assert 0 < actor["gradients"] < actor["weights"]


def test_activations_of_hidden_layers_grow_with_rows() -> None:
    few, many = (
        parts("actor", "actor.global_batch_size=1600", f"actor.micro_batch_size={rows}")["activations"]
        for rows in (800, 1600)
    )
    assert many == 2 * few
    # Four hidden layers of 128, eight actions and a value, held 2.2 times.
    assert few == 800 * int(4 * 2.2 * (4 * 128 + 8 + 1))


def test_convolutions_shrink_the_image_step_by_step() -> None:
    spec = EnvSpec(0, ACTIONS, cameras={"main": (64, 64, 3)})
    actor = EmbodiedActorConfig.model_validate({"model": {"model_type": "cnn_policy", "hidden_dim": 32}})
    layers = 64 * 64 * 3 + 15 * 15 * 32 + 6 * 6 * 64 + 4 * 4 * 64 + 32
    assert policy_sizes(actor, spec).learning == int(4 * 2.2 * (2 * layers + ACTIONS + 1))


def test_checkpointing_holds_less_of_a_large_policy() -> None:
    model = "actor.model={model_type: openvla, hidden_dim: 64, options: {num_layers: 4}}"
    kept, again = (
        parts("actor", *VISION, model, f"actor.fsdp_config.gradient_checkpointing={value}")["activations"]
        for value in ("false", "true")
    )
    assert again < kept / 2


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.model.model_type=flow_policy",),
        (*VISION, "env.train.options={image_size: 64}", "actor.model.model_type=cnn_policy"),
        (*VISION, "actor.model.model_type=openvla"),
        (*VISION, "actor.model.model_type=pi0"),
    ],
)
def test_every_policy_has_a_forecast(overrides: tuple[str, ...]) -> None:
    result = forecasts(*overrides)
    assert result["actor"].parts["activations"] > 0
    assert result["rollout"].parts["weights"] > 0


RLPD = (
    "actor.model={model_type: squashed_policy, hidden_dim: 32}",
    "algorithm.loss_type=sac",
    "algorithm.critics=3",
    "algorithm.replay={capacity: 10000}",
)
SEEN = (*RLPD, *VISION)


def test_replay_buffers_and_critics_are_counted() -> None:
    actor = parts("actor", *RLPD)
    # 21 states, 8 actions, a reward and flags.
    assert actor["replay"] == 10_000 * (4 * 21 + 4 * 8 + 5)
    hidden = 29 * 32 + 32 + 32 * 32 + 32
    assert actor["critics"] == 5 * 4 * 3 * (hidden + 33)
    assert parts("actor", *RLPD, actor=2)["replay"] == actor["replay"] // 2
    assert "replay" not in parts("actor")


def test_interventions_have_a_buffer_of_their_own() -> None:
    helped = parts("actor", *RLPD, "env.train.intervention.source=scripted")
    assert helped["replay"] == parts("actor", *RLPD)["replay"] * 2


def test_stored_observations_take_disk() -> None:
    image, rest = 32 * 32 * 3 + 4 * 10, 4 * 3 + 5
    assert parts("actor", *SEEN)["replay"] == 10_000 * (image + rest)
    actor = forecasts(*SEEN, "algorithm.replay={storage: /tmp/rows, capacity: 10000}")["actor"]
    assert actor.parts["replay"] == 10_000 * rest
    assert actor.notes == (f"the replay buffers take {10_000 * image / 2**30:.1f} GiB of disk in /tmp/rows",)


def test_an_arm_elsewhere_need_not_answer() -> None:
    actor = forecasts("data.train_data_paths=null", file="franka_hil", env=2)["actor"]
    rows = 200_000  # of all steps, and of interventions
    assert actor.parts["replay"] == rows * (4 * 16 + 4 * 7 + 5)


def environments(**values: object) -> RecordedEnvironmentConfig:
    return EnvSection.model_validate({"train": {"total_num_envs": 8, **values}}).train


def test_env_workers_share_the_environments() -> None:
    config = environments(env_type="franka_kin", task="pick")
    spec, _ = environment_spec(config)
    one, two = (env_forecast(config, spec, count).parts for count in (1, 2))
    assert one["environments"] == 2 * two["environments"] == 20 * 8 * 4 * STATES


@pytest.mark.parametrize(("processes", "counted"), [(None, 1), (4, 4), (100, 8)])
def test_simulator_processes_count_as_measured(processes: int | None, counted: int) -> None:
    config = environments(env_type="libero", task="libero_spatial", num_processes=processes)
    env = env_forecast(config, *environment_spec(config)[:1], 1, environment_spec(config)[1])
    assert env.parts["simulators"] == counted * int(1.8 * 2**30)
    assert ("a process of `libero` is counted as it holds one environment" in env.notes) == (counted < 8)


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be made here"):
        environment_spec(environments(env_type="franka_kin", task="juggle"))


@pytest.mark.parametrize("kind", ["openvla", "pi0"])
def test_a_folder_needs_no_weights(kind: str, tmp_path: Path) -> None:
    spec = EnvSpec(STATES, ACTIONS, cameras={"main": (32, 32, 3)}, has_instructions=True)
    model = {"model_type": kind, "hidden_dim": 32, "options": {"num_layers": 3}}
    section = policy_model(model)
    save_policy(make_model(section, spec), section, spec, tmp_path)
    (tmp_path / WEIGHTS).unlink()

    def read(**changes: Any) -> Any:
        return policy_sizes(EmbodiedActorConfig.model_validate({"model": {**model, **changes}}), spec)

    # The rest of the section is of another model.
    for folder in (tmp_path, tmp_path / BACKBONE):
        assert read(model_path=str(folder), hidden_dim=64, options={"num_layers": 1}) == read()


def test_a_folder_elsewhere_has_no_forecast() -> None:
    with pytest.raises(ConfigError, match="not known") as info:
        forecasts(*VISION, "actor.model={model_type: openvla, model_path: /not/here}")
    assert "`/not/here` is not on this machine" in (info.value.why or "")


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
def test_states_of_simulators_are_known_or_assumed(values: dict[str, object], states: int, notes: object) -> None:
    spec, notes_made = environment_spec(RecordedEnvironmentConfig.model_validate(values))
    assert (spec.state_size, notes_made) == (states, notes)
