"""Updates of critics, policy and temperature, and their losses against loops written from the papers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipes.embodied.config import EmbodiedModelConfig, EmbodiedOptimConfig, algorithm_config
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.critics import Critics, move_toward
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.squashed_policy import SquashedPolicy
from recipes.embodied.off_policy.algorithm import CRITIC, TransitionTensors, algorithm_of
from recipes.embodied.off_policy.iql import advantage_weighted_loss, expectile_loss
from recipes.embodied.off_policy.sac import soft_policy_loss
from recipes.embodied.off_policy.td3 import deterministic_policy_loss
from recipes.embodied.off_policy.td3_bc import cloning_policy_loss
from recipes.sections.actor import FsdpConfig
from recipes.training.arrays import NonFiniteError
from recipes.training.updater import Figures
from recipes.training.weights.training_state import TrainingState
from rlinf_core import ConfigError
from tests.known import known

SPEC = EnvSpec(state_size=2, action_size=1)
SEEN = EnvSpec(state_size=2, action_size=1, cameras={"main": (8, 8, 3)})
DEVICE = torch.device("cpu")
Loss: TypeAlias = Literal["sac", "td3", "td3_bc", "iql"]


class Made:
    def __init__(self, loss: Loss = "sac", skip: bool = False, spec: EnvSpec = SPEC, **keys: Any) -> None:
        torch.manual_seed(0)
        config = algorithm_config.METHODS[loss].settings_model.model_validate(keys)
        kind = algorithm_of(config)
        options: dict[str, Any] = (
            {"images": "keypoints"} if loss == "sac" else {"images": "keypoints", "exploration_noise": 0.1}
        )
        section = EmbodiedModelConfig(model_type="squashed_policy", hidden_dim=32, options=options)
        policy = make_model(section, spec)
        assert isinstance(policy, SquashedPolicy)
        self.policy = policy
        layers, norm = 2, config.critic_norm
        self.critics = Critics(
            spec, config.critics, 32, layers, norm, judges_states=kind.judges_states, images="keypoints"
        ).eval()
        optim = EmbodiedOptimConfig(lr=3e-3, adam_eps=1e-8)
        self.states = [
            TrainingState(module, optim, FsdpConfig(), rank=0, world_size=1, device=DEVICE, component=name)
            for module, name in ((self.policy, "actor"), (self.critics, "critic"))
        ]
        policy_state, critic_state = self.states
        self.learner = kind(config, policy_state, {CRITIC: critic_state}, lr=3e-3, clip_grad=10.0, skip_nonfinite=skip)
        self.figures, self.critic_figures = Figures(), Figures()

    def update(self, batch: TransitionTensors) -> None:
        self.learner.update(batch, 1, self.figures, self.critic_figures)


def bandit(count: int = 64) -> TransitionTensors:
    """Transitions that end at once; the best action is half of the first number of the state."""
    states, actions = torch.rand(count, 2) * 2 - 1, torch.rand(count, 1) * 2 - 1
    rewards = -3 * (actions - states[:, :1] / 2)[:, 0].square()
    inputs = {"states": states}
    return TransitionTensors(inputs, actions, rewards, torch.zeros(count), inputs)


def unlike(count: int = 64) -> TransitionTensors:
    """The same, with a number in the state as large as a gripper's command, 0 or 255."""
    batch = bandit(count)
    batch.inputs["states"][:, 1] = 255.0 * (torch.rand(count) < 0.5)
    return batch


def test_states_of_unlike_sizes_are_learned_from_once_normalized() -> None:
    made = Made("sac", critics=4, critic_norm="layer", options={"policy_values": "mean", "temperature": 0.05})
    states = unlike(1000).inputs["states"]
    made.learner.normalize(Normalization(states=Statistics.of(states.numpy())))
    for _ in range(250):
        made.update(unlike())
    asked = torch.tensor([[0.8, 0.0], [-0.8, 0.0], [0.8, 255.0], [-0.8, 255.0]])
    actions = made.policy.act({"states": asked}, greedy=True).actions[:, 0, 0]
    torch.testing.assert_close(actions, torch.tensor([0.4, -0.4, 0.4, -0.4]), atol=0.2, rtol=0)


