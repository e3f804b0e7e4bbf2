"""Optimizer steps on micro-batches: gradients, clipping, and a guard against NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from recipes.training.arrays import REMEDY, NonFiniteError
from recipes.training.sharding import ParallelStrategy
from recipes.training.typed_tensors import floats, integers, local_part
from rlinf_core import Loss, RLinfError

Part = TypeVar("Part")

# A warning for a training step and the number of optimizer steps that it skipped.
SKIPPED: Final = "step %d: skipped %d optimizer steps because a loss or gradient was NaN or infinite"


class UntrainedError(RLinfError):
    """A trainable tensor that no update gives a gradient, so that it would silently stay untrained.

    Args:
        names: tensors without a gradient; empty: the loss depends on no tensor.
        where: the step, as in `step 1`.
        why: what needs the tensors.
        help: the remedy.
    """

    code = "untrained"

    def __init__(self, names: Iterable[str], where: str, why: str, help: str) -> None:
        first, *others = [*sorted(names), ""]
        rest = f" and {len(others) - 1} more" if len(others) > 1 else ""
        what = f"`{first}`{rest} {'train, but have' if rest else 'trains, but has'} no gradient"
        super().__init__(what if first else "the loss depends on no trained tensor", where=where, why=why, help=help)


@dataclass
class Figures:
    """Metrics of the optimizer steps of one training step.

    Attributes:
        parts: the metrics of each trained micro-batch, scalars by name.
        skipped: the number of optimizer steps skipped because of a non-finite loss or gradient.
    """

    parts: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    skipped: int = 0

    def add(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the metrics of micro-batches, converted to floats at once.

        Scalar tensors would live until the training step ends, and fragment the memory that its batches free: the next
        batch would not fit, and memory would grow with every batch.
        """
        values = [value.float() for part in parts for value in part.values()]
        numbers = iter(floats(torch.stack(values)) if values else ())
        self.parts += [{name: next(numbers) for name in part} for part in parts]

    def means(self) -> dict[str, float]:
        """Return the mean of each metric over the micro-batches that have it; for names in `_max`, the maximum."""
        names = list(dict.fromkeys(name for part in self.parts for name in part))
        if not names:
            return {}
        columns = {name: torch.tensor([part[name] for part in self.parts if name in part]) for name in names}
        reduced = [column.amax() if name.endswith("_max") else column.mean() for name, column in columns.items()]
        return dict(zip(names, floats(torch.stack(reduced)), strict=True))

    def metrics(self, *, counts_skipped: bool) -> dict[str, float]:
        """Return the means by full metric names, optionally with the number of skipped updates."""
        metrics = {f"train/{name}": value for name, value in self.means().items()}
        return {**metrics, "train/actor/skipped_updates": float(self.skipped)} if counts_skipped else metrics


