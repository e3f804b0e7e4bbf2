"""DSRL: a frozen flow whose noise is chosen, updates against the algorithm written out, transitions of chunks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig, EmbodiedOptimConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec, learned_spec
from recipes.embodied.learning.trajectory import RolloutChunks
from recipes.embodied.models.critics import Critics
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.squashed_policy import SteeredPolicy
from recipes.embodied.off_policy.algorithm import TransitionTensors
from recipes.embodied.off_policy.dsrl import Dsrl, DsrlSettings
from recipes.embodied.off_policy.sources import transition_steps
from recipes.sections.actor import FsdpConfig
from recipes.training.updater import Figures
from recipes.training.weights.training_state import TrainingState
from rlinf_core.errors import ConfigError
from tests.known import known
from tests.unit.recipes.embodied.models.lerobot import fake_lerobot

SPEC, CHUNK, N, BOUND = EnvSpec(3, 1), 2, 6, 2.0
TEMPERATURE = 0.2


class Learning:
    """A learner of noise with everything that it trains."""

    def __init__(
        self, folder: Path, *, aliases: bool = False, spec: EnvSpec = SPEC, target_rate: float = 0.005, **options: Any
    ) -> None:
        torch.manual_seed(0)
        flow = EmbodiedModelConfig(model_type="flow_policy", hidden_dim=16, num_action_chunks=CHUNK)
        frozen = make_model(flow, spec)
        with torch.no_grad():
            for weight in frozen.parameters():
                weight.mul_(2)  # so that noise makes a difference
        save_policy(frozen, flow, spec, folder / "flow")
        section = EmbodiedModelConfig(
            model_type="steered_policy",
            model_path=str(folder / "flow"),
            num_action_chunks=CHUNK,
            options={"noise_bound": BOUND},
        )
        policy = make_model(section, spec)
        assert isinstance(policy, SteeredPolicy)
        self.policy = policy
        sizes = [CHUNK, policy.action_size] if aliases else [policy.action_size]
        self.critics = [Critics(learned_spec(spec, size), 2, section.hidden_dim).eval() for size in sizes]
        optim, names = EmbodiedOptimConfig(lr=3e-3, adam_eps=1e-8), ("actor", "critic", "noise_critic")
        states = {
            name: TrainingState(
                module, optim, FsdpConfig(), rank=0, world_size=1, device=torch.device("cpu"), component=name
            )
            for name, module in zip(names, [policy, *self.critics], strict=False)
        }
        options = {"temperature": TEMPERATURE, "noise_aliasing": aliases, **options}
        settings = DsrlSettings.model_validate({"target_rate": target_rate, "options": options})
        self.learner = Dsrl(settings, states.pop("actor"), states, lr=3e-3)
        self.figures, self.critic_figures = Figures(), Figures()

    def update(self, batch: TransitionTensors) -> None:
        self.learner.update(batch, 1, self.figures, self.critic_figures)

    def batch(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> TransitionTensors:
        """Return transitions half of which end, into the same states in reverse order."""
        inputs, after = (self.learner.prepare({"states": rows.numpy()}) for rows in (states, states.flip(0)))
        discounts = torch.full((len(states),), 0.9) * (torch.arange(len(states)) % 2)
        return TransitionTensors(inputs, actions, rewards, discounts, after)


def drawn(policy: SteeredPolicy, states: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return noise for one state, in units of the bound, and its log-probability by the change of variables."""
    hidden = policy.layers(states)
    mean, log_std = policy.mean(hidden), policy.log_std(hidden)  # pyright: ignore[reportOptionalCall]
    noise = torch.tanh(mean + log_std.exp() * normal)
    density = torch.distributions.Normal(mean, log_std.exp()).log_prob(mean + log_std.exp() * normal)
    return noise, float((density - torch.log(1 - noise.double().square())).sum())