def shown(count: int = 16) -> TransitionTensors:
    """The same, with an image before each step and after it; no episode ends."""
    batch = bandit(count)
    inputs, after = (
        {**batch.inputs, "images.main": torch.randint(256, (count, 8, 8, 3), dtype=torch.uint8)} for _ in range(2)
    )
    return replace(batch, inputs=inputs, next_inputs=after, discounts=torch.full((count,), 0.9))


METHODS: list[tuple[Loss, dict[str, Any]]] = [
    ("sac", {"options": {"temperature": 0.05}}),
    ("sac", {"critics": 5, "critic_norm": "layer", "options": {"policy_values": "mean", "temperature": 0.05}}),
    ("sac", {"critic_norm": "batch", "options": {"temperature": 0.05}}),
    ("td3", {}),
    ("td3_bc", {"options": {"cloning_scale": 50.0}}),
    ("iql", {"options": {"advantage_scale": 20.0, "expectile": 0.9}}),
]


@pytest.mark.parametrize(("loss", "keys"), METHODS)
def test_each_method_finds_the_best_action(loss: Loss, keys: dict[str, Any]) -> None:
    made = Made(loss, **keys)
    for _ in range(250):
        made.update(bandit())
    states = torch.tensor([[0.8, 0.0], [-0.8, 0.0]])
    actions = made.policy.act({"states": states}, greedy=True).actions[:, 0, 0]
    torch.testing.assert_close(actions, torch.tensor([0.4, -0.4]), atol=0.2, rtol=0)
    assert {"critic/loss", "critic/value", "actor/grad_norm"} <= made.critic_figures.means().keys()


def test_cloning_stays_with_recorded_actions() -> None:
    """Rewards ask for a larger action than any that was recorded: values pull toward it, recorded actions hold."""
    reached: list[float] = []
    for scale in (0.01, 50.0):
        made = Made("td3_bc", options={"cloning_scale": scale})
        for _ in range(250):
            batch = bandit()
            actions = batch.actions / 10 - 0.4
            rewards = -(actions[:, 0] - 0.6).square()
            made.update(replace(batch, actions=actions, rewards=rewards))
        reached.append(float(made.policy.act({"states": torch.zeros(1, 2)}, greedy=True).actions))
    assert abs(reached[0] + 0.4) < 0.1
    assert reached[1] > reached[0] + 0.2


def test_iql_equals_its_algorithm_written_out() -> None:
    """Kostrikov et al., algorithm 1, one transition at a time: the losses of a batch, and what it asks of no policy."""
    made = Made("iql", options={"expectile": 0.8, "advantage_scale": 2.0})
    batch = replace(bandit(6), discounts=torch.tensor([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]))
    batch = replace(batch, next_inputs={"states": torch.rand(6, 2)})
    critics, policy = copy.deepcopy(made.critics), copy.deepcopy(made.policy)
    made.update(batch)
    value_loss = critic_loss = 0.0
    weights: list[float] = []
    for row in range(6):
        states, after = ({"states": part["states"][row : row + 1]} for part in (batch.inputs, batch.next_inputs))
        action = batch.actions[row : row + 1]
        with torch.no_grad():
            first, second = critics(states, action)[:, 0].tolist()
            value, following = float(critics.of_states(states)), float(critics.of_states(after))
            # The policy's step comes after that of the values, with the old target critics.
            advantage = min(first, second) - float(made.critics.of_states(states))
        error = min(first, second) - value
        value_loss += abs(0.8 - (error < 0)) * error**2 / 6
        target = float(batch.rewards[row]) + float(batch.discounts[row]) * following
        critic_loss += sum((guess - target) ** 2 / 2 for guess in (first, second)) / 6
        deviation, mean = 0.1, float(policy.sample(states)[0].detach())
        logprob = -((float(action) - mean) ** 2) / (2 * deviation**2) - math.log(deviation * math.sqrt(2 * math.pi))
        weights.append(min(math.exp(2.0 * advantage), 100.0) * logprob)
    means, of_critics = made.figures.means(), made.critic_figures.means()
    assert of_critics["critic/expectile_loss"] == pytest.approx(value_loss, rel=1e-4)
    assert of_critics["critic/loss"] == pytest.approx(critic_loss, rel=1e-4)
    assert means["actor/policy_loss"] == pytest.approx(-sum(weights) / 6, rel=1e-4)


