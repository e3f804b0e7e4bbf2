"""Optimizer steps on batches of samples, without the processes around them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.batch import Samples
from recipes.embodied.learning.learner import Learner
from recipes.embodied.models.feature_policy import MlpPolicy
from recipes.embodied.models.registry import make_model
from recipes.training.arrays import NonFiniteError
from recipes.training.optimizer import make_optimizer
from recipes.training.sharding import ParallelStrategy
from recipes.training.updater import Figures, UntrainedError
from rlinf_core import ConfigError
from rlinf_core.algorithms.loss_inputs import Loss, LossInputs, LossSettings
from rlinf_core.job.load import load_job
from tests.known import known

SAMPLES, STATES, ACTIONS = 24, 5, 3


def made(*overrides: str, strategy: type[ParallelStrategy] = ParallelStrategy) -> tuple[Learner, nn.Module]:
    """Return a learner on one rank, and its policy."""
    job = load_job("embodied/pick-laptop", ("actor.model.hidden_dim=8", *overrides), environ={})
    job.raise_if_bad()
    config = cast("EmbodiedConfig", job.config)
    torch.manual_seed(0)
    policy = make_model(config.actor.model, EnvSpec(STATES, ACTIONS))
    optimizer = make_optimizer(policy, config.actor.optim)
    return Learner(
        config, strategy(policy, 1 if strategy is ParallelStrategy else 2), optimizer, torch.device("cpu")
    ), policy


def one_of_two(summed: Callable[[Tensor], Tensor]) -> type[ParallelStrategy]:
    """Return the strategy of one of two ranks, by what becomes of its numbers in a sum."""
    return type("OneOfTwo", (ParallelStrategy,), {"reduce_sum": lambda self, value: summed(value)})


def root_of_zero(inputs: LossInputs, settings: LossSettings) -> Loss:
    """A loss that is 0, with gradients that are not finite."""
    return Loss((inputs.logprobs * 0).sqrt().sum(), {})


def without_values(inputs: LossInputs, settings: LossSettings) -> Loss:
    return Loss(-(inputs.logprobs * inputs.advantages).mean(), {})


def values_alone(inputs: LossInputs, settings: LossSettings) -> Loss:
    return Loss(known(inputs.values).square().mean(), {})


def with_detached_values(inputs: LossInputs, settings: LossSettings) -> Loss:
    return Loss(-(inputs.logprobs * inputs.advantages).mean() + known(inputs.values).detach().mean(), {})


class Forgetful(MlpPolicy):
    """A policy of a user's with a layer that `forward` does not use."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forgotten = nn.Linear(2, 2)


class OwnPolicy(MlpPolicy):
    """A policy of a user's."""


class Renamed(MlpPolicy):
    """A policy of a user's, whose value head has another name."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.judge, self.critic = self.critic, None


class Dropping(MlpPolicy):
    """A policy of a user's that computes something else while it is trained."""

    def features_of(self, inputs: Any, network: nn.Module) -> Tensor:
        return nn.functional.dropout(super().features_of(inputs, network), 0.5, self.training)


def batch(*, masked: bool) -> Samples:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "actions": numbers(SAMPLES, 1, ACTIONS),
        "old_logprobs": numbers(SAMPLES, 1) - 4,
        "advantages": numbers(SAMPLES, 1),
        "old_values": numbers(SAMPLES, 1),
        "returns": numbers(SAMPLES, 1),
    }
    if masked:
        # Unequally many in the parts, and none in the first.
        counted = torch.arange(SAMPLES)[:, None] >= 10
        tensors |= {"mask": counted, "value_mask": counted}
    return Samples({"states": numbers(SAMPLES, STATES)}, tensors, (1, ACTIONS))


def weights_of(policy: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}