@pytest.mark.parametrize("aliases", [False, True])
def test_an_update_equals_the_algorithm_written_out(aliases: bool, tmp_path: Path) -> None:
    made = Learning(tmp_path, aliases=aliases)
    policy, critics = made.policy, [copy.deepcopy(critic) for critic in made.critics]
    weights = copy.deepcopy(policy.state_dict())
    states, rewards = torch.randn(N, 3), torch.randn(N)
    actions = torch.rand(N, CHUNK) * 2 - 1
    batch = made.batch(states, actions, rewards)
    before = copy.deepcopy(policy)
    torch.manual_seed(7)
    made.update(batch)
    # The same normal numbers, in the order in which they are drawn.
    torch.manual_seed(7)
    of_next = torch.empty(N, policy.action_size).normal_()
    of_aliases = torch.randn(N, policy.action_size) if aliases else None
    of_policy = torch.empty(N, policy.action_size).normal_()
    critic_loss = noise_loss = policy_loss = 0.0
    with torch.no_grad():
        for row in range(N):
            seen = {"states": states[row : row + 1]}
            frozen = before.frozen.prepare({"states": states[N - 1 - row : N - row].numpy()})
            noise, logprob = drawn(before, states[N - 1 - row : N - row], of_next[row])
            chunk = before.frozen.from_noise(frozen, BOUND * noise.view(1, CHUNK, 1))
            judged = chunk.flatten(1) if aliases else noise
            following = float(critics[0]({"states": states[N - 1 - row : N - row]}, judged).min())
            discount = 0.9 * (row % 2)
            target = float(rewards[row]) + discount * (following - TEMPERATURE * logprob)
            for value in critics[0](seen, actions[row : row + 1])[:, 0].tolist():
                critic_loss += (value - target) ** 2 / 2 / N
            # Policy and noise critics follow the critics' step.
            if of_aliases is not None:
                alias = (of_aliases[row : row + 1] / BOUND).clamp(-1, 1)
                own = before.frozen.prepare({"states": states[row : row + 1].numpy()})
                led = before.frozen.from_noise(own, BOUND * alias.view(1, CHUNK, 1)).flatten(1)
                truth = float(made.critics[0](seen, led).min())
                for value in critics[1](seen, alias)[:, 0].tolist():
                    noise_loss += (value - truth) ** 2 / 2 / N
            noise, logprob = drawn(before, states[row : row + 1], of_policy[row])
            policy_loss += (TEMPERATURE * logprob - float(made.critics[-1](seen, noise).min())) / N
    means = made.critic_figures.means()
    assert means["critic/loss"] == pytest.approx(critic_loss, rel=1e-4)
    assert made.figures.means()["actor/policy_loss"] == pytest.approx(policy_loss, rel=1e-3)
    assert means.get("critic/noise_loss", 0.0) == pytest.approx(noise_loss, rel=1e-4)
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, weights[name]) == name.startswith("frozen."), name


@pytest.mark.parametrize("aliases", [False, True])
def test_it_finds_the_noise_of_the_best_action(aliases: bool, tmp_path: Path) -> None:
    """Transitions that end at once; the reward is how far the first action is up."""
    made = Learning(tmp_path, aliases=aliases, temperature=0.02, learn_temperature=False)
    policy, states = made.policy, torch.randn(64, 3)

    def mean(output: Any) -> float:
        return float(policy.to_env(output.actions)[:, 0].mean())

    inputs = policy.prepare({"states": states.numpy()})
    frozen = mean(policy.random(inputs))
    for _ in range(50):
        output = policy.random(inputs).actions[:, 0]
        noise, chunk = output.split([policy.action_size, CHUNK], dim=1)
        batch = made.batch(states, chunk if aliases else noise, chunk[:, 0])
        batch.discounts.zero_()
        made.update(batch)
    best = policy.carried_out(inputs, torch.tensor([[1.0, 0.0]]).expand(64, 2))[:, 0]
    worst = policy.carried_out(inputs, torch.tensor([[-1.0, 0.0]]).expand(64, 2))[:, 0]
    reached = mean(policy.act(inputs, greedy=True))
    assert reached > frozen + 0.3 * abs(float((best - worst).mean())), (frozen, reached, best.mean(), worst.mean())
    assert math.isfinite(float(made.learner.temperature))