def test_values_become_discounted_sums_of_rewards() -> None:
    """A task without end whose every step is rewarded by 1: its value is 1 / (1 - 0.5)."""
    made = Made(options={"temperature": 1e-6, "learn_temperature": False}, target_rate=0.05)
    for _ in range(200):
        inputs = {"states": torch.randn(64, 2)}
        made.update(
            TransitionTensors(inputs, torch.rand(64, 1) * 2 - 1, torch.ones(64), torch.full((64,), 0.5), inputs)
        )
    with torch.no_grad():
        values = made.critics({"states": torch.randn(64, 2)}, torch.zeros(64, 1))
    torch.testing.assert_close(values, torch.full_like(values, 2.0), atol=0.1, rtol=0)


def test_policy_updates_at_its_interval_without_the_critics() -> None:
    made = Made(policy_interval=3)
    for number in range(1, 7):
        before = copy.deepcopy(made.policy.state_dict())
        made.update(bandit(8))
        changed = any(not torch.equal(weight, before[name]) for name, weight in made.policy.state_dict().items())
        assert changed == (number % 3 == 0)
        assert all(weight.requires_grad for weight in made.critics.parameters())
    assert (len(made.figures.parts), len(made.critic_figures.parts)) == (2, 6)


@pytest.mark.parametrize(("target", "rises"), [(5.0, True), (-20.0, False)])
def test_the_temperature_rises_while_there_is_too_little_entropy(target: float, rises: bool) -> None:
    made = Made(options={"temperature": 0.5, "target_entropy": target})
    for _ in range(5):
        made.update(bandit(8))
    assert (made.learner.metrics()["train/actor/temperature"] > 0.5) == rises


@pytest.mark.parametrize(("loss", "keys"), METHODS)
@pytest.mark.parametrize("spec", [SPEC, SEEN], ids=["states", "images"])
def test_a_learner_goes_on_from_its_state_as_if_nothing_had_been(
    spec: EnvSpec, loss: Loss, keys: dict[str, Any]
) -> None:
    one, other = Made(loss, spec=spec, **keys), Made(loss, spec=spec, **keys)
    for _ in range(5):
        one.update(shown())
    other.policy.load_state_dict(one.policy.state_dict())
    other.critics.load_state_dict(one.critics.state_dict())
    for mine, theirs in zip(other.states, one.states, strict=True):
        mine.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
    other.learner.load_state(copy.deepcopy(one.learner.state()))
    for made in (one, other):
        torch.manual_seed(7)
        for _ in range(4):
            made.update(shown())
    for name, weight in one.policy.state_dict().items():
        assert torch.equal(weight, other.policy.state_dict()[name]), name
    assert one.learner.metrics() == other.learner.metrics()
    assert one.learner.updates == other.learner.updates == 9


@pytest.mark.parametrize(("loss", "keys"), METHODS)
def test_the_critics_alone_teach_the_encoder_of_images(loss: Loss, keys: dict[str, Any]) -> None:
    made = Made(loss, spec=SEEN, **keys)
    first = copy.deepcopy(made.policy.features.state_dict())
    for name, weight in made.critics.features.state_dict().items():
        assert torch.equal(weight, first[name]), name
    for _ in range(3):
        made.update(shown())
    weights = made.policy.features.state_dict()
    for name, weight in made.critics.features.state_dict().items():
        assert torch.equal(weight, weights[name]), name
        assert not torch.equal(weight, first[name]), name
    assert all(weight.grad is None for weight in made.policy.features.parameters())
    assert all(weight.grad is not None for weight in made.policy.layers.parameters())


def test_an_encoder_that_critics_train_is_not_frozen() -> None:
    made = Made(spec=SEEN)
    made.policy.features.requires_grad_(False)
    states = dict(zip(("policy", "critic"), made.states, strict=True))
    with pytest.raises(ConfigError, match="trains the image encoder `features`") as caught:
        type(made.learner)(made.learner.settings, states["policy"], {CRITIC: states["critic"]}, lr=1e-3)
    assert caught.value.where == "actor.model.trainable"