def changed(policy: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "count"), [(SAMPLES // 3, 3), (7, 4)], ids=["equal parts", "unequal parts"])
def test_a_batch_in_parts_teaches_and_tells_what_it_does_in_one(masked: bool, size: int, count: int) -> None:
    (one, whole), (parted, other) = (made("algorithm.entropy_bonus=0.01") for _ in range(2))
    output, figures = Figures(), Figures()
    one.update(batch(masked=masked), SAMPLES, 1, output)
    parted.update(batch(masked=masked), size, 1, figures)
    assert (len(output.parts), len(figures.parts)) == (1, count)
    means, wanted = figures.means(), output.means()
    names = "actor/policy_loss", "actor/entropy", "actor/approx_kl", "actor/clip_fraction", "actor/ratio"
    for name in (*names, "actor/grad_norm", "critic/value_loss", "critic/value_clip_fraction"):
        assert means[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    for mine, theirs in zip(whole.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_padding_only_rank_adds_nothing_to_denominators() -> None:
    learner, _ = made(strategy=one_of_two(lambda value: value + 10))
    samples = batch(masked=True)
    for name in ("mask", "value_mask"):
        samples.tensors[name][:] = False
    totals = learner._totals(samples, uneven=False)
    # By rank on average, on two ranks.
    assert {name: float(total) for name, total in totals.items()} == dict.fromkeys(totals, 5.0)


def test_the_value_head_warms_up_alone() -> None:
    learner, policy = made("algorithm.options.critic_warmup_steps=2", "actor.optim.weight_decay=0.1")
    before = weights_of(policy)
    for step in (1, 2):
        learner.update(batch(masked=False), SAMPLES, step, Figures())
    assert changed(policy, before) == {name for name in before if name.startswith("critic.")}
    learner.update(batch(masked=False), SAMPLES, 3, Figures())
    assert changed(policy, before) == set(before)


@pytest.mark.parametrize("key", ["actor.optim.value_lr=0.1", "algorithm.options.critic_warmup_steps=2"])
def test_a_value_head_is_known_by_its_name(key: str) -> None:
    made(f"actor.model.model_type={__name__}:OwnPolicy", key)
    with pytest.raises(ConfigError, match=f"`{key.partition('=')[0]}` is set, and no trained weight") as caught:
        made(f"actor.model.model_type={__name__}:Renamed", key)
    assert "`self.critic`" in (caught.value.help or "")


def test_passes_end_above_the_target_divergence() -> None:
    """A run without a target tells the divergence of the last batch of each pass; one with a target stops there."""
    overrides = ("algorithm.update_epoch=6", "algorithm.options.normalize_advantages=false", "actor.optim.lr=0.01")
    samples = batch(masked=False)
    learner, _ = made(*overrides)
    torch.manual_seed(3)
    figures = learner.learn(samples, SAMPLES // 2, SAMPLES, 1)
    assert learner.passes == 6
    last = [figures.parts[2 * number + 1]["actor/approx_kl"] for number in range(6)]
    target = (sorted(last)[2] + sorted(last)[3]) / 2
    wanted = next(number for number, divergence in enumerate(last, 1) if divergence > target)
    stopping, _ = made(*overrides, f"algorithm.target_kl={target}")
    torch.manual_seed(3)
    output = stopping.learn(samples, SAMPLES // 2, SAMPLES, 1)
    assert stopping.passes == wanted < 6
    assert len(output.parts) == 2 * wanted
    assert output.parts == figures.parts[: 2 * wanted]


def test_ranks_agree_on_the_divergence() -> None:
    """The mean over two ranks, of which the other one has twice as much."""
    learner, _ = made(strategy=one_of_two(lambda value: value * 3))
    assert learner._divergence([{"actor/approx_kl": 0.2}, {"actor/approx_kl": 0.4}]) == pytest.approx(0.45)
    assert learner._divergence([]) == 0
    with pytest.raises(ConfigError, match="needs a divergence"):
        learner._divergence([{"my/loss": 1.0}])


HERE = "tests.unit.recipes.embodied.learning.test_learner"


@pytest.mark.parametrize(
    ("overrides", "name", "why"),
    [
        ([f"algorithm.loss_type={HERE}:without_values"], "critic.0.0.bias", "`adv_type: gae` takes advantages"),
        ([f"algorithm.loss_type={HERE}:with_detached_values"], "critic.0.0.bias", "does not train them"),
        ([f"algorithm.loss_type={HERE}:values_alone"], "actor.0.bias", "log-probabilities depend on it"),
        ([f"actor.model.model_type={HERE}:Forgetful"], "forgotten.bias", "neither actions nor values"),
    ],
)
def test_a_tensor_that_the_loss_leaves_out_ends_the_first_step(overrides: list[str], name: str, why: str) -> None:
    learner, policy = made(*overrides)
    assert name in dict(policy.named_parameters())
    with pytest.raises(UntrainedError, match=f"`{name}`") as caught:
        learner.learn(batch(masked=False), SAMPLES, SAMPLES // 2, 1)
    assert why in (caught.value.why or "")


@pytest.mark.parametrize(
    "overrides", [[], ["algorithm.options.critic_warmup_steps=3"], ["algorithm.normalize_observations=true"]]
)
def test_what_waits_for_its_turn_or_is_not_needed_ends_nothing(overrides: list[str]) -> None:
    learner, policy = made(*overrides)
    before = weights_of(policy)
    learner.learn(batch(masked=True), SAMPLES, SAMPLES // 2, 1)
    assert changed(policy, before)


def test_values_that_no_advantage_needs_may_stay_untrained() -> None:
    learner, policy = made(f"algorithm.loss_type={HERE}:without_values")
    samples = batch(masked=False)
    del samples.tensors["returns"], samples.tensors["old_values"]
    before = policy.get_parameter("critic.0.0.weight").clone()
    learner.learn(samples, SAMPLES, SAMPLES, 1)
    assert torch.equal(policy.get_parameter("critic.0.0.weight"), before)


def test_the_algorithm_of_the_page_trains_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[5] / "docs/embodied.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python file=my_lab/algorithms\.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    # The names that the page registers are for programs that have imported it.
    (tmp_path / "page_of_algorithms.py").write_text(re.sub(r"^@register_.*\n", "", code, flags=re.MULTILINE))
    monkeypatch.syspath_prepend(str(tmp_path))
    learner, policy = made("algorithm.loss_type=page_of_algorithms:clipped_weights")
    before = weights_of(policy)
    figures = learner.learn(batch(masked=True), SAMPLES, SAMPLES, 1)
    assert changed(policy, before) == set(before)
    assert {"actor/clip_fraction", "critic/value_loss"} <= figures.means().keys()


class TestValuesThatAreNotFinite:
    @pytest.fixture
    def poisoned(self) -> Samples:
        samples = batch(masked=False)
        samples.tensors["advantages"][3] = float("nan")
        return samples

    def test_a_loss_ends_the_run_before_it_changes_a_weight(self, poisoned: Samples) -> None:
        learner, policy = made()
        before = weights_of(policy)
        with pytest.raises(NonFiniteError, match="policy_loss") as raised:
            learner.update(poisoned, SAMPLES, 7, Figures())
        assert raised.value.tensor == "train/actor/policy_loss"
        assert raised.value.where == "step 7"
        assert "actor.optim.lr" in str(raised.value.help)
        assert not changed(policy, before)

    def test_a_gradient_is_named_by_its_weight(self) -> None:
        learner, _ = made(f"algorithm.loss_type={HERE}:root_of_zero")
        with pytest.raises(NonFiniteError) as raised:
            learner.update(batch(masked=False), SAMPLES, 7, Figures())
        assert raised.value.tensor == "gradient of actor.0.weight"

    def test_skip_leaves_the_update_out_and_counts_it(self, poisoned: Samples) -> None:
        learner, policy = made("runner.on_nonfinite=skip")
        other, untouched = made("runner.on_nonfinite=skip")
        figures = Figures()
        learner.update(poisoned, SAMPLES, 7, figures)
        assert (figures.skipped, figures.means()) == (1, {})
        learner.update(batch(masked=False), SAMPLES, 7, figures)
        other.update(batch(masked=False), SAMPLES, 7, Figures())
        assert (figures.skipped, len(figures.parts)) == (1, 1)
        assert not changed(policy, weights_of(untouched))

    def test_ranks_agree_where_the_loss_of_one_is_not_finite(self) -> None:
        other = torch.tensor([0.0, 1.0])  # its losses are not finite
        learner, policy = made(strategy=one_of_two(lambda value: value + other if value.shape == (2,) else value * 2))
        before = weights_of(policy)
        with pytest.raises(NonFiniteError) as raised:
            learner.update(batch(masked=False), SAMPLES, 7, Figures())
        assert (raised.value.tensor, raised.value.where) == ("loss", "step 7, rank 1 of the actor")
        assert not changed(policy, before)

    def test_samples_are_refused_by_name_before_anything_is_learned(self, poisoned: Samples) -> None:
        learner, _ = made()
        with pytest.raises(NonFiniteError, match="advantages") as raised:
            learner.check_samples(poisoned, 3)
        assert raised.value.where == "step 3"
        own, _ = made("algorithm.adv_type=rlinf_core.algorithms.advantages:gae")
        with pytest.raises(NonFiniteError, match="advantages") as raised:
            own.check_samples(poisoned, 3)
        assert "advantages:gae` returns it" in (raised.value.help or "")
        poisoned.tensors["advantages"][3] = 0
        poisoned.inputs["states"][0, 1] = float("inf")
        with pytest.raises(NonFiniteError, match="observation states"):
            learner.check_samples(poisoned, 3)
        made("runner.on_nonfinite=skip")[0].check_samples(poisoned, 3)

    @pytest.mark.parametrize("choice", ["stop", "skip"])
    def test_weights_are_never_let_through(self, choice: str) -> None:
        learner, policy = made(f"runner.on_nonfinite={choice}")
        learner.check_weights("step 3")
        with torch.no_grad():
            policy.get_parameter("head.log_std")[0, 1] = float("inf")
        with pytest.raises(NonFiniteError, match=r"weight head.log_std. is inf"):
            learner.check_weights("step 3")


@pytest.mark.parametrize(("kind", "differs"), [("Dropping", True), ("OwnPolicy", False), (None, None)])
def test_a_policy_of_ones_own_trains_by_what_it_drew(kind: str | None, differs: bool | None) -> None:
    overrides = () if kind is None else (f"actor.model.model_type={__name__}:{kind}",)
    learner, policy = made(*overrides)
    samples = batch(masked=True)
    policy.eval()
    with torch.no_grad():
        drawn = policy(samples.inputs, samples.tensors["actions"]).logprobs
    policy.train()
    samples.tensors["old_logprobs"] = drawn.sum(dim=-1)
    learner.learn(samples, SAMPLES, SAMPLES // 3, 1)
    if differs is None:
        assert learner.drawn_gap is None
    else:
        assert (known(learner.drawn_gap) > 1e-3) is differs
