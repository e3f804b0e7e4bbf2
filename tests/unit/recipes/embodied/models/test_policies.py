"""Policies: what is drawn is what is evaluated; and a vision-language-action model fits the interface."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model, register_model
from recipes.embodied.models.small.feature_policy import FeaturePolicy
from rlinf_core.errors import ConfigError

STATES = EnvSpec(state_size=5, action_size=3)
CHOICES = EnvSpec(state_size=5, action_size=1, num_choices=4)
IMAGES = EnvSpec(state_size=5, action_size=3, cameras={"main": (40, 48, 3), "wrist": (36, 36, 3)})
BLIND = EnvSpec(state_size=0, action_size=3, cameras={"main": (40, 48, 3)}, has_instructions=True)


def config(**keys: Any) -> EmbodiedModelConfig:
    return policy_model({"hidden_dim": 16, **keys})


def observe(spec: EnvSpec, count: int = 6) -> Observation:
    random = np.random.default_rng(0)
    result: Observation = {"instructions": np.full(count, "do it")}
    if spec.state_size:
        result["states"] = random.normal(size=(count, spec.state_size)).astype(np.float32)
    for camera, shape in spec.cameras.items():
        result[image_key(camera)] = random.integers(0, 256, size=(count, *shape), dtype=np.uint8)
    return result


class Wide(FeaturePolicy):
    """A policy of a user's own: features, for which heads are supplied."""

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, width=8)
        self.trunk = nn.Sequential(nn.Linear(spec.state_size, 8), nn.SiLU())

    def features(self, inputs: Inputs) -> Tensor:
        return self.trunk(inputs["states"])


OWN = f"{__name__}:Wide"
CASES = [
    (OWN, STATES),
    (OWN, CHOICES),
    ("mlp_policy", STATES),
    ("mlp_policy", CHOICES),
    ("cnn_policy", IMAGES),
    ("cnn_policy", BLIND),
]


@pytest.mark.parametrize(("name", "spec"), CASES)
@pytest.mark.parametrize("chunk", [1, 3])
def test_what_is_drawn_is_what_is_judged(name: str, spec: EnvSpec, chunk: int) -> None:
    torch.manual_seed(0)
    policy = make_model(config(model_type=name, num_action_chunks=chunk), spec)
    inputs = policy.prepare(observe(spec))
    assert "instructions" not in inputs
    for greedy in (False, True):
        output = policy.act(inputs, greedy=greedy)
        evaluated = policy(inputs, output.actions)
        assert output.actions.shape == output.logprobs.shape == evaluated.entropy.shape == (6, chunk, spec.action_size)
        assert output.actions.dtype == (torch.float32 if spec.num_choices is None else torch.int64)
        torch.testing.assert_close(evaluated.logprobs, output.logprobs, atol=1e-5, rtol=1e-5)
        assert output.values is not None
        torch.testing.assert_close(evaluated.values, output.values)
        torch.testing.assert_close(policy.values(inputs), output.values)
        assert output.values.shape == (6, chunk)
        assert not output.logprobs.requires_grad
    sent = policy.to_env(output.actions)
    assert sent.shape == (6, chunk, spec.action_size)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_every_weight_learns(name: str, spec: EnvSpec) -> None:
    policy = make_model(config(model_type=name), spec)
    inputs = policy.prepare(observe(spec))
    evaluated = policy(inputs, policy.act(inputs).actions)
    (evaluated.logprobs.sum() + evaluated.entropy.sum() + evaluated.values.square().sum()).backward()
    for weight_name, weight in policy.named_parameters():
        assert weight.grad is not None, weight_name
        assert weight.grad.abs().sum() > 0, weight_name


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_imitation_makes_demonstrated_actions_likely(name: str, spec: EnvSpec) -> None:
    torch.manual_seed(0)
    policy = make_model(config(model_type=name, num_action_chunks=2), spec)
    shown = np.full((6, 2, spec.action_size), 2 if spec.num_choices else 0.5)
    actions = policy.from_env(shown if spec.num_choices is None else shown.astype(np.int32))
    inputs = policy.prepare(observe(spec))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.005)
    losses: list[float] = []
    for _ in range(40):
        loss = policy.imitation_losses(inputs, actions)
        assert loss.shape == actions.shape
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        losses.append(loss.mean().item())
    assert losses[-1] < losses[0] - 0.3
    assert np.abs(policy.to_env(policy.act(inputs, greedy=True).actions) - shown).mean() < 0.25