def test_a_target_that_is_not_finite_stops_or_is_left_out() -> None:
    batch = bandit(8)
    batch.rewards[3] = float("nan")
    with pytest.raises(NonFiniteError, match="train/critic/loss"):
        Made().update(batch)
    made = Made(skip=True, policy_interval=2)
    before = copy.deepcopy(made.critics.state_dict())
    made.update(batch)
    assert made.critic_figures.skipped == 1
    assert all(torch.equal(weight, before[name]) for name, weight in made.critics.state_dict().items())


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_batch_that_is_left_out_leaves_no_trace(norm: str) -> None:
    made, batch = Made(skip=True, critic_norm=norm), bandit(8)
    made.update(replace(batch, inputs={"states": torch.full((8, 2), 3e38)}))
    assert (made.figures.skipped, made.critic_figures.skipped) == (1, 1)
    made.update(batch)
    assert (made.figures.skipped, made.critic_figures.skipped) == (1, 1)
    assert made.learner.metrics()["train/actor/temperature"] == pytest.approx(1, abs=0.01)


finite = st.floats(-5, 5)


def column(rows: list[tuple[float, ...]], index: int) -> Tensor:
    return torch.tensor([row[index] for row in rows], dtype=torch.float64)


def test_the_policy_ascends_the_smallest_value_or_the_mean() -> None:
    for how, expected in (("min", [[1.0, 0.0], [0.0, 1.0]]), ("mean", [[0.5, 0.5], [0.5, 0.5]])):
        values = torch.tensor([[1.0, 4.0], [2.0, 3.0]], requires_grad=True)
        logprobs = torch.tensor([-1.0, 2.0], requires_grad=True)
        result = soft_policy_loss(logprobs, values, 0.1, "min" if how == "min" else "mean")
        chosen = [1.0, 3.0] if how == "min" else [1.5, 3.5]
        assert result.loss.item() == pytest.approx((0.1 * (-1 + 2) - sum(chosen)) / 2)
        assert result.metrics["actor/entropy"].item() == pytest.approx(-0.5)
        result.loss.backward()
        torch.testing.assert_close(known(values.grad), -torch.tensor(expected) / 2)
        torch.testing.assert_close(known(logprobs.grad), torch.full((2,), 0.05))


def test_a_deterministic_policy_ascends_the_first_critic() -> None:
    values = torch.tensor([[1.0, 4.0], [2.0, 3.0]], requires_grad=True)
    deterministic_policy_loss(values).loss.backward()
    assert known(values.grad).tolist() == [[-0.5, -0.5], [0.0, 0.0]]


def test_targets_move_by_their_rate() -> None:
    target, weight = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0], requires_grad=True)
    move_toward([target], [weight], 0.25)
    assert target.tolist() == [1.5, 2.0]


@given(st.lists(st.tuples(finite, finite), min_size=1), st.floats(0.05, 0.95), st.floats(0.1, 20))
def test_iql_weighs_by_expectiles_and_advantages(rows: list[tuple[float, ...]], tau: float, scale: float) -> None:
    one, other, count = column(rows, 0), column(rows, 1), len(rows)
    errors = [second - first for first, second in rows]
    wanted = sum(abs(tau - (error < 0)) * error**2 for error in errors) / count
    assert expectile_loss(one, other, tau).loss.item() == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    weighed = sum(min(math.exp(scale * second), 100.0) * first for first, second in rows) / count
    assert advantage_weighted_loss(one, other, scale).loss.item() == pytest.approx(-weighed, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(finite, finite, finite, finite), min_size=1), st.floats(0.1, 5))
def test_cloning_weighs_values_against_distances(rows: list[tuple[float, ...]], scale: float) -> None:
    values = torch.stack((column(rows, 0) + 1, column(rows, 1))).requires_grad_()
    actions, recorded = column(rows, 2)[:, None], column(rows, 3)[:, None]
    loss = cloning_policy_loss(values, actions, recorded, scale).loss
    count = len(rows)
    size = sum(abs(row[0] + 1) for row in rows) / count
    weight = scale / max(size, 2.220446049250313e-16)
    wanted = sum((row[2] - row[3]) ** 2 - weight * (row[0] + 1) for row in rows) / count
    assert loss.item() == pytest.approx(wanted, abs=1e-6, rel=1e-6)
    loss.backward()
    # The size of values is no path for gradients, and the second critic has no say.
    torch.testing.assert_close(known(values.grad), torch.tensor([[-weight / count], [0]]).double().expand(2, count))
