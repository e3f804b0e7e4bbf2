"""Policies of small networks, and of one's own: what is drawn is what is evaluated, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.learning.policy_precision import checked_evaluation, checked_output, checked_values
from recipes.embodied.loop.protocols import CHUNKS
from recipes.embodied.loop.routing import Share
from recipes.embodied.models.base_policy import PolicyOutput
from recipes.embodied.models.feature_policy import FeaturePolicy
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model, register_model
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from rlinf_core import ConfigError
from rlinf_core.job.load import load_job

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


WIDTH = 8


class Own(FeaturePolicy):
    """A policy of a user's own: features, for which heads are supplied."""

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec, width=WIDTH)
        self.trunk: Any = nn.Sequential(nn.Linear(spec.state_size, WIDTH), nn.SiLU())
        self.spoil()

    def spoil(self) -> None:
        """Make a mistake."""

    def features(self, inputs: Any) -> Tensor:
        return self.trunk(inputs["states"])


@pytest.mark.parametrize(
    ("reshape", "said"), [(lambda rows: rows.repeat(1, 2), r"\[6, 16\]"), (lambda rows: rows[:, None], r"\[6, 1, 8\]")]
)
def test_features_of_another_shape_are_refused(
    reshape: Callable[[Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_model(config(model_type=f"{__name__}:Own"), STATES)
    right = policy.features
    monkeypatch.setattr(policy, "features", lambda inputs: reshape(right(inputs)))
    inputs = policy.prepare(observe(STATES))
    for call in (policy.act, policy.values, lambda inputs: policy(inputs, None)):
        with pytest.raises(ConfigError, match=f"`features` of `Own` returned a tensor {said}"):
            call(inputs)


def test_outputs_of_another_type_are_refused() -> None:
    policy: Any = make_model(config(model_type=f"{__name__}:Own"), STATES)
    for check, kind in ((checked_output, "PolicyOutput"), (checked_evaluation, "ActionEval")):
        with pytest.raises(ConfigError, match="of `Own` returned a `tuple`") as caught:
            check((torch.zeros(6, 1, 3), None, None), policy, 6, 1)  # type: ignore[arg-type]
        assert kind in (caught.value.help or "")


@pytest.mark.parametrize("missing", ["logprobs", "values"])
def test_what_the_loss_needs_is_drawn(missing: str) -> None:
    job = load_job("embodied/pick-laptop", (), environ={})
    worker: Any = object.__new__(MultiStepRolloutWorker)
    worker._config = job.config
    output = PolicyOutput(torch.zeros(6, 1, 2), torch.zeros(6, 1, 2), torch.zeros(6, 1))
    worker._policy = SimpleNamespace(act=lambda inputs: replace(output, **{missing: None}))
    with pytest.raises(ConfigError, match=f"`act` of `SimpleNamespace` returned no `{missing}`"):
        worker._act({"states": torch.zeros(6, 2)})


def test_no_graph_of_what_is_drawn_is_kept() -> None:
    policy: Any = make_model(config(model_type=f"{__name__}:Own"), STATES)
    drawn = type(policy).act.__wrapped__  # as by a policy that leaves out `torch.no_grad`
    policy.act = lambda inputs, **named: drawn(policy, inputs, **named)
    names = ("_act", "_add_outcome", "_finals", "_last_values", "_values", "worker_timer")
    worker: Any = SimpleNamespace(policy=policy, _rank=0, _version=0, torch_device=torch.device("cpu"))
    worker._config = load_job("embodied/pick-laptop", (), environ={}).config
    vars(worker).update({name: partial(getattr(MultiStepRolloutWorker, name), worker) for name in names})
    outcome = {name: np.zeros((6, 1), np.bool_) for name in ("terminations", "truncations", "valid")}
    message = {
        "observations": observe(STATES),
        CHUNKS: np.full(6, 2),
        "rewards": np.zeros((6, 1), np.float32),
    } | outcome
    sent: list[Any] = []
    worker._receive, worker._answer = lambda peers: message, lambda peers, actions: sent.append(actions)
    routes: Any = SimpleNamespace(stages=1, of_rollout=lambda rank, stage: (Share(0, 0, 6),))
    (chunks,) = MultiStepRolloutWorker._pass(worker, routes, training=True).values()
    assert len(sent) == 2
    assert not any(tensor.requires_grad for tensor in chunks.steps.values())


CASES = [
    (f"{__name__}:Own", STATES),
    (f"{__name__}:Own", CHOICES),
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


class Lazy(Own):
    def spoil(self) -> None:
        self.trunk = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh())


class Listed(Own):
    def spoil(self) -> None:
        self.layers = [nn.Linear(WIDTH, WIDTH)]


class ByName(Own):
    def spoil(self) -> None:
        self.trunk.scales = {"all": nn.Parameter(torch.ones(WIDTH))}


class Plain(Own):
    def spoil(self) -> None:
        self.scale = torch.ones(WIDTH, requires_grad=True)


class Sound(Own):
    """One that hides a frozen teacher from torch, lists layers that torch knows, and computes a weight from others."""

    def spoil(self) -> None:
        self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]
        self.first = [self.trunk[0]]
        self.mean = torch.zeros(4)
        self.scaled = 2 * self.trunk[0].weight


class Summed(Own):
    """One whose features are those of all observations together."""

    def features(self, inputs: Any) -> Tensor:
        return super().features(inputs).sum(0, keepdim=True)


def own(class_: type[Own]) -> Any:
    return make_model(config(model_type=f"{__name__}:{class_.__name__}"), EnvSpec(4, 2))


@pytest.mark.parametrize(
    ("class_", "message"),
    [
        (Lazy, "`trunk.0.weight` of `Lazy` has no size yet"),
        (Listed, "`layers` of `Listed` is a list of layers or weights"),
        (ByName, "`trunk.scales` of `ByName` is a dict of layers or weights"),
        (Plain, "`scale` of `Plain` is a tensor with a gradient, and no parameter"),
    ],
)
def test_weights_that_torch_does_not_count_are_refused(class_: type[Own], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own(class_)


def test_a_policy_is_registered_by_a_name() -> None:
    register_model("test_own")(Own)
    assert isinstance(make_model(config().model_copy(update={"model_type": "test_own"}), STATES), Own)


def test_what_is_hidden_on_purpose_is_no_mistake() -> None:
    assert own(Sound).teacher


def test_outputs_of_other_shapes_are_refused() -> None:
    inputs = {"states": torch.randn(5, 4)}
    sound, wrong = own(Own), own(Summed)
    output = checked_output(sound.act(inputs), sound, 5, 1)
    assert checked_evaluation(sound(inputs, output.actions), sound, 5, 1).entropy.shape == (5, 1, 2)
    with pytest.raises(ConfigError, match=r"`act` of `Summed` returned `actions` of shape \[1, 1, 2\]"):
        checked_output(wrong.act(inputs), wrong, 5, 1)
    evaluated = sound(inputs, output.actions)
    for name, tensor in (("logprobs", evaluated.logprobs[:, 0]), ("entropy", evaluated.entropy[0])):
        fields = {"logprobs": evaluated.logprobs, "entropy": evaluated.entropy, "values": None, name: tensor}
        with pytest.raises(ConfigError, match=rf"`forward` of `Own` returned `{name}` of shape"):
            checked_evaluation(type(evaluated)(**fields), sound, 5, 1)
    values = type(evaluated)(evaluated.logprobs, evaluated.entropy, torch.zeros(5))
    with pytest.raises(ConfigError, match=r"`values` of `Own` returned `values` of shape \[5\]"):
        checked_values(torch.zeros(5), "values", sound, 5, 1)
    with pytest.raises(ConfigError, match=r"`forward` of `Own` returned `values` of shape \[5\]"):
        checked_evaluation(values, sound, 5, 1)