def test_log_probabilities_are_those_of_torch() -> None:
    policy = make_model(config(num_action_chunks=2), STATES)
    with torch.no_grad():
        policy.head.log_std.copy_(torch.randn(2, 3))
        policy.head.mean.weight.normal_()
    inputs = policy.prepare(observe(STATES))
    output = policy.act(inputs)
    mean = policy.head.mean(policy.actor(inputs["states"])).view(6, 2, 3)
    expected = torch.distributions.Normal(mean, policy.head.log_std.exp())
    evaluated = policy(inputs, output.actions)
    torch.testing.assert_close(evaluated.logprobs, expected.log_prob(output.actions), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluated.entropy, expected.entropy())


def test_choices_are_those_of_torch() -> None:
    policy = make_model(config(), CHOICES)
    with torch.no_grad():
        policy.head.logits.weight.normal_()
    inputs = policy.prepare(observe(CHOICES, 1))
    many = {"states": inputs["states"].expand(20_000, -1)}
    torch.manual_seed(0)
    output = policy.act(many)
    logits = policy.head.logits(policy.actor(inputs["states"])).view(4)
    expected = torch.distributions.Categorical(logits=logits)
    frequencies = torch.bincount(output.actions.flatten(), minlength=4) / 20_000
    assert (frequencies - expected.probs).abs().max() < 0.02
    evaluated = policy(many, output.actions)
    torch.testing.assert_close(evaluated.logprobs.flatten(), expected.log_prob(output.actions.flatten()))
    torch.testing.assert_close(evaluated.entropy[0, 0, 0], expected.entropy())
    assert policy.act(inputs, greedy=True).actions.item() == logits.argmax().item()