@pytest.mark.parametrize("aliases", [False, True])
def test_critics_of_actions_teach_the_encoder_of_images(aliases: bool, tmp_path: Path) -> None:
    made = Learning(tmp_path, aliases=aliases, spec=EnvSpec(3, 1, cameras={"main": (16, 16, 3)}))
    observed, after = (
        {"states": torch.randn(N, 3).numpy(), "images.main": torch.randint(256, (N, 16, 16, 3)).byte().numpy()}
        for _ in range(2)
    )
    inputs, following = made.learner.prepare(observed), made.learner.prepare(after)
    actions = torch.rand(N, CHUNK) * 2 - 1
    batch = TransitionTensors(inputs, actions, torch.randn(N), torch.full((N,), 0.9), following)
    before = copy.deepcopy([critics.features.state_dict() for critics in made.critics])
    made.update(batch)
    for name, weight in made.policy.features.state_dict().items():
        assert torch.equal(weight, made.critics[0].features.state_dict()[name]), name
        assert not torch.equal(weight, before[0][name]), name
    for name, weight in before[-1].items():
        assert torch.equal(weight, made.critics[-1].features.state_dict()[name]) == aliases, name


def test_a_chunk_is_one_step_with_the_sum_of_its_rewards() -> None:
    """Three chunks of three actions: whole, ended by its second action, and with an action that does not count."""
    flags = torch.zeros(3, 1, 3, dtype=torch.bool)
    ends, valid = flags.clone(), ~flags
    ends[1, 0, 1], valid[1, 0, 2], valid[2, 0, 1] = True, False, False
    steps = {
        "actions": torch.arange(15.0).view(3, 1, 1, 5),
        "rewards": torch.tensor([1.0, 2.0, 4.0]).expand(3, 1, 3),
        "terminations": ends,
        "truncations": flags,
        "valid": valid,
    }
    made = transition_steps(RolloutChunks(0, 0, {}, steps, None), slice(3, 5))
    assert made["rewards"][:2, 0].tolist() == [7.0, 3.0]
    assert made["terminations"][:, 0].tolist() == [False, True, False]
    assert made["valid"][:, 0].tolist() == [True, True, False]
    assert made["actions"][1, 0].tolist() == [8.0, 9.0]


COUNT, HORIZON, ACTIONS, STEPS = 5, 3, 2, 4
STATES = EnvSpec(6, ACTIONS)
FLOW: dict[str, Any] = {
    "model_type": "flow_policy",
    "hidden_dim": 16,
    "num_action_chunks": CHUNK,
    "options": {"steps": STEPS, "action_horizon": HORIZON},
}


