"""What an embodied job needs and takes before it runs: memory, stand-ins of a rehearsal, steps in virtual time."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.config import EmbodiedActorConfig, EmbodiedModelConfig
from recipes.embodied.config.env_config import EnvSection, RecordedEnvironmentConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.embodied_flow import HOP, POLICY, STEP, UPDATE, VALUES, EmbodiedFlow, flow_of
from recipes.embodied.embodied_memory import env_forecast, environment_spec, forecast, policy_sizes
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.models.policy_folder import BACKBONE, WEIGHTS, save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.stand_ins import StandInEnv, StandInPolicy
from recipes.training.weights.weight_sync import FlatWeights
from rlinf_core import ConfigError, load_job
from rlinf_core.job.arrangements import Arrangement, DeviceGroup, DeviceSpan, Flow, candidates, search
from rlinf_core.job.flow import Duration, Durations
from rlinf_core.job.recipe import ProcessForecast

STATES, ACTIONS = 21, 8
VISION = ("env.train.env_type=franka_vision", "env.train.task=touch")


def config_of(*overrides: str, file: str = "embodied/pick-laptop") -> Any:
    job = load_job(file, overrides)
    job.raise_if_bad()
    return job.config


def forecasts(*overrides: str, file: str = "embodied/pick-laptop", **counts: int) -> dict[str, ProcessForecast]:
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
    sizes = policy_sizes(EmbodiedActorConfig.model_validate({"model": {"precision": "bf16"}}), EnvSpec(STATES, ACTIONS))
    assert 2 * sizes.acting == sizes.weights


def test_adapters_alone_are_trained() -> None:
    model = "actor.model={model_type: openvla, hidden_dim: 32}"
    actor = parts("actor", *VISION, model, "actor.model.lora={rank: 32, alpha: 64}")
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
    helped = parts("actor", *RLPD, "env.train.intervention.source=scripted")
    assert helped["replay"] == 2 * actor["replay"]


def test_stored_observations_take_disk() -> None:
    image, rest = 32 * 32 * 3 + 4 * 10, 4 * 3 + 5
    assert parts("actor", *SEEN)["replay"] == 10_000 * (image + rest)
    actor = forecasts(*SEEN, "algorithm.replay={storage: /tmp/rows, capacity: 10000}")["actor"]
    assert actor.parts["replay"] == 10_000 * rest
    assert actor.notes == (f"the replay buffers take {10_000 * image / 2**30:.1f} GiB of disk in /tmp/rows",)


def test_an_arm_elsewhere_need_not_answer() -> None:
    actor = forecasts("data.train_data_paths=null", file="embodied/franka-hil-2arms", env=2)["actor"]
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


SHOWN = EnvSpec(3, 4, cameras={"top": (16, 16, 3)}, has_instructions=True)


def test_observations_are_those_of_the_spec() -> None:
    settings = EnvSettings(num_envs=5, options={"spec": asdict(SHOWN)}, max_episode_steps=3)
    env = StandInEnv(settings)
    assert env.spec == SHOWN
    observed = env.reset()
    assert {name: values.shape for name, values in observed.items()} == {
        "states": (5, 3),
        "images.top": (5, 16, 16, 3),
        "instructions": (5,),
    }
    result = env.step(np.ones((5, 1, 4), np.float32))
    assert result.rewards.shape == (5, 1)


def test_weights_are_as_many_as_asked_for_and_few_of_them_learn() -> None:
    config = EmbodiedModelConfig(model_type="recipes.embodied.stand_ins:StandInPolicy", options={"numbers": 100_000})
    policy = make_model(config, SHOWN)
    assert isinstance(policy, StandInPolicy)
    sent = sum(buffer.numel() for buffer in FlatWeights.adopt(policy).buffers)
    assert 100_000 <= sent < 102_000
    assert sum(weight.numel() for weight in policy.parameters() if weight.requires_grad) < 500
    inputs = {"states": torch.zeros(6, 3)}
    output = policy.act(inputs)
    assert output.actions.shape == (6, 1, 4)
    assert policy(inputs, output.actions).logprobs.shape == (6, 1, 4)


GPU = "gpu"
MODELS = {GPU: "m"}


def job_of(*overrides: str, envs: int = 64, chunks: int = 8) -> EmbodiedFlow:
    """An environment step of a chunk each, all samples of a step in one batch."""
    lengths = [f"env.train.total_num_envs={envs}", f"env.train.max_steps_per_rollout_epoch={chunks}"]
    sizes = [f"actor.global_batch_size={envs * chunks}", "actor.micro_batch_size=16", "algorithm.update_epoch=1"]
    once = [f"env.train.max_episode_steps={chunks}", "env.train.rollout_epoch=1", "runner.val_check_interval=-1"]
    job = load_job("embodied/pick-laptop", [*lengths, *sizes, *once, "actor.model.num_action_chunks=1", *overrides])
    config: Any = job.config
    assert config is not None, [str(finding.message) for finding in job.diagnostics]
    return flow_of(config)


JOB, SHORT = job_of(), job_of("actor.micro_batch_size=1", envs=6, chunks=2)


Line = tuple[float, float]


def timed(env: Line, policy: Line, micro: Line, hop: float = 0.0, job: EmbodiedFlow = JOB) -> Flow:
    lines = {STEP: env, POLICY: policy, VALUES: policy, UPDATE: micro}
    phases = {phase: {"m": Duration(*line)} for phase, line in lines.items()}
    return job.flow(Durations({**phases, HOP: {"": Duration(hop)}}), MODELS)


def arranged(env: tuple[int, int], rollout: tuple[int, int], actor: tuple[int, int], stages: int, ahead: int) -> Any:
    names = zip(("env", "rollout", "actor"), (env, rollout, actor), strict=True)
    return Arrangement(tuple((name, DeviceSpan(GPU, *seats)) for name, seats in names), stages, ahead)


# Of 64 environments and 8 chunks: a step 0.4, the policy 0.2 and values once, 512 samples at 1 / 160 each.
PLAIN = ((0.4, 0.0), (0.2, 0.0), (0.0, 1 / 160))


@pytest.mark.parametrize(
    ("env", "rollout", "actor", "stages", "ahead", "seconds"),
    [
        # One after the other: 8 x (0.4 + 0.2) + 0.2, then 32 x 0.1.
        ((0, 1), (1, 1), (2, 1), 1, 0, 8.2),
        # Two actors have 256 samples each.
        ((0, 1), (1, 1), (2, 2), 1, 0, 6.6),
        # Training behind the next rollout, which is longer.
        ((0, 1), (1, 1), (2, 1), 1, 1, 5.0),
        # All on one accelerator: everything adds up, also where rollouts run ahead.
        ((0, 1), (0, 1), (0, 1), 1, 1, 8.2),
        # Two stages of one simulator: it is never idle but for the first actions.
        ((0, 1), (1, 1), (2, 1), 2, 0, 0.2 + 16 * 0.4 + 0.2 + 3.2),
    ],
)
def test_a_step_takes_what_arithmetic_says(
    env: Any, rollout: Any, actor: Any, stages: int, ahead: int, seconds: float
) -> None:
    step = timed(*PLAIN).simulate(arranged(env, rollout, actor, stages, ahead))
    assert step.seconds == pytest.approx(seconds)


def test_messages_take_their_time_once_a_direction() -> None:
    where = arranged((0, 1), (1, 1), (2, 1), 1, 0)
    assert timed(*PLAIN, hop=0.01).simulate(where).seconds == pytest.approx(8.2 + 0.01 * (2 * 8 + 1))


def test_a_mean_hides_what_waits_for_the_slowest_of_several() -> None:
    spread = (1.0,) * 9 + (5.0,)
    phases = {phase: {"m": Duration(0.2)} for phase in (POLICY, VALUES, UPDATE)}
    flow = JOB.flow(Durations({**phases, STEP: {"m": Duration(0.4, spread=spread)}}), MODELS)
    one, four = (flow.simulate(arranged((0, envs), (4, 1), (5, 1), 1, 0)).seconds for envs in (1, 4))
    assert flow.bound(arranged((0, 4), (4, 1), (5, 1), 1, 0)) < one < four


def test_many_alike_processes_are_simulated_as_one_block() -> None:
    job = job_of(envs=1024)
    flow = job.flow(Durations({phase: {"m": Duration(0.1, 0.01)} for phase in (STEP, POLICY, UPDATE)}), MODELS)
    many = arranged((0, 64), (64, 64), (128, 64), 1, 0)
    assert flow.simulate(many).seconds == pytest.approx(flow.bound(many))


line = st.tuples(st.floats(0.01, 0.5), st.floats(0.0, 0.02))
ranges = st.sampled_from([(first, count) for first in range(4) for count in range(1, 5 - first)])


@settings(max_examples=60, deadline=None)
@given(line, line, line, st.floats(0, 0.02), ranges, ranges, ranges, st.sampled_from([1, 2]), st.integers(0, 2))
def test_no_simulation_is_below_its_bound(
    env: Any, policy: Any, micro: Any, hop: float, e: Any, r: Any, a: Any, stages: int, ahead: int
) -> None:
    where = arranged(e, r, a, stages, ahead)
    if JOB.legal(where):
        flow = timed(env, policy, micro, hop)
        assert flow.bound(where) <= flow.simulate(where).seconds * (1 + 1e-9)


@settings(max_examples=2, deadline=None)
@given(line, line, line)
def test_the_search_finds_what_brute_force_finds(env: Any, policy: Any, micro: Any) -> None:
    flow, kind = timed(env, policy, micro, job=SHORT), DeviceGroup(GPU, 3, 3)
    spans = [(first, count) for first in range(3) for count in range(1, 4 - first)]
    every = [arranged(*spans, 1, ahead) for *spans, ahead in product(spans, spans, spans, (0, 1))]
    fastest = min(flow.simulate(where).seconds for where in every if SHORT.legal(where))
    names = dict.fromkeys(SHORT.components, (kind,))
    result = search(flow, candidates(flow, names, (1,), (0, 1), SHORT.legal))
    assert result.proven
    assert result.best[0].step.seconds == pytest.approx(fastest)
    assert result.simulated < result.judged


def test_off_policy_updates_follow_the_steps_taken() -> None:
    learns = ("algorithm.loss_type=sac", "actor.model.model_type=squashed_policy")
    sizes = ("algorithm.update_to_data=0.5", "actor.global_batch_size=64", "env.train.total_num_envs=8")
    steps = ("env.train.max_steps_per_rollout_epoch=16", "env.train.max_episode_steps=16")
    config: Any = load_job("embodied/pick-laptop", [*learns, *sizes, *steps]).config
    # 8 environments x 16 steps x 0.5; the actors share each batch.
    assert [flow_of(config).training(actors) for actors in (1, 2)] == [[(UPDATE, 64, 64)], [(UPDATE, 32, 64)]]


@pytest.mark.parametrize(("seconds", "shares"), [(0.02, True), (0.5, False)])
def test_the_best_mode_flips_with_the_cost_of_the_simulator(seconds: float, *, shares: bool) -> None:
    job = job_of(envs=32)
    acting = {phase: {"m": Duration(0.05, 0.2 / 32)} for phase in (POLICY, VALUES)}
    others = {UPDATE: {"m": Duration(0.0, 4 / 256)}, STEP: {"": Duration(0.0, seconds / 32)}}
    flow, kind = job.flow(Durations({**acting, **others}), MODELS), DeviceGroup(GPU, 2, 2)
    # Two processes step environments beside two accelerators.
    where = {"env": DeviceSpan(None, 0, 2), "rollout": (kind,), "actor": (kind,)}
    best = search(flow, candidates(flow, where, (1, 2), (0, 1), job.legal)).best[0].arrangement
    assert best.of("rollout").overlaps(best.of("actor")) == shares
    assert shares or (best.stages, best.staleness) == (2, 1)