class Updater:
    """Takes optimizer steps, together with the other ranks that share the weights.

    Args:
        strategy: the policy, as distributed over ranks.
        optimizer: the optimizer of the policy's weights.
        clip_grad: largest norm of the gradient; 0: no limit.
        skip_nonfinite: skip steps with a non-finite loss or gradient instead of raising.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float,
        skip_nonfinite: bool = False,
    ) -> None:
        self._strategy = strategy
        self._optimizer = optimizer
        self._clip_grad = clip_grad
        self._skips = skip_nonfinite
        # Trained tensors without a gradient after all updates of the first training step; None: there was no update.
        self._untouched: set[str] | None = None
        self._first_step: int | None = None
        self._was_asked = False

    def update(
        self,
        parts: Sequence[Part],
        evaluate: Callable[[Part], Loss],
        step: int,
        figures: Figures,
        trains: Callable[[str], bool] | None = None,
    ) -> None:
        """Take one optimizer step on the mean of the losses of micro-batches.

        Collective; all ranks pass equally many parts.

        Args:
            parts: the micro-batches of this rank.
            evaluate: returns the loss of a micro-batch.
            step: the training step, for messages.
            figures: receives the metrics of the losses and the norm of the gradient, or counts the step as skipped.
            trains: selects by name the weights that the step changes; None: all.

        Raises:
            NonFiniteError: a loss or a gradient on some rank is not finite, and `skip_nonfinite` is false.
            UntrainedError: the loss depends on no weight.
        """
        strategy = self._strategy
        self._optimizer.zero_grad()
        losses: list[Loss] = []
        for part in parts:
            losses.append(evaluate(part))
            if not losses[-1].loss.requires_grad:
                why = "all that it is made of was detached, or comes from the batch"
                raise UntrainedError((), f"step {step}", why, "use the tensors that the model returns as they are")
            (losses[-1].loss / len(parts)).backward()
        strategy.finish_gradients()
        if parts and not self._was_asked and self._first_step in (None, step):
            self._first_step = step
            absent = _without_gradient(strategy.module)
            self._untouched = absent if self._untouched is None else self._untouched & absent
        if trains is not None:
            for name, weight in strategy.module.named_parameters():
                if not trains(name):
                    weight.grad = None
        norm = strategy.gradient_norm()
        if self._is_finite(losses, norm, step):
            # Metrics are read before more work is queued on the accelerator, for which reading them would wait. With
            # `cpu_offload` the norm is on the CPU but the losses are not.
            figures.add([{**loss.metrics, "actor/grad_norm": norm.detach().to(loss.loss.device)} for loss in losses])
            strategy.clip_gradients(self._clip_grad, norm)
            # Only for the first update of a training step, since it waits for the accelerator.
            sample = WeightSample.of(strategy.module) if len(figures.parts) == len(losses) else None
            self._optimizer.step()
            if sample is not None:
                figures.parts[-1]["actor/weights_changed"] = sample.changed()
        else:
            figures.skipped += 1

    def untouched(self) -> set[str] | None:
        """Return the names of trained tensors that no update of the first training step has given a gradient; after the
        first
        call, return None, on all ranks at once.

        Experts are left out: a batch may need none of them.
        """
        if self._was_asked:
            return None
        self._was_asked = True
        return self._untouched or set()

    def reached(self, output: Callable[[], Tensor | None]) -> set[str]:
        """Return the names of the trained tensors that an output of the model depends on. Collective.

        Gradients are cleared; the random generators are restored.
        """
        device = next(self._strategy.module.parameters()).device
        self._optimizer.zero_grad()
        kind = "cuda" if device.type == "cpu" else device.type
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind):
            value = output()
            if value is None or not value.requires_grad:
                return set()
            value.float().sum().backward()
        weights = self._strategy.module.named_parameters()
        names = {name for name, weight in weights if weight.grad is not None}
        self._optimizer.zero_grad()
        return names

    def _is_finite(self, losses: list[Loss], norm: Tensor, step: int) -> bool:
        """Return whether the losses and gradients of all ranks are finite.

        The norm is equal on all ranks, and not finite if any gradient is not; losses differ between ranks.
        """
        strategy = self._strategy
        bad = torch.zeros(strategy.world_size)
        bad[strategy.rank] = float(not all(bool(loss.loss.isfinite()) for loss in losses))
        bad = strategy.reduce_sum(bad) if strategy.world_size > 1 else bad
        if not bad.any() and bool(norm.isfinite()):
            return True
        if self._skips:
            return False
        self._raise(losses, norm, bad, step)
        return False

    def _raise(self, losses: list[Loss], norm: Tensor, bad: Tensor, step: int) -> None:
        """Raise an error that names the non-finite value: a loss or loss term if there is one, else a gradient."""
        where = f"step {step}"
        if bad.any():
            where += f", rank {int(bad.nonzero()[0])} of the actor" if self._strategy.world_size > 1 else ""
            for loss in losses:
                for name, value in loss.metrics.items():
                    if not bool(value.isfinite()):
                        raise NonFiniteError(f"train/{name}", float(value), where, REMEDY)
            values = [float(loss.loss) for loss in losses if not bool(loss.loss.isfinite())]
            raise NonFiniteError("loss", next(iter(values), float("nan")), where, REMEDY)
        for name, weight in self._strategy.module.named_parameters():
            gradient = weight.grad
            if gradient is not None and not bool(local_part(gradient).isfinite().all()):
                raise NonFiniteError(f"gradient of {name}", first_nonfinite(local_part(gradient)), where, REMEDY)
        raise NonFiniteError("train/actor/grad_norm", float(norm), where, REMEDY)

    def check_weights(self, where: str) -> None:
        """See `check_weights`."""
        check_weights(self._strategy.module, where)


def _without_gradient(module: nn.Module) -> set[str]:
    return {
        name
        for name, weight in module.named_parameters()
        if weight.requires_grad and weight.grad is None and "experts" not in name.split(".")
    }


def check_weights(module: nn.Module, where: str) -> None:
    """Raise if a trained weight is not finite, so that none reaches a checkpoint or a rollout.

    Raises:
        NonFiniteError: naming the weight.
    """
    # Updates leave untrained weights unchanged, and there may be many times more of them.
    trained = {name: local_part(weight.detach()) for name, weight in module.named_parameters() if weight.requires_grad}
    if _has_finite_sums(trained.values()):
        return
    for name, weight in trained.items():
        if not bool(weight.isfinite().all()):
            raise NonFiniteError(f"weight {name}", first_nonfinite(weight), where, REMEDY)


def _has_finite_sums(tensors: Iterable[Tensor]) -> bool:
    """Return whether the sums of tensors are finite. Finite sums imply finite numbers; a sum that is not finite may
    have overflowed.

    The result synchronizes with the device once, not for each tensor.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    return all(bool(torch.stack(part).isfinite().all()) for part in sums.values())


def first_nonfinite(tensor: Tensor) -> float:
    """Return the first NaN or infinity of a tensor that has one."""
    return float(tensor[~tensor.isfinite()].flatten()[0])


# Enough to tell whether all or no weights change; reading a whole large model would take a pass over its memory.
_WEIGHTS: Final = 8
_NUMBERS: Final = 512


class WeightSample(NamedTuple):
    """Some numbers of the trained weights before an optimizer step.

    Attributes:
        views: parts of the weights, each 1-D.
        before: their values, float [n].
        counted: bool [n], the numbers with a non-zero gradient.
    """

    views: Sequence[Tensor]
    before: Tensor
    counted: Tensor

    @classmethod
    def of(cls, module: nn.Module) -> WeightSample | None:
        """Return a sample of the weights with gradients, on each rank from its shards; None without gradients."""
        trained = [(weight.detach(), weight.grad) for weight in module.parameters() if weight.grad is not None]
        chosen = trained[:: max(1, len(trained) // _WEIGHTS)][:_WEIGHTS]
        if not chosen:
            return None
        views = [_numbers(weight) for weight, _ in chosen]
        return cls(views, torch.cat(views), torch.cat([_numbers(gradient) for _, gradient in chosen]) != 0)

    def changed(self) -> float:
        """Return the share of the counted numbers that have changed, from 0 to 1; 1 if none is counted."""
        differ = torch.cat(list(self.views)) != self.before
        changed, whole = integers(torch.stack(((differ & self.counted).sum(), self.counted.sum())))
        return changed / whole if whole else 1.0


def _numbers(tensor: Tensor) -> Tensor:
    mine = local_part(tensor)
    return mine.reshape(-1)[:_NUMBERS] if mine.is_contiguous() else mine.select(0, 0).reshape(-1)[:_NUMBERS]