def observed() -> dict[str, Any]:
    return {"states": np.random.default_rng(0).normal(3, 2, (COUNT, 6)).astype(np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = policy_model(FLOW)
    policy = make_model(config, STATES)
    rows = np.random.default_rng(1).normal(3, 2, (20, 6))
    policy.normalization = Normalization("mean_std", Statistics.of(rows), Statistics.of(rows[:, :ACTIONS]))
    save_policy(policy, config, STATES, tmp_path / "flow")
    return str(tmp_path / "flow")


def steered(folder: str, **options: Any) -> SteeredPolicy:
    torch.manual_seed(1)
    section = {"model_type": "steered_policy", "model_path": folder, "num_action_chunks": CHUNK, "hidden_dim": 16}
    policy = make_model(policy_model({**section, "options": options}), STATES)
    assert isinstance(policy, SteeredPolicy)
    return policy


@pytest.mark.parametrize("repeats", [False, True])
def test_actions_are_the_flow_from_the_chosen_noise(folder: str, repeats: bool) -> None:
    policy = steered(folder, noise_bound=2.5, repeats_noise=repeats)
    inputs = policy.prepare(observed())
    output = policy.act(inputs)
    size = ACTIONS if repeats else HORIZON * ACTIONS
    assert output.actions.shape == (COUNT, 1, size + CHUNK * ACTIONS)
    noise = output.actions[:, 0, :size]
    assert noise.abs().max() < 1
    # The flow of the frozen policy by itself, step by step.
    flow: Any = make_model(policy_model({**FLOW, "model_path": folder}), STATES)
    seen = flow.prepare(observed())
    chunk = 2.5 * noise.view(COUNT, -1, ACTIONS).expand(COUNT, HORIZON, ACTIONS)
    with torch.no_grad():
        velocity = flow.velocity_of(flow.see(seen), seen)
        for step in range(STEPS):
            chunk = chunk + velocity(chunk, torch.full((COUNT,), step / STEPS)) / STEPS
    expected = flow.normalization.actions_of(chunk[:, :CHUNK].numpy())
    np.testing.assert_allclose(policy.to_env(output.actions), expected, atol=1e-5)
    judged = policy(inputs, output.actions)
    torch.testing.assert_close(judged.logprobs, known(output.logprobs), atol=1e-3, rtol=1e-3)


def test_only_what_chooses_the_noise_is_trained(folder: str) -> None:
    policy = steered(folder)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    layers = ("layers.0", "layers.2", "mean", "log_std")
    assert trained == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert policy.recorded(policy.prepare(observed())).keys() == {"states"}
    assert not policy.train().frozen.training


def test_random_noise_is_that_of_the_frozen_policys_training(folder: str) -> None:
    policy = steered(folder, noise_bound=1.5)
    states = np.zeros((4000, 6), np.float32)
    drawn = policy.random(policy.prepare({"states": states})).actions[:, 0, : policy.action_size] * 1.5
    normal = torch.randn(100_000).clamp(-1.5, 1.5)
    assert abs(float(drawn.std()) - float(normal.std())) < 0.02
    assert float(drawn.abs().max()) <= 1.5


def test_a_saved_policy_needs_no_other_folder(folder: str, tmp_path: Path) -> None:
    policy = steered(folder, noise_bound=0.5)
    section = {"model_type": "steered_policy", "num_action_chunks": CHUNK, "hidden_dim": 16}
    options = {"options": {"noise_bound": 0.5}}
    save_policy(policy, policy_model({**section, **options}), STATES, tmp_path / "steered")
    (tmp_path / "flow").rename(tmp_path / "gone")
    again = steered(str(tmp_path / "steered"), noise_bound=0.5)
    outputs = [item.act(item.prepare(observed()), greedy=True).actions for item in (policy, again)]
    assert torch.equal(*outputs)
    assert again.normalization == policy.normalization


def test_policies_without_noise_are_refused(tmp_path: Path) -> None:
    config = EmbodiedModelConfig(model_type="mlp_policy", hidden_dim=16, num_action_chunks=CHUNK)
    save_policy(make_model(config, STATES), config, STATES, tmp_path / "mlp")
    with pytest.raises(ConfigError, match="`mlp_policy` cannot be steered"):
        steered(str(tmp_path / "mlp"))
    with pytest.raises(ConfigError, match="none is named"):
        make_model(EmbodiedModelConfig(model_type="steered_policy", num_action_chunks=CHUNK), STATES)


@pytest.mark.parametrize("scheduler", ["DDIM", "DDPM"])
def test_lerobots_diffusion_takes_the_noise(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lerobot.install(monkeypatch)
    options = {"type": "diffusion", "action_horizon": HORIZON, "config": {"noise_scheduler_type": scheduler}}
    config = policy_model({"model_type": "lerobot", "num_action_chunks": CHUNK, "options": options})
    policy: Any = make_model(config, STATES)
    save_policy(policy, config, STATES, tmp_path / "diffusion")
    if scheduler == "DDPM":
        with pytest.raises(ConfigError, match="`lerobot` cannot be steered"):
            steered(str(tmp_path / "diffusion"))
        return
    ours = steered(str(tmp_path / "diffusion"), noise_bound=2.0)
    output = ours.act(ours.prepare(observed()))
    noise = 2 * output.actions[:, 0, : HORIZON * ACTIONS].view(COUNT, HORIZON, ACTIONS)
    chunk = policy.base.model({"observation.state": torch.from_numpy(observed()["states"])})[0] + noise
    np.testing.assert_allclose(ours.to_env(output.actions), chunk[:, :CHUNK].detach().numpy(), atol=1e-5)
