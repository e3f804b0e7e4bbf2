"""`model_type: lerobot` against a stand-in for lerobot; the real one is in test_policies of integration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigError
from tests.unit.recipes.embodied.models.lerobot import fake_lerobot

N, CHUNK, STATES, ACTIONS, HORIZON = 3, 4, 5, 2, 6
SPEC = EnvSpec(STATES, ACTIONS)


@pytest.fixture(autouse=True)
def lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lerobot.install(monkeypatch)


def config_of(kind: str = "act", **model: Any) -> EmbodiedModelConfig:
    options = {"type": kind, **model.pop("options", {})}
    return policy_model({"model_type": "lerobot", "num_action_chunks": CHUNK, "options": options, **model})


def made(kind: str = "act", **model: Any) -> Any:
    torch.manual_seed(0)
    policy: Any = make_model(config_of(kind, **model), SPEC)
    if "model_path" not in model:
        random = np.random.default_rng(0)
        policy.normalization = policy.normalization_of(random.normal(2, 3, (9, STATES)), random.normal(5, 2, (9, 2)))
    return policy


def seen() -> dict[str, Any]:
    return {"states": np.random.default_rng(1).normal(2, 3, (N, STATES)).astype(np.float32)}


def acted(policy: Any) -> Any:
    return policy.to_env(policy.act(policy.prepare(seen()), greedy=True).actions)


def test_actions_are_those_that_lerobot_selects() -> None:
    policy = made()
    normal = policy.normalization
    assert (normal.scheme, normal.action_scheme) == ("mean_std", "quantile")
    states = torch.from_numpy(normal.normalized_states(seen()["states"])).float()
    policy.base.reset()
    chosen = torch.stack([policy.base.select_action({fake_lerobot.STATE: states}) for _ in range(CHUNK)], dim=1)
    assert np.allclose(acted(policy), normal.actions_of(chosen.numpy()), atol=1e-5)


def test_observations_in_a_row_are_those_lerobot_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made("drawn", options={"config": {"n_obs_steps": 3}})
    assert (policy.observed_steps, policy.first_action, policy.horizon) == (3, -2, HORIZON)
    rows = np.random.default_rng(4).normal(2, 3, (CHUNK + 1, N, STATES)).astype(np.float32)
    scaled = torch.from_numpy(policy.normalization.normalized_states(rows)).float()
    policy.base.reset()
    for step in range(CHUNK):
        policy.base.select_action({fake_lerobot.STATE: scaled[step]})
    torch.manual_seed(0)
    chosen = [policy.base.select_action({fake_lerobot.STATE: scaled[CHUNK]}) for _ in range(CHUNK)]
    observations = {"states": rows[CHUNK], "past.states": rows[CHUNK - 2 : CHUNK].swapaxes(0, 1)}
    acted = policy.to_env(policy.act(policy.prepare(observations), greedy=True).actions)
    assert np.allclose(acted, policy.normalization.actions_of(torch.stack(chosen, dim=1).numpy()), atol=1e-5)
    with pytest.raises(ConfigError, match=r"(?s)3 observations in a row.*n_obs_steps: 3"):
        policy.prepare(seen())


def test_numbers_that_a_processor_adds_reach_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made()
    process: Any = policy._processors.before
    added = {"domain_id": torch.full((N,), 3), "action": torch.zeros(N, ACTIONS), "task": ["a"] * N}
    monkeypatch.setattr(policy, "_processors", policy._processors._replace(before=lambda batch: process(batch) | added))
    inputs = policy.prepare(seen())
    assert torch.equal(inputs["domain_id"], torch.full((N,), 3))
    assert inputs.keys() == {*made().prepare(seen()), "domain_id"}


@pytest.mark.parametrize("kind", ["act", "drawn"])
def test_a_saved_folder_is_one_of_lerobot(kind: str, tmp_path: Path) -> None:
    policy, folder = made(kind), tmp_path / "saved"
    save_policy(policy, config_of(kind), SPEC, folder)
    again = made(kind, model_path=str(folder))
    assert np.array_equal(acted(again), acted(policy))
    (folder / "policy.json").unlink()
    (folder / "normalization.json").unlink()
    policy.base.save_pretrained(folder)  # without the deviations of an ACT
    published = made(kind, model_path=str(folder))
    assert np.allclose(acted(published), acted(policy), atol=1e-5)


def test_the_loss_is_lerobots_own_with_its_padding() -> None:
    policy = made()
    actions = np.random.default_rng(2).normal(5, 2, (N, HORIZON, ACTIONS)).astype(np.float32)
    valid = torch.arange(HORIZON) < torch.tensor([[6], [2], [4]])
    inputs = policy.prepare(seen())
    loss = policy.imitation_loss(inputs, policy.from_env(actions), valid)
    low, high = actions.min(), actions.max()
    assert low < high
    scaled = torch.from_numpy(policy.normalization.normalized_actions(actions)).float()
    away = (policy.base.model({fake_lerobot.STATE: inputs[fake_lerobot.STATE]})[0] - scaled).abs()
    assert torch.allclose(loss, (away * valid[..., None]).mean())
    loss.backward()
    assert policy.base.training
    assert policy.model.head.weight.grad.abs().sum() > 0


def test_greedy_actions_of_noise_begin_without_noise() -> None:
    policy = made("diffusion", options={"config": {"noise_scheduler_type": "DDIM"}})
    inputs = policy.prepare(seen())
    greedy = policy.act(inputs, greedy=True).actions
    assert torch.equal(greedy, policy.from_noise(inputs, torch.zeros(N, *policy.noise_shape)))
    assert not torch.allclose(greedy, policy.act(inputs).actions)


def test_draws_depend_on_the_generator_alone() -> None:
    policy = made("drawn")
    inputs = policy.prepare(seen())
    assert torch.equal(policy.act(inputs, greedy=True).actions, policy.act(inputs, greedy=True).actions)
    first, second, third = (
        policy.act(inputs, generator=torch.Generator().manual_seed(seed)).actions for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_logprobs_of_drawn_chunks_are_a_normals() -> None:
    policy = made(options={"noise": 0.3})
    inputs = policy.prepare(seen())
    drawn = policy.act(inputs, generator=torch.Generator().manual_seed(0))
    judged = policy(inputs, drawn.actions)
    normal = torch.distributions.Normal(policy.act(inputs, greedy=True).actions, 0.3)
    assert torch.allclose(judged.logprobs, normal.log_prob(drawn.actions), atol=1e-5)
    assert torch.allclose(judged.logprobs, drawn.logprobs, atol=1e-5)
    assert torch.allclose(judged.entropy, normal.entropy(), atol=1e-5)
    assert judged.values.shape == (N, 1)
    assert torch.allclose(policy.values(inputs), drawn.values)


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("selects 4 actions at once", {"num_action_chunks": 5, "options": {"config": {"n_obs_steps": 3}}}),
        ("temporal_ensemble_coeff", {"options": {"config": {"temporal_ensemble_coeff": 0.1}}}),
        ("`dim_modle` are not valid", {"options": {"config": {"dim_modle": 3}}}),
        ("upper bound", {"num_action_chunks": 7}),
    ],
)
def test_what_a_policy_cannot_do_here_is_refused(words: str, model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**model)


def test_folder_of_another_environment_is_refused(tmp_path: Path) -> None:
    save_policy(made(), config_of(), SPEC, tmp_path / "saved")
    config = config_of(model_path=str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="2 numbers per action; the environment has 3"):
        make_model(config, EnvSpec(STATES, 3))
    with pytest.raises(ConfigError, match="image `top`, for which"):
        make_model(config_of(options={"config": {"input_features": VISUAL}}), EnvSpec(STATES, ACTIONS))


VISUAL = {
    "observation.state": {"type": "STATE", "shape": [STATES]},
    "observation.images.top": {"type": "VISUAL", "shape": [3, 8, 8]},
}


def test_it_is_no_graph_of_tensors() -> None:
    with pytest.raises(ConfigError, match="`LerobotPolicy` cannot be exported as a tensor graph"):
        made().greedy(seen())


def test_a_folder_without_statistics_is_refused(tmp_path: Path) -> None:
    policy = made()
    policy.base.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no statistics"):
        made(model_path=str(tmp_path))
    assert made(model_path=str(tmp_path), options={"statistics": "none"}).normalization == Normalization()


@pytest.mark.parametrize(("kind", "module"), [("lerobot", "lerobot.policies.factory"), ("smolvla", "lerobot")])
def test_an_interpreter_without_lerobot_is_told(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = config_of() if kind == "lerobot" else policy_model({"model_type": kind})
    with pytest.raises(ConfigError, match=r"(?s)needs the package lerobot.*python_interpreter_path"):
        make_model(config, EnvSpec(STATES, ACTIONS, cameras={"main": (32, 32, 3)}))


@pytest.mark.parametrize(
    ("config", "overrides", "missing", "words"),
    [
        (
            "embodied/cartpole-laptop",
            ("env.train.env_type=franka", "actor.model.options={}"),
            True,
            "needs the package `lerobot`",
        ),
        ("embodied/pick-laptop", ("actor.model.options={type: diffusion}",), False, "`diffusion` gives no probability"),
        ("embodied/pick-laptop", ("actor.model.precision=bf16",), False, "fp32"),
    ],
)
def test_validate_names_what_is_missing_or_cannot_be_trained(
    config: str, overrides: tuple[str, ...], missing: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "recipes.embodied.rules.policy_rules.missing_modules", lambda modules: modules if missing else []
    )
    job = load_with_lint(config, ("actor.model.model_type=lerobot", *overrides))
    messages = [item.message for item in job.diagnostics if item.path[:2] == ("actor", "model")]
    assert any(words in message for message in messages)
    assert not missing or len(messages) == 1
