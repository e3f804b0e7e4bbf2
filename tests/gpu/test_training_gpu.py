"""Optimizer steps on a GPU, of weights that are in no shards."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

from recipes.training.sharding import ParallelStrategy  # noqa: E402 - after the check
from recipes.training.updater import Figures, Updater  # noqa: E402
from rlinf_core.algorithms.loss_inputs import Loss  # noqa: E402


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_a_step_on_a_gpu_is_that_of_a_cpu(clip_grad: float) -> None:
    results = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        module = torch.nn.Linear(300, 300).to(device)
        rows = torch.randn(8, 300).to(device)
        updater = Updater(ParallelStrategy(module), torch.optim.SGD(module.parameters(), lr=0.1), clip_grad=clip_grad)
        figures = Figures()

        def loss(part: int, module: torch.nn.Module = module, rows: torch.Tensor = rows) -> Loss:
            value = module(rows[part]).square().mean()
            return Loss(value, {"loss": value.detach()})

        updater.update([0, 1, 2], loss, 1, figures)
        results[device] = (figures.means(), module.weight.detach().cpu())
    assert results["cuda"][0] == pytest.approx(results["cpu"][0], rel=1e-4)
    assert torch.allclose(results["cuda"][1], results["cpu"][1], atol=1e-5)
