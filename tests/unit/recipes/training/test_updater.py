"""Optimizer steps on micro-batches, without a policy of any recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recipes.training.arrays import NonFiniteError
from recipes.training.sharding import ParallelStrategy
from recipes.training.updater import Figures, UntrainedError, Updater
from rlinf_core.algorithms.loss_inputs import Loss


def updater(module: nn.Module, clip_grad: float = 0.0) -> Updater:
    return Updater(ParallelStrategy(module), torch.optim.SGD(module.parameters(), lr=1.0), clip_grad=clip_grad)


def test_step_descends_the_mean_loss_and_records_each_loss() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    figures = Figures()

    def loss(part: float) -> Loss:
        return Loss(module(torch.tensor([part])).sum(), {"part": torch.tensor(part)})

    updater(module).update([1.0, 5.0], loss, 1, figures)

    assert float(module.weight.detach()) == -3.0
    assert figures.means() == {"part": 3.0, "actor/grad_norm": 3.0, "actor/weights_changed": 1.0}


def test_gradients_are_clipped_by_their_norm() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)

    updater(module, clip_grad=0.5).update(
        [4.0], lambda part: Loss(module(torch.tensor([part])).sum(), {}), 1, Figures()
    )

    assert float(module.weight.detach()) == pytest.approx(-0.5)


def test_metric_missing_in_micro_batches_is_the_mean_of_the_rest() -> None:
    def one(number: float) -> Tensor:
        return torch.tensor(number)

    figures = Figures()
    figures.add([{"a": one(1.0)}, {"a": one(3.0), "b": one(5.0)}])

    assert figures.means() == {"a": 2.0, "b": 5.0}
    assert figures.metrics(counts_skipped=False) == {"train/a": 2.0, "train/b": 5.0}


def test_metrics_are_written_down_as_numbers() -> None:
    # Tensors that live until a training step ends keep freed memory apart.
    figures = Figures()
    third = torch.tensor(1 / 3)
    figures.add([{"a": third, "b": torch.tensor(2, dtype=torch.int64)}])
    figures.add([{}])
    assert figures.parts == [{"a": float(third), "b": 2.0}, {}]
    assert figures.means() == {"a": float(third), "b": 2.0}


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.bias, float("inf"))

    with pytest.raises(NonFiniteError, match="weight bias"):
        updater(module).check_weights("step 2")


def test_large_finite_weights_pass() -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, torch.finfo(torch.float32).max)

    updater(module).check_weights("step 2")

    assert not module.weight.sum().isfinite()


@pytest.mark.parametrize("values", [(float("inf"), float("-inf")), (float("nan"), 0.0)])
def test_no_sum_hides_a_weight_that_is_not_finite(values: tuple[float, float]) -> None:
    module = nn.Linear(1, 2)
    module.bias.data = torch.tensor(values)

    with pytest.raises(NonFiniteError, match="weight bias"):
        updater(module).check_weights("step 2")


def test_untrained_weights_are_not_checked_in_every_step() -> None:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.bias, float("inf"))
    module.bias.requires_grad_(False)

    updater(module).check_weights("step 2")


class TwoHeads(nn.Module):
    """Two outputs of one trunk, a part of a mixture that no batch needs, a spare tensor and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.value_head, self.spare = (nn.Linear(2, 2) for _ in range(4))
        self.experts = nn.ModuleList([nn.Linear(2, 2)])
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(inputs)
        return self.head(features), self.value_head(features)


def test_tensors_without_a_gradient_are_told_once() -> None:
    module = TwoHeads()
    taken = updater(module)
    inputs = torch.ones(1, 2)
    for step in (1, 2):
        # Zero gradients are gradients: an adapter has them in its first step.
        taken.update([0.0], lambda part: Loss(module(inputs)[0].sum() * part, {}), step, Figures())
    missing = {f"{name}.{kind}" for name in ("value_head", "spare") for kind in ("weight", "bias")}
    random = torch.get_rng_state()
    assert taken.reached(lambda: module(inputs)[1] + torch.rand(1)) & missing == {
        "value_head.weight",
        "value_head.bias",
    }
    assert torch.equal(torch.get_rng_state(), random)
    assert taken.reached(lambda: None) == taken.reached(lambda: torch.ones(1)) == set()
    assert taken.untouched() == missing
    assert taken.untouched() is None


def test_tensors_of_later_updates_and_of_warm_ups_are_no_fault() -> None:
    module = TwoHeads()
    taken = updater(module)
    inputs = torch.ones(1, 2)
    taken.update([1], lambda _: Loss(module(inputs)[0].sum(), {}), 1, Figures(), trains=lambda name: "head" not in name)
    taken.update([], lambda _: Loss(torch.zeros(()), {}), 1, Figures())
    taken.update([1], lambda _: Loss(module(inputs)[1].sum(), {}), 1, Figures())
    assert taken.untouched() == {"spare.weight", "spare.bias"}


def test_a_loss_of_detached_tensors_is_refused() -> None:
    module = TwoHeads()
    with pytest.raises(UntrainedError, match="the loss depends on no trained tensor") as caught:
        updater(module).update([1], lambda _: Loss(module(torch.ones(1, 2))[0].detach().sum(), {}), 3, Figures())
    assert caught.value.where == "step 3"
