"""Optimizer steps of one rank: losses of micro batches, gradients, clipping, and a guard against NaN and infinities.

Needs tensors and a policy, no worker: the actor feeds it, tests call it directly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.embodied.batch import Samples
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.precision import computing, evaluation_in_float32
from recipes.training.finite import REMEDY, NonFiniteError
from recipes.training.sharding import ParallelStrategy
from rlinf_core.algorithms.aggregation import denominator
from rlinf_core.algorithms.levels import sum_to_level
from rlinf_core.algorithms.losses.inputs import Loss, LossInputs, LossSettings
from rlinf_core.algorithms.options import checked_options
from rlinf_core.algorithms.registry import get_policy_loss


@dataclass
class Figures:
    """Metrics of the optimizer steps of one training step.

    Attributes:
        parts: of every micro batch that was learned from, scalars by name.
        skipped: how many optimizer steps were left out, for a loss or gradient that was not finite.
    """

    parts: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    skipped: int = 0

    def means(self) -> dict[str, float]:
        """Return the mean of every metric over all micro batches; empty where nothing was learned from."""
        if not self.parts:
            return {}
        names = list(self.parts[0])
        table = torch.stack([torch.stack([part[name].float() for name in names]) for part in self.parts])
        return dict(zip(names, table.mean(dim=0).tolist(), strict=True))


class Learner:
    """Takes optimizer steps on batches of samples, together with the learners of the other ranks.

    Args:
        config: the whole file.
        strategy: the policy, as it is spread over ranks.
        optimizer: of its weights.
        device: where is computed.
        rank: of this learner among those that share the weights.
    """

    def __init__(
        self,
        config: EmbodiedConfig,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self._config = config
        self._strategy = strategy
        self._optimizer = optimizer
        self._device = device
        self._rank = rank
        self._loss = get_policy_loss(config.algorithm.loss_type)
        options = checked_options(self._loss, config.algorithm.options, "algorithm.options")
        self._settings = replace(LossSettings.of(config.algorithm), options=options)
        self._skips = config.runner.on_nonfinite == "skip"

    def learn(self, samples: Samples, share: int, micro: int, step: int) -> Figures:
        """Take `algorithm.update_epoch` passes over the samples, in random batches.

        Args:
            samples: of this rank.
            share: samples of a batch that are this rank's.
            micro: samples of one forward and backward pass.
            step: the training step, for messages.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is not finite, under `runner.on_nonfinite: stop`.
        """
        figures = Figures()
        for _ in range(self._config.algorithm.update_epoch):
            for batch in samples.batches(share):
                self.update(batch, micro, step, figures)
        self.check_weights(f"step {step}")
        return figures

    def update(self, batch: Samples, micro: int, step: int, figures: Figures) -> None:
        """Take one optimizer step on this rank's share of a batch, in parts of `micro` samples.

        A step with a loss or gradient that is not finite is an error or is skipped, on all ranks alike.
        """
        strategy, parts = self._strategy, list(batch.microbatches(micro))
        totals = self._totals(batch, uneven=len(batch) > micro and len(batch) % micro > 0)
        # Totals by part on average: the loss of the batch, and every figure of it, is then the mean of its parts'.
        totals = {name: total / len(parts) for name, total in totals.items()}
        self._optimizer.zero_grad()
        found: list[Loss] = []
        for number, part in enumerate(parts):
            strategy.accumulate(last=number == len(parts) - 1)
            found.append(self._evaluate(part, totals))
            (found[-1].loss / len(parts)).backward()
        strategy.finish_gradients()
        norm = strategy.gradient_norm()
        if self._is_sound(found, norm, step):
            strategy.clip_gradients(self._config.actor.optim.clip_grad, norm)
            self._optimizer.step()
            figures.parts += [{**each.metrics, "actor/grad_norm": norm.detach()} for each in found]
        else:
            figures.skipped += 1

    def _is_sound(self, found: list[Loss], norm: Tensor, step: int) -> bool:
        """Return whether the losses and gradients of all ranks are finite.

        The norm is the same on every rank, and not finite where any gradient is not; losses differ.
        """
        bad = torch.zeros(self._strategy.world_size)
        bad[self._rank] = float(not all(bool(each.loss.isfinite()) for each in found))
        bad = self._strategy.reduce_sum(bad) if self._strategy.world_size > 1 else bad
        if not bad.any() and bool(norm.isfinite()):
            return True
        if self._skips:
            return False
        self._raise(found, norm, bad, step)
        return False

    def _raise(self, found: list[Loss], norm: Tensor, bad: Tensor, step: int) -> None:
        """Raise the error that names what is not finite: a loss or a term of it where there is one, else a gradient."""
        where = f"step {step}"
        if bad.any():
            where += f", rank {int(bad.nonzero()[0])} of the actor" if self._strategy.world_size > 1 else ""
            for each in found:
                for name, value in each.metrics.items():
                    if not bool(value.isfinite()):
                        raise NonFiniteError(f"train/{name}", float(value), where, REMEDY)
            values = [float(each.loss) for each in found if not bool(each.loss.isfinite())]
            raise NonFiniteError("loss", next(iter(values), float("nan")), where, REMEDY)
        for name, weight in self._strategy.module.named_parameters():
            gradient = weight.grad
            if gradient is not None and not bool(_local(gradient).isfinite().all()):
                raise NonFiniteError(f"gradient of {name}", _first_bad(_local(gradient)), where, REMEDY)
        raise NonFiniteError("train/actor/grad_norm", float(norm), where, REMEDY)

    def check_samples(self, samples: Samples, step: int) -> None:
        """Refuse samples with a value that is not finite. Under `skip` their batches are left out when they come.

        Raises:
            NonFiniteError: naming the tensor.
        """
        if self._skips:
            return
        named = {**{f"observation {name}": each for name, each in samples.inputs.items()}, **samples.tensors}
        for name, each in named.items():
            if each.is_floating_point() and not bool(each.isfinite().all()):
                raise NonFiniteError(name, _first_bad(each), f"step {step}", REMEDY)

    def check_weights(self, where: str) -> None:
        """Refuse weights that are not finite, so that no checkpoint and no rollout gets them.

        Raises:
            NonFiniteError: naming the weight.
        """
        for name, weight in self._strategy.module.named_parameters():
            mine = _local(weight.detach())
            if not bool(mine.isfinite().all()):
                raise NonFiniteError(f"weight {name}", _first_bad(mine), where, REMEDY)

    def _totals(self, batch: Samples, *, uneven: bool) -> dict[str, Tensor]:
        """Return the denominators of the whole batch, by rank on average; empty where all parts count alike."""
        if "mask" not in batch.tensors and not uneven:
            return {}
        mask = batch.tensors.get("mask")
        algorithm, tensors = self._config.algorithm, batch.tensors
        how, shape = algorithm.loss_agg_func, tensors["old_logprobs"].shape
        totals = {"total": denominator(mask, shape, how, least=0)}
        entropies = sum_to_level(tensors["actions"], algorithm.entropy_type).shape
        counted = mask if mask is None else _leading(mask, len(entropies))
        totals["entropy_total"] = denominator(counted, entropies, how, least=0)
        if "returns" in tensors:
            totals["value_total"] = denominator(
                tensors.get("value_mask"), tensors["returns"].shape, "token-mean", least=0
            )
        strategy = self._strategy
        # Padding may be all that a rank has of a batch: it counts nothing.
        summed = strategy.reduce_sum(torch.stack(list(totals.values()))).clamp(min=1) / strategy.world_size
        return dict(zip(totals, summed.unbind(), strict=True))

    def _evaluate(self, part: Samples, totals: dict[str, Tensor]) -> Loss:
        algorithm, tensors = self._config.algorithm, part.tensors
        with computing(self._config.actor, self._device):
            evaluated = evaluation_in_float32(self._strategy.module(part.inputs, tensors["actions"]))
        values = evaluated.values if "returns" in tensors else None
        if values is not None:
            values = values[:, : tensors["returns"].shape[1]]
        entropy = sum_to_level(evaluated.entropy, algorithm.entropy_type)
        if not algorithm.entropy_bonus:
            entropy = entropy.detach()  # a metric only
        return self._loss(
            LossInputs(
                logprobs=sum_to_level(evaluated.logprobs, algorithm.logprob_type),
                old_logprobs=tensors["old_logprobs"],
                advantages=tensors["advantages"],
                entropy=entropy,
                mask=tensors.get("mask"),
                values=values,
                old_values=tensors.get("old_values"),
                returns=tensors.get("returns"),
                value_mask=tensors.get("value_mask"),
                **totals,
            ),
            self._settings,
        )


def _leading(mask: Tensor, dimensions: int) -> Tensor:
    """Return a mask with at most so many dimensions: a chunk counts when any of its actions does."""
    return mask if mask.dim() <= dimensions else mask.flatten(start_dim=dimensions).any(dim=-1) if dimensions else mask


def _local(tensor: Tensor) -> Tensor:
    """Return a tensor, or this rank's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_bad(tensor: Tensor) -> float:
    return float(tensor[~tensor.isfinite()].flatten()[0])