def test_a_generator_decides_what_is_drawn() -> None:
    for spec in (STATES, CHOICES):
        policy = make_model(config(), spec)
        inputs = policy.prepare(observe(spec, 50))
        first, again, other = (
            policy.act(inputs, generator=torch.Generator().manual_seed(seed)).actions for seed in (1, 1, 2)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_without_a_value_head() -> None:
    policy = make_model(config(add_value_head=False), STATES)
    inputs = policy.prepare(observe(STATES))
    output = policy.act(inputs)
    assert output.values is None
    assert policy(inputs, output.actions).values is None
    with pytest.raises(ValueError, match="add_value_head"):
        policy.values(inputs)


def test_values_do_not_disturb_actions() -> None:
    policy = make_model(config(), STATES)
    inputs = policy.prepare(observe(STATES))
    policy(inputs, policy.act(inputs).actions).values.sum().backward()
    touched = [name for name, weight in policy.named_parameters() if weight.grad is not None]
    assert touched
    assert all(name.startswith("critic.") for name in touched)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("mlp_policy", BLIND, "cnn_policy"),
        ("cnn_policy", STATES, "mlp_policy"),
        ("cnn_policy", EnvSpec(state_size=0, action_size=1, cameras={"wrist": (14, 48, 3)}), "15 x 15"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, spec: EnvSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(config(model_type=name), spec)


class Backbone(nn.Module):
    """In the shape of a causal language model with images: it takes ids and pixels, and gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 8)
        self.vision = nn.Linear(3, 8)
        self.lm_head = nn.Linear(8, 300)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        seen = self.vision(pixel_values.mean(dim=(1, 2)))[:, None]
        return self.lm_head(self.embedding(input_ids).cumsum(dim=1) + seen)


@register_model("test_tiny_vla")
class TinyVla(BasePolicy):
    """Spells each number of an action as one of 256 tokens, one token after another, in chunks."""

    FIRST, BINS = 44, 256

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.shape = (config.num_action_chunks, spec.action_size)
        self.model = Backbone()

    def prepare(self, observations: Observation) -> Inputs:
        ids = torch.tensor([[len(word) for word in text.split()] for text in observations["instructions"]])
        return {"input_ids": ids, "pixel_values": torch.from_numpy(observations[image_key()]) / 255}

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        ids, drawn = inputs["input_ids"], []
        for _ in range(self.shape[0] * self.shape[1]):
            probabilities = self._logprobs(ids, inputs["pixel_values"])[:, -1].exp()
            token = torch.multinomial(probabilities, 1, generator=generator)
            if greedy:
                token = probabilities.argmax(dim=-1, keepdim=True)
            drawn.append(token)
            ids = torch.cat((ids, token + self.FIRST), dim=1)
        actions = torch.cat(drawn, dim=1).view(-1, *self.shape)
        return PolicyOutput(actions, self(inputs, actions).logprobs, None)

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        tokens = actions.flatten(start_dim=1)
        ids = torch.cat((inputs["input_ids"], tokens[:, :-1] + self.FIRST), dim=1)
        logprobs = self._logprobs(ids, inputs["pixel_values"])[:, -tokens.shape[1] :]
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1).view(-1, *self.shape)
        return ActionEval(logprobs.gather(-1, tokens[..., None]).view(-1, *self.shape), entropy, None)

    def values(self, inputs: Inputs) -> Tensor:
        raise ValueError("no value head")

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        return (actions.float() / (self.BINS - 1) * 2 - 1).numpy()

    def _logprobs(self, ids: Tensor, pixels: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, pixel_values=pixels)
        return logits[..., self.FIRST : self.FIRST + self.BINS].log_softmax(dim=-1)


def test_a_vision_language_action_model_fits() -> None:
    """Tokens are drawn one by one, evaluated in one pass, learned from, and become actions of the environment."""
    from recipes.embodied.learning.trajectory import sum_to_level
    from rlinf_core.algorithms.loss_inputs import LossInputs, LossSettings
    from rlinf_core.algorithms.options import get_policy_loss

    torch.manual_seed(0)
    policy = make_model(config(num_action_chunks=2).model_copy(update={"model_type": "test_tiny_vla"}), BLIND)
    inputs = policy.prepare(observe(BLIND))
    output = policy.act(inputs)
    sent = policy.to_env(output.actions)
    assert sent.shape == (6, 2, 3)
    assert np.abs(sent).max() <= 1
    before = copy.deepcopy(policy.state_dict())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    evaluated = policy(inputs, output.actions)
    torch.testing.assert_close(evaluated.logprobs, output.logprobs)
    loss = get_policy_loss("actor")(
        LossInputs(
            logprobs=sum_to_level(evaluated.logprobs, "token_level"),
            old_logprobs=output.logprobs,
            advantages=torch.ones(6),
            entropy=evaluated.entropy,
        ),
        LossSettings(entropy_bonus=0.01),
    )
    loss.loss.backward()
    optimizer.step()
    assert policy(inputs, output.actions).logprobs.sum() > output.logprobs.sum()
    assert any(not torch.equal(before[name], weight) for name, weight in policy.state_dict().items())


@pytest.mark.parametrize("noise", [None, 0.1])
@pytest.mark.parametrize("spec", [STATES, IMAGES])
def test_squashed_actions_stay_in_bounds_with_their_logprobs(noise: float | None, spec: EnvSpec) -> None:
    torch.manual_seed(0)
    policy = make_model(config(model_type="squashed_policy", options={"exploration_noise": noise}), spec)
    inputs = policy.prepare(observe(spec))
    drawn = policy.act(inputs)
    assert drawn.actions.shape == drawn.logprobs.shape == (6, 1, 3)
    assert drawn.values is None
    assert float(drawn.actions.abs().max()) <= 1
    if noise is None:
        torch.testing.assert_close(policy(inputs, drawn.actions).logprobs, drawn.logprobs, atol=1e-3, rtol=1e-3)
    best = policy.act(inputs, greedy=True).actions
    torch.testing.assert_close(policy.greedy(inputs), best)
    assert float((drawn.actions - best).abs().max()) > 1e-3
    losses = policy.imitation_losses(inputs, policy.from_env(drawn.actions.numpy()))
    losses.mean().backward()
    with pytest.raises(ValueError, match="no value head"):
        policy.values(inputs)


def test_densities_of_squashed_actions_sum_to_one() -> None:
    torch.manual_seed(0)
    policy = make_model(config(model_type="squashed_policy"), EnvSpec(state_size=5, action_size=1))
    grid = torch.linspace(-1 + 1e-4, 1 - 1e-4, 20_001)
    inputs = {"states": torch.randn(1, 5).expand(len(grid), -1)}
    densities = policy(inputs, grid[:, None, None]).logprobs[:, 0, 0].exp()
    assert float(torch.trapezoid(densities.detach(), grid)) == pytest.approx(1, abs=1e-2)


def test_squashed_policies_refuse_what_they_cannot_do() -> None:
    for spec, keys, output in (
        (CHOICES, {}, "takes discrete ones"),
        (STATES, {"num_action_chunks": 2}, "one action at a time"),
        (EnvSpec(state_size=0, action_size=1), {}, "states or images"),
    ):
        with pytest.raises(ConfigError, match=output):
            make_model(config(model_type="squashed_policy", **keys), spec)


def test_folder_with_weights_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = config(model_type="mlp_policy")
    policy = make_model(model, STATES)
    save_policy(policy, model, STATES, tmp_path)
    loaded = config(model_type="mlp_policy", model_path=str(tmp_path))
    make_model(loaded, STATES)
    with torch.no_grad():
        next(policy.parameters())[0] = float("nan")
    save_policy(policy, model, STATES, tmp_path)
    with pytest.raises(ConfigError, match="no finite numbers"):
        make_model(loaded, STATES)
