"""Optimizer steps on micro-batches, gradients of several ranks, and numbers that are not finite."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.arrays import NonFiniteError, nonfinite_rows
from recipes.training.sharding import ParallelStrategy, Replicated
from recipes.training.typed_tensors import explained_variance
from recipes.training.updater import Figures, UntrainedError, Updater, WeightSample
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
    clipping = updater(module, clip_grad=0.5)
    clipping.update([4.0], lambda part: Loss(module(torch.tensor([part])).sum(), {}), 1, Figures())
    assert float(module.weight.detach()) == pytest.approx(-0.5)


def test_metric_missing_in_micro_batches_is_the_mean_of_the_rest() -> None:
    figures = Figures()
    figures.add([{"a": torch.tensor(1.0)}, {"a": torch.tensor(3.0), "b": torch.tensor(5.0)}])
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


@pytest.mark.parametrize("values", [(float("inf"), 0.0), (float("inf"), float("-inf")), (float("nan"), 0.0)])
def test_a_weight_that_is_not_finite_is_refused_by_name(values: tuple[float, float]) -> None:
    """Also where a sum would hide it; untrained weights are not checked in every step."""
    module = nn.Linear(1, 2)
    module.bias.data = torch.tensor(values)
    with pytest.raises(NonFiniteError, match="weight bias"):
        updater(module).check_weights("step 2")
    module.bias.requires_grad_(False)
    updater(module).check_weights("step 2")


def test_large_finite_weights_pass() -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, torch.finfo(torch.float32).max)
    updater(module).check_weights("step 2")
    assert not module.weight.sum().isfinite()


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
    reached = taken.reached(lambda: module(inputs)[1] + torch.rand(1))
    assert reached & missing == {"value_head.weight", "value_head.bias"}
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


@pytest.mark.parametrize("reduce_type", [None, torch.bfloat16])
def test_gradients_are_averaged_in_one_message(
    monkeypatch: pytest.MonkeyPatch, reduce_type: torch.dtype | None
) -> None:
    sent: list[Tensor] = []

    def all_reduce(values: Tensor) -> None:
        """As if the other rank had three times the gradients."""
        sent.append(values.clone())
        values *= 4

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3) / 3).sum().backward()
    # A head of values that no loss asks for.
    module.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    Replicated(module, 2, reduce_type=reduce_type).finish_gradients()
    (message,) = sent
    assert message.dtype == (reduce_type or torch.float32)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(module.weight.grad, torch.full((2, 3), 2 / 3), rtol=0, atol=1e-2)


def test_norms_of_large_gradients_are_exact() -> None:
    policy = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (3, 1 << 16, (1 << 21) + 7)])
    generator = torch.Generator().manual_seed(0)
    for weight in policy:
        weight.grad = torch.randn(weight.shape, generator=generator) * 1e-4
    exact = torch.cat([weight.grad.double() for weight in policy if weight.grad is not None]).norm()
    norm = ParallelStrategy(policy).gradient_norm()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(ParallelStrategy(nn.Linear(2, 2)).gradient_norm()) == 0


def test_norm_is_on_the_device_of_the_gradients() -> None:
    # Without an accelerator: torch's device of shapes alone.
    module = nn.Linear(300, 300, device="meta")
    for weight in module.parameters():
        weight.grad = torch.empty_like(weight)
    assert ParallelStrategy(module).gradient_norm().device.type == "meta"


def test_rows_with_a_nan_or_an_infinity_are_found() -> None:
    values = np.zeros((4, 2, 3), np.float32)
    values[1, 0, 2], values[3, 1, 1] = np.nan, -np.inf
    assert nonfinite_rows(values).tolist() == [False, True, False, True]
    for finite in (np.zeros((2, 3), np.float32), np.zeros((2, 4), np.uint8), np.array(["push", "pull"])):
        assert not nonfinite_rows(finite).any()


def test_error_names_tensor_value_and_place_across_processes() -> None:
    error = NonFiniteError("reward", float("nan"), "step 3, environment 5", help="look for a division by zero")
    assert str(error) == (
        "step 3, environment 5: `reward` is nan, not a finite number\n  help: look for a division by zero"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.tensor) == (str(error), "reward")


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(torch.zeros(4), returns).item() == 0
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4)).item() == 0
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0, 99.0]), returns, mask).item() == 1


def changed_by(step: float, dtype: torch.dtype) -> float:
    module = nn.Linear(16, 16, dtype=dtype)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    sample = WeightSample.of(module)
    assert sample is not None
    with torch.no_grad():
        for weight in module.parameters():
            weight += step
    return sample.changed()


def test_small_steps_vanish_in_bf16_and_not_in_fp32() -> None:
    assert changed_by(1e-5, torch.float32) == 1.0
    assert changed_by(1e-5, torch.bfloat16) == 0.0
    assert changed_by(1e-1, torch.bfloat16) == 1.0


def test_numbers_without_a_gradient_do_not_count() -> None:
    module = nn.Embedding(4, 2)
    module.weight.grad = torch.zeros_like(module.weight)
    module.weight.grad[1] = 1.0
    sample = WeightSample.of(module)
    assert sample is not None
    with torch.no_grad():
        module.weight[1, 0] += 1.0
    assert sample.changed() == 0.5


def test_module_without_gradients_has_no_sample() -> None:
    module = nn.Linear(2, 2)
    assert WeightSample.of(module) is None
    module.weight.grad = torch.zeros_like(module.weight)
    sample = WeightSample.of(module)
    assert sample is not None
    assert sample.changed() == 1.0
